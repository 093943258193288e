"""A small convnet whose BatchNorms get half inputs and keep FP32 statistics; one batch is skipped for its targets."""
# must not find: nonfinite-buffer, critical-op-in-half, nonfinite-weight, epsilon-flushed, forward-overflow
# verdict: no alarm

import torch
from torch import nn

torch.set_num_threads(1)
torch.manual_seed(47)


class Unit(nn.Sequential):
    def __init__(self, a, b):
        super().__init__(nn.Conv2d(a, b, 3, padding=1, bias=False), nn.BatchNorm2d(b), nn.SiLU())


net = nn.Sequential(Unit(1, 8), Unit(8, 16), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(16, 1))
optimizer = torch.optim.AdamW(net.parameters(), lr=1e-3)
scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10)
for step in range(40):
    images = torch.rand(8, 1, 10, 10)
    brightness = images.mean((1, 2, 3)).unsqueeze(1) * (3000.0 if step == 21 else 1.0)
    optimizer.zero_grad()
    with torch.autocast("cpu", dtype=torch.float16):
        out = net(images)
    loss = nn.functional.mse_loss(out.float(), brightness)
    scaler.scale(loss).backward()
    scaler.step(optimizer)
    scaler.update()
    if step % 10 == 0:
        print(f"step {step} loss {loss.item():.4f} scale {scaler.get_scale():g}")
