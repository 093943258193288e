"""Gradients are clamped through .data, which torch does not count as a change, before they are unscaled."""
# must find: clip-before-unscale lead at <- clamp
# verdict: failing

import torch
from torch import nn

torch.set_num_threads(1)
torch.manual_seed(46)

model = nn.Sequential(nn.Linear(16, 48), nn.ReLU(), nn.Linear(48, 4))
optimizer = torch.optim.SGD(model.parameters(), lr=1e-2, momentum=0.9)
scaler = torch.amp.GradScaler("cpu")

for step in range(40):
    x, y = torch.randn(64, 16), torch.randn(64, 4) * 2
    with torch.autocast("cpu", dtype=torch.float16):
        loss = nn.functional.mse_loss(model(x).float(), y)
    scaler.scale(loss).backward()
    for p in model.parameters():
        p.grad.data.clamp_(-0.5, 0.5)  # <- clamp
    scaler.step(optimizer)
    scaler.update()
    for p in model.parameters():
        p.grad = None
    if step % 10 == 0:
        print(step, loss.item())
