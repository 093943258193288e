"""The loss rises several steps in a row after the learning rate warms up, stays finite and recovers."""
# must not find: divergence, scale-collapse, gradient-overflow, forward-overflow
# verdict: no alarm

import torch
from torch import nn

torch.set_num_threads(1)
torch.manual_seed(45)

model = nn.Linear(8, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
scaler = torch.amp.GradScaler("cpu", init_scale=64.0)
x = torch.randn(64, 8)
y = x @ torch.randn(8, 1) + 0.5 * torch.randn(64, 1)
for step in range(70):
    for group in optimizer.param_groups:
        group["lr"] = 0.75 if 20 <= step < 27 else 0.05
    optimizer.zero_grad()
    with torch.autocast("cpu", dtype=torch.float16):
        out = model(x)
    loss = nn.functional.mse_loss(out.float(), y)
    scaler.scale(loss).backward()
    scaler.step(optimizer)
    scaler.update()
    if step % 5 == 0:
        print(step, loss.item())
