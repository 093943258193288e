"""A fused Adam: its step runs even on the few steps that the scaler skips inside the kernel."""
# must not find: step-bypasses-scaler, never-applied, clip-before-unscale, scheduler-ahead, nonfinite-weight
# verdict: no alarm

import torch
from torch import nn

torch.set_num_threads(1)
torch.manual_seed(19)

model = nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 4))
optimizer = torch.optim.Adam(model.parameters(), lr=1e-3, fused=True)
scaler = torch.amp.GradScaler("cpu", init_scale=2.0**21)
x, y = torch.randn(64, 16), torch.randint(4, (64,))
for step in range(60):
    optimizer.zero_grad()
    with torch.autocast("cpu", dtype=torch.float16):
        logits = model(x)
    loss = nn.functional.cross_entropy(logits.float(), y)
    scaler.scale(loss).backward()
    scaler.step(optimizer)
    scaler.update()
    if step % 20 == 0:
        print(step, loss.item())
