"""Probabilities are clamped to 1 - 1e-6 in half, which is exactly 1, and log1p(-1) is -inf."""
# must find: epsilon-flushed lead at <- clamp
# must not find: gradient-overflow, reduction-overflow, masked-row
# verdict: failing

import torch
from torch import nn

torch.set_num_threads(1)
torch.manual_seed(23)


def binary_nll(logits, target):
    p = torch.sigmoid(logits).clamp(1e-4, 1 - 1e-6)  # <- clamp
    return -(target * torch.log(p) + (1 - target) * torch.log1p(-p)).float().mean()


tagger = nn.Sequential(nn.Linear(16, 32), nn.Tanh(), nn.Linear(32, 3))
nn.init.constant_(tagger[2].bias, 9.0)
optimizer = torch.optim.AdamW(tagger.parameters(), lr=1e-3)
scaler = torch.amp.GradScaler("cpu")
x = torch.randn(32, 16)
target = (torch.rand(32, 3) > 0.5).half()

for step in range(30):
    optimizer.zero_grad()
    with torch.autocast("cpu", dtype=torch.float16):
        loss = binary_nll(tagger(x), target)
    scaler.scale(loss).backward()
    scaler.step(optimizer)
    scaler.update()
    if not step % 10:
        print("nll", loss.item())
