"""A standard deviation as sqrt(E[x^2] - E[x]^2) in half: what the difference leaves is rounding, also below zero."""
# must find: forward-overflow lead at <- root
# may find: critical-op-in-half, scale-collapse, never-applied
# must not find: reduction-overflow, epsilon-flushed, nonfinite-backward
# verdict: failing

import torch
from torch import nn

torch.set_num_threads(1)
torch.manual_seed(0)


class Standardise(nn.Module):
    def forward(self, x):
        mean = x.mean(1, keepdim=True)
        variance = (x * x).mean(1, keepdim=True) - mean * mean
        return (x - mean) / variance.sqrt()  # <- root


model = nn.Sequential(nn.Linear(10, 32), Standardise(), nn.ReLU(), nn.Linear(32, 3))
with torch.no_grad():
    model[0].bias.fill_(20.0)
    model[0].weight.mul_(0.01)
optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
scaler = torch.amp.GradScaler("cpu")
for _ in range(30):
    x, y = torch.randn(16, 10), torch.randint(3, (16,))
    with torch.autocast("cpu", dtype=torch.float16):
        loss = nn.functional.cross_entropy(model(x).float(), y)
    optimizer.zero_grad()
    scaler.scale(loss).backward()
    scaler.step(optimizer)
    scaler.update()
