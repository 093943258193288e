"""A residual stream doubles with depth until the sum of two branches passes 65,504."""
# must find: forward-overflow lead at <- residual
# must not find: gradient-overflow, scale-thrashing
# verdict: failing

import torch
from torch import nn

torch.set_num_threads(1)
torch.manual_seed(7)


class TwoBranch(nn.Module):
    """Forward and backward scan over the sequence, summed."""

    def __init__(self, dim):
        super().__init__()
        self.fwd = nn.Linear(dim, dim, bias=False)
        self.bwd = nn.Linear(dim, dim, bias=False)
        nn.init.eye_(self.fwd.weight)
        nn.init.eye_(self.bwd.weight)

    def forward(self, x):
        return x + self.fwd(x) + self.bwd(x.flip(0)).flip(0)  # <- residual


class Scan(nn.Module):
    def __init__(self, dim=16, depth=12):
        super().__init__()
        self.inp = nn.Linear(dim, dim)
        self.blocks = nn.ModuleList(TwoBranch(dim) for _ in range(depth))
        self.head = nn.Linear(dim, 3)

    def forward(self, x):
        x = self.inp(x)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


model = Scan()
optimizer = torch.optim.Adam(model.parameters(), lr=1e-5)
scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
x = torch.randn(20, 16)
y = torch.randint(3, (20,))
for _ in range(30):
    optimizer.zero_grad()
    with torch.autocast("cpu", dtype=torch.float16):
        out = model(x)
    loss = nn.functional.cross_entropy(out.float() / 1e4, y)
    scaler.scale(loss).backward()
    scaler.step(optimizer)
    scaler.update()
print("done", loss.item())
