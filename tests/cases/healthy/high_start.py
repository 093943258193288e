"""The scale starts at 2^28 and comes down in a dozen skipped steps, then the run is clean."""
# must not find: scale-collapse, gradient-overflow, forward-overflow, loss-in-half, scale-thrashing, scheduler-ahead
# verdict: no alarm

import torch
from torch import nn

torch.set_num_threads(1)
torch.manual_seed(15)

model = nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 4))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
scaler = torch.amp.GradScaler("cpu", init_scale=2.0**28)
x, y = torch.randn(64, 16), torch.randint(4, (64,))

for step in range(80):
    optimizer.zero_grad()
    with torch.autocast("cpu", dtype=torch.float16):
        logits = model(x)
    loss = nn.functional.cross_entropy(logits.float(), y)
    scaler.scale(loss).backward()
    scaler.step(optimizer)
    scaler.update()
    if step % 20 == 0:
        print(f"{step} {loss.item():.4f} scale 2^{torch.tensor(scaler.get_scale()).log2().item():.0f}")
