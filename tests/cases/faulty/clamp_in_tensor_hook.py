"""A hook on every parameter clamps its gradient at 1 during backward, where it still carries the loss scale."""
# must find: clip-before-unscale lead at <- hook
# verdict: failing

import torch
from torch import nn

torch.set_num_threads(1)
torch.manual_seed(45)

model = nn.Sequential(nn.Linear(16, 48), nn.ReLU(), nn.Linear(48, 4))
for p in model.parameters():
    p.register_hook(lambda grad: torch.clamp(grad, -1.0, 1.0))  # <- hook
optimizer = torch.optim.SGD(model.parameters(), lr=1e-2, momentum=0.9)
scaler = torch.amp.GradScaler("cpu")
x, y = torch.randn(64, 16), torch.randn(64, 4) * 2

for step in range(40):
    optimizer.zero_grad()
    with torch.autocast("cpu", dtype=torch.float16):
        loss = nn.functional.mse_loss(model(x).float(), y)
    scaler.scale(loss).backward()
    scaler.step(optimizer)
    scaler.update()
    if step % 10 == 0:
        print(step, loss.item())
