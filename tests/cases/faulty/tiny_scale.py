"""The scale starts at 1 and never grows within the run, while most gradients are below what FP16 can hold."""
# must find: gradient-underflow lead
# must not find: forward-overflow, missing-loss-scaling, gradient-overflow, scale-collapse
# may find: scale-never-grew
# verdict: attention

import torch
from torch import nn

torch.set_num_threads(1)
torch.manual_seed(76)

blocks = [layer for _ in range(5) for layer in (nn.Linear(48, 48), nn.Tanh())]
model = nn.Sequential(*blocks, nn.Linear(48, 8))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
scaler = torch.amp.GradScaler("cpu", init_scale=1.0)
x, y = torch.randn(256, 48), torch.randn(256, 8)
for step in range(40):
    optimizer.zero_grad()
    with torch.autocast("cpu", dtype=torch.float16):
        out = model(x)
    loss = nn.functional.mse_loss(out.float(), y) * 1e-3
    scaler.scale(loss).backward()
    scaler.step(optimizer)
    scaler.update()
    if step % 10 == 0:
        print(f"{step} {loss.item():.3e}")
