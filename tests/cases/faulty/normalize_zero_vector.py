"""F.normalize runs on half features with its default eps of 1e-12, which is zero in half, and meets a zero vector."""
# must find: epsilon-flushed lead at <- normalize
# must not find: forward-overflow, gradient-overflow, reduction-overflow
# verdict: failing

import torch
import torch.nn.functional as F
from torch import nn

torch.set_num_threads(1)
torch.manual_seed(22)


class Embedder(nn.Module):
    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(12, 32), nn.ReLU(), nn.Linear(32, 16, bias=False), nn.ReLU())

    def forward(self, x):
        return F.normalize(self.net(x), dim=-1)  # <- normalize


model = Embedder()
proxies = nn.Parameter(torch.randn(5, 16))
optimizer = torch.optim.Adam([*model.parameters(), proxies], lr=1e-3)
scaler = torch.amp.GradScaler("cpu")
x = torch.randn(40, 12)
x[3] = 0.0
model.net[0].bias.data.zero_()
y = torch.randint(5, (40,))

for step in range(30):
    optimizer.zero_grad()
    with torch.autocast("cpu", dtype=torch.float16):
        z = model(x)
        logits = 8.0 * (z @ F.normalize(proxies, dim=-1).t())
        loss = F.cross_entropy(logits.float(), y)
    scaler.scale(loss).backward()
    scaler.step(optimizer)
    scaler.update()
    if step % 10 == 0:
        print(f"step {step}: {loss.item():.3f}")
