"""Value clipping behind unscale_, with a scale that now and then overflows: the scaler still sees every inf."""
# must not find: clip-before-unscale, gradient-norm-overflow, scale-thrashing, gradient-overflow
# verdict: no alarm

import torch
from torch import nn

torch.set_num_threads(1)
torch.manual_seed(4)
model = nn.Sequential(nn.Linear(16, 64), nn.ReLU(), nn.Linear(64, 1))
optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
scaler = torch.amp.GradScaler("cpu", growth_interval=12)
x, y = torch.randn(64, 16), 3 + torch.randn(64, 1)
for step in range(70):
    optimizer.zero_grad()
    with torch.autocast("cpu", dtype=torch.float16):
        out = model(x)
    loss = nn.functional.mse_loss(out.float(), y)
    scaler.scale(loss).backward()
    scaler.unscale_(optimizer)
    nn.utils.clip_grad_value_(model.parameters(), 0.5)
    scaler.step(optimizer)
    scaler.update()
    if step % 10 == 0:
        print(f"step {step} loss {loss.item():.3f} scale {scaler.get_scale():g}")
