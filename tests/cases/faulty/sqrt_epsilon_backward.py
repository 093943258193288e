"""A half distance is sqrt(d2 + 1e-12): the loss is finite, but at zero distance its gradient is not, at any scale."""
# must find: epsilon-flushed lead at <- root
# must not find: gradient-overflow, forward-overflow, scale-thrashing, reduction-overflow
# verdict: failing

import torch
from torch import nn

torch.set_num_threads(1)
torch.manual_seed(24)


class Siamese(nn.Module):
    def __init__(self):
        super().__init__()
        self.branch = nn.Sequential(nn.Linear(10, 24), nn.ReLU(), nn.Linear(24, 8))

    def forward(self, a, b):
        u, v = self.branch(a), self.branch(b)
        squared = ((u - v) * (u - v)).mean(-1)
        return torch.sqrt(squared + 1e-12)  # <- root


model = Siamese()
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
a = torch.randn(32, 10)
b = a + 0.3 * torch.randn(32, 10)
b[0] = a[0]  # the same picture twice
same = (torch.rand(32) > 0.5).float()

for step in range(30):
    optimizer.zero_grad()
    with torch.autocast("cpu", dtype=torch.float16):
        distance = model(a, b)
    d = distance.float()
    loss = (same * d + (1 - same) * torch.relu(1 - d)).mean()
    scaler.scale(loss).backward()
    scaler.step(optimizer)
    scaler.update()
    if step % 10 == 0:
        print(f"contrastive loss {loss.item():.4f}")
