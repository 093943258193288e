"""growth_interval=10: the scale climbs, overflows once, halves, and climbs again."""
# must not find: scale-thrashing, gradient-overflow, scale-collapse, scale-decay, forward-overflow, unlocated-nonfinite
# verdict: no alarm

import torch
from torch import nn

torch.set_num_threads(1)
torch.manual_seed(16)


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.stem = nn.Linear(16, 32)
        self.head = nn.Linear(32, 1)

    def forward(self, x):
        return self.head(torch.relu(self.stem(x)))


net = Net()
optimizer = torch.optim.SGD(net.parameters(), lr=1e-4)
scaler = torch.amp.GradScaler("cpu", init_scale=2.0**15, growth_interval=10)
x, y = torch.randn(64, 16), torch.randn(64, 1)
for step in range(80):
    optimizer.zero_grad()
    with torch.autocast("cpu", dtype=torch.float16):
        out = net(x)
    loss = (out.float() - y).pow(2).mean()
    scaler.scale(loss).backward()
    scaler.step(optimizer)
    scaler.update()
    if step % 10 == 0:
        print(step, loss.item(), scaler.get_scale())
