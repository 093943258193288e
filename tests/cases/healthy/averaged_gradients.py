"""Micro-batch gradients are summed and divided by their number in place before the step, while still scaled."""
# must not find: clip-before-unscale, update-inside-accumulation, gradient-norm-overflow
# verdict: no alarm

import torch
from torch import nn

torch.set_num_threads(1)
torch.manual_seed(6)
MICRO = 3


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.a = nn.Linear(10, 32)
        self.b = nn.Linear(32, 2)

    def forward(self, x):
        return self.b(torch.relu(self.a(x)))


net = Net()
opt = torch.optim.SGD(net.parameters(), lr=0.05)
scaler = torch.amp.GradScaler("cpu", init_scale=2.0**13)
for _ in range(50):
    opt.zero_grad()
    for _ in range(MICRO):
        x = torch.randn(16, 10)
        with torch.autocast("cpu", dtype=torch.float16):
            out = net(x)
        scaler.scale(nn.functional.mse_loss(out.float(), x[:, :2])).backward()
    for p in net.parameters():
        p.grad.div_(MICRO)
    scaler.step(opt)
    scaler.update()
print("weights", sum(p.abs().sum() for p in net.parameters()).item())
