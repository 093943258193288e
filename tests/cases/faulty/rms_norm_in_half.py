"""A hand-written RMS norm squares in half: the mean is inf, its rsqrt is 0, and the output is silently all zero."""
# must find: reduction-overflow lead at <- square
# must not find: forward-overflow, gradient-overflow, scale-collapse, epsilon-flushed
# verdict: failing

import torch
from torch import nn

torch.set_num_threads(1)
torch.manual_seed(17)


class RMSNorm(nn.Module):
    def __init__(self, dim, eps=1e-3):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(dim))
        self.eps = eps

    def forward(self, x):
        variance = x.pow(2).mean(-1, keepdim=True)  # <- square
        return x * torch.rsqrt(variance + self.eps) * self.weight.to(x.dtype)


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.up = nn.Linear(16, 32)
        self.norm = RMSNorm(32)
        self.side = nn.Linear(16, 32)
        self.out = nn.Linear(32, 4)

    def forward(self, x):
        return self.out(self.norm(self.up(x)) + self.side(x))


net = Net()
nn.init.constant_(net.up.bias, 300.0)
optimizer = torch.optim.SGD(net.parameters(), lr=0.05)
scaler = torch.amp.GradScaler("cpu", init_scale=512.0)
x = torch.randn(64, 16)
labels = torch.randint(4, (64,))
for step in range(40):
    optimizer.zero_grad()
    with torch.autocast("cpu", dtype=torch.float16):
        logits = net(x)
    loss = nn.functional.cross_entropy(logits.float(), labels)
    scaler.scale(loss).backward()
    scaler.step(optimizer)
    scaler.update()
    if step % 10 == 0:
        print("loss", round(loss.item(), 4))
