"""Normalisation, clamping and division with constants that half can hold, and FP32 where it cannot."""
# must not find: epsilon-flushed, nonfinite-backward, reduction-overflow, loss-in-half
# verdict: no alarm

import torch
import torch.nn.functional as F
from torch import nn

torch.set_num_threads(1)
torch.manual_seed(38)


class Embedder(nn.Module):
    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(12, 32), nn.ReLU(), nn.Linear(32, 16))

    def forward(self, x):
        h = self.net(x)
        h = h / (h.abs().mean(-1, keepdim=True) + 1e-3)
        return F.normalize(h.float(), dim=-1)


def binary_nll(logits, target):
    p = torch.sigmoid(logits.float()).clamp(1e-6, 1 - 1e-6)
    return -(target * p.log() + (1 - target) * torch.log1p(-p)).mean()


model = Embedder()
optimizer = torch.optim.Adam(model.parameters(), lr=1e-3, eps=1e-8)
scaler = torch.amp.GradScaler("cpu", init_scale=2.0**12)
x, other = torch.randn(40, 12), torch.randn(40, 12)
same = torch.randint(2, (40,)).float()
for step in range(40):
    optimizer.zero_grad()
    with torch.autocast("cpu", dtype=torch.float16):
        a, b = model(x), model(other)
    loss = binary_nll(4 * (a * b).sum(-1), same)
    scaler.scale(loss).backward()
    scaler.step(optimizer)
    scaler.update()
    if step % 10 == 0:
        print(step, loss.item())
