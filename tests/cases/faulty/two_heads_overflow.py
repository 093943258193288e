"""Two task heads overflow independently of each other: a product in one, a Linear in the other."""
# must find: forward-overflow lead at <- area
# must find: forward-overflow at depth
# must not find: gradient-overflow, scale-thrashing
# verdict: failing

import torch
from torch import nn

torch.set_num_threads(1)
torch.manual_seed(21)


class MultiTask(nn.Module):
    def __init__(self):
        super().__init__()
        self.trunk = nn.Sequential(nn.Linear(16, 32), nn.Tanh())
        self.width = nn.Linear(32, 1)
        self.height = nn.Linear(32, 1)
        self.depth = nn.Linear(32, 1)

    def forward(self, x):
        h = self.trunk(x)
        w, hgt = self.width(h), self.height(h)
        area = w * hgt  # <- area
        return area, self.depth(h)


model = MultiTask()
with torch.no_grad():
    model.width.bias.fill_(640.0)
    model.height.bias.fill_(480.0)
    model.trunk[0].bias[0] = 9.0
    model.depth.weight[0, 0] = 5e4
    model.depth.bias.fill_(4e4)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
scaler = torch.amp.GradScaler("cpu")
x = torch.randn(32, 16)

for _ in range(30):
    optimizer.zero_grad()
    with torch.autocast("cpu", dtype=torch.float16):
        area, depth = model(x)
    loss_area = (area.float() / 3e5 - 1).pow(2).mean()
    loss_depth = (depth.float() / 1e5 - 1).abs().mean()
    scaler.scale(loss_area + 0.5 * loss_depth).backward()
    scaler.step(optimizer)
    scaler.update()
print(loss_area.item(), loss_depth.item())
