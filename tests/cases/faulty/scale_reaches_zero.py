"""Bad data halves the scale 150 times; the next good batch is divided by a scale that is zero."""
# must find: nonfinite-input lead
# must find: scale-zero
# must not find: forward-overflow, divergence, gradient-overflow
# verdict: failing

import torch
from torch import nn

torch.set_num_threads(1)
torch.manual_seed(74)
net = nn.Linear(8, 4)
optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
scaler = torch.amp.GradScaler("cpu", init_scale=4.0)

for step in range(170):
    x = torch.randn(8, 8)
    if 5 <= step < 165:
        x[0, 0] = float("inf")
    optimizer.zero_grad()
    with torch.autocast("cpu", dtype=torch.float16):
        out = net(x)
    loss = out.float().square().mean()
    scaler.scale(loss).backward()
    scaler.step(optimizer)
    scaler.update()
    if step % 40 == 0:
        print(step, loss.item(), scaler.get_scale())
