"""The schedule advances on every step; two start-up skips of eighty are a trivial share."""
# must not find: scheduler-ahead, never-applied, gradient-overflow
# verdict: no alarm

import torch
from torch import nn

torch.set_num_threads(1)
torch.manual_seed(22)

model = nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 4))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=3e-3, total_steps=81)
scaler = torch.amp.GradScaler("cpu", init_scale=2.0**20)
x, y = torch.randn(64, 16), torch.randint(4, (64,))
for step in range(80):
    optimizer.zero_grad()
    with torch.autocast("cpu", dtype=torch.float16):
        logits = model(x)
    loss = nn.functional.cross_entropy(logits.float(), y)
    scaler.scale(loss).backward()
    scaler.step(optimizer)
    scaler.update()
    schedule.step()
    if step % 20 == 0:
        print(f"{step} lr {schedule.get_last_lr()[0]:.1e} loss {loss.item():.4f}")
