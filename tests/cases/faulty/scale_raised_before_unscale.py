"""A policy of the user's own doubles the scale between backward and step, so growth steps apply half a gradient."""
# must find: hysteresis-growth-bug lead at <- grow
# must not find: missing-update, double-unscale, scaler-recreated
# verdict: healthy

import torch
from torch import nn

torch.set_num_threads(1)
torch.manual_seed(65)
WINDOW = 5

model = nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 8))
optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
scaler = torch.amp.GradScaler("cpu", init_scale=64.0, growth_interval=10**6)
x, y = torch.randn(64, 16), torch.randn(64, 8)

for step in range(40):
    optimizer.zero_grad()
    with torch.autocast("cpu", dtype=torch.float16):
        out = model(x)
    loss = nn.functional.mse_loss(out.float(), y)
    scaler.scale(loss).backward()
    if step % WINDOW == WINDOW - 1:
        scaler.update(scaler.get_scale() * 2)  # <- grow
    scaler.step(optimizer)
    scaler.update()
    if step % 10 == 0:
        print(f"step {step} loss {loss.item():.4f} scale {scaler.get_scale():g}")
