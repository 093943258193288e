"""Half weights near one and a small learning rate: the updates round away and nothing moves."""
# must find: swallowed-updates
# must find: half-trainable-params
# must not find: nonfinite-weight, optimizer-eps-flushed, forward-overflow, divergence
# verdict: failing

import torch
from torch import nn

torch.set_num_threads(1)
torch.manual_seed(39)


class Scale(nn.Module):
    """One gain per channel around a half Linear."""

    def __init__(self, dim):
        super().__init__()
        self.gain = nn.Parameter(torch.ones(dim))
        self.linear = nn.Linear(dim, dim)

    def forward(self, x):
        return self.linear(x) * self.gain


model = nn.Sequential(Scale(32), Scale(32)).half()
for layer in model:
    layer.linear.weight.data.mul_(0.5).add_(1.0)
optimizer = torch.optim.SGD(model.parameters(), lr=1e-4)
x = torch.randn(64, 32).half() * 0.03
y = torch.randn(64, 32) * 0.1

for step in range(60):
    loss = (model(x).float() - y).pow(2).mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    if step % 20 == 0:
        print(step, f"{loss.item():.6f}", model[0].gain.mean().item())
