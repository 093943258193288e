"""The loss is summed over 2,048 elements, so the scale settles below 1; that is where it belongs."""
# must not find: scale-collapse, scale-thrashing, gradient-overflow, forward-overflow, loss-in-half
# verdict: no alarm

import torch
from torch import nn

torch.set_num_threads(1)
torch.manual_seed(31)

model = nn.Sequential(nn.Linear(32, 32), nn.ReLU(), nn.Linear(32, 32))
optimizer = torch.optim.SGD(model.parameters(), lr=1e-8)
scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
x = torch.randn(64, 32)
y = 400 * torch.randn(64, 32)
for step in range(60):
    optimizer.zero_grad()
    with torch.autocast("cpu", dtype=torch.float16):
        out = model(x)
    loss = ((out.float() - y) ** 2).sum()
    scaler.scale(loss).backward()
    scaler.step(optimizer)
    scaler.update()
    if step % 15 == 0:
        print(step, loss.item(), scaler.get_scale())
