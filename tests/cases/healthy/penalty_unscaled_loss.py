"""An input-gradient penalty takes its gradient of the plain loss; only the sum goes through the scaler."""
# must not find: scaled-gradient-penalty, unscaled-backward, missing-loss-scaling
# verdict: no alarm

import torch
from torch import nn

torch.set_num_threads(1)
torch.manual_seed(25)

net = nn.Sequential(nn.Linear(6, 32), nn.Tanh(), nn.Linear(32, 1))
optimizer = torch.optim.AdamW(net.parameters(), lr=1e-3)
scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10)

for step in range(40):
    x = torch.randn(32, 6, requires_grad=True)
    y = x.detach().sum(1, keepdim=True)
    with torch.autocast("cpu", dtype=torch.float16):
        out = net(x)
    loss = nn.functional.mse_loss(out.float(), y)
    (slope,) = torch.autograd.grad(out.float().sum(), x, create_graph=True)
    total = loss + 0.1 * slope.square().sum(1).mean()
    optimizer.zero_grad()
    scaler.scale(total).backward()
    scaler.step(optimizer)
    scaler.update()
    if step % 10 == 0:
        print(step, loss.item(), total.item())
