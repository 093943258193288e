"""The scale starts at 2^40: the first half of the run is skipped while the schedule runs on."""
# must find: scheduler-ahead lead at <- schedule
# must not find: forward-overflow, scale-collapse, gradient-overflow, never-applied
# verdict: attention

import torch
from torch import nn

torch.set_num_threads(1)
torch.manual_seed(63)

TOTAL, WARMUP = 50, 15
model = nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 4))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
schedule = torch.optim.lr_scheduler.LambdaLR(
    optimizer, lambda step: min(1.0, (step + 1) / WARMUP) * max(0.0, 1 - step / TOTAL)
)
scaler = torch.amp.GradScaler("cpu", init_scale=2.0**40)
x, y = torch.randn(64, 16), torch.randint(4, (64,))

for step in range(TOTAL):
    optimizer.zero_grad()
    with torch.autocast("cpu", dtype=torch.float16):
        logits = model(x)
    loss = nn.functional.cross_entropy(logits.float(), y)
    scaler.scale(loss).backward()
    scaler.step(optimizer)
    scaler.update()
    schedule.step()  # <- schedule
    if step % 10 == 0:
        print(f"step {step} lr {schedule.get_last_lr()[0]:.2e} loss {loss.item():.4f}")
