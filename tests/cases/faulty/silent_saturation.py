"""A Linear overflows to inf, a sigmoid turns the inf into a plain 1, and the loss looks fine."""
# must find: forward-overflow lead at score
# must not find: scale-collapse, gradient-overflow, divergence
# verdict: failing

import torch
from torch import nn

torch.set_num_threads(1)
torch.manual_seed(8)


class Scorer(nn.Module):
    def __init__(self):
        super().__init__()
        self.body = nn.Linear(16, 32)
        self.score = nn.Linear(32, 4)
        self.out = nn.Linear(4, 1)

    def forward(self, x):
        h = torch.relu(self.body(x))
        gates = torch.sigmoid(self.score(h))
        return self.out(gates)


net = Scorer()
with torch.no_grad():
    net.score.weight[0] = 5e4
    net.score.weight[1:] *= 0.1
opt = torch.optim.SGD(net.parameters(), lr=0.01)
scaler = torch.amp.GradScaler("cpu", init_scale=256.0)
x = torch.randn(32, 16)
y = torch.randn(32, 1)

losses = []
for _ in range(40):
    opt.zero_grad()
    with torch.autocast("cpu", dtype=torch.float16):
        pred = net(x)
    loss = (pred.float() - y).square().mean()
    scaler.scale(loss).backward()
    scaler.step(opt)
    scaler.update()
    losses.append(loss.item())
print(f"first {losses[0]:.4f} last {losses[-1]:.4f}")
