"""A hand-written RMS norm goes to FP32 before it squares activations of 300, and a dice loss sums in FP32."""
# must not find: reduction-overflow, forward-overflow, epsilon-flushed, critical-op-in-half
# verdict: no alarm

import torch
from torch import nn

torch.set_num_threads(1)
torch.manual_seed(40)


class RMSNorm(nn.Module):
    def __init__(self, dim, eps=1e-6):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(dim))
        self.eps = eps

    def forward(self, x):
        wide = x.float()
        return (wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + self.eps)).to(x.dtype) * self.weight


def dice_loss(logits, mask, smooth=1.0):
    probability = torch.sigmoid(logits.float())
    overlap = (probability * mask).sum()
    return 1 - (2 * overlap + smooth) / (probability.sum() + mask.sum() + smooth)


net = nn.Sequential(nn.Linear(16, 32), RMSNorm(32), nn.Linear(32, 400))
nn.init.constant_(net[0].bias, 300.0)
optimizer = torch.optim.SGD(net.parameters(), lr=0.05)
scaler = torch.amp.GradScaler("cpu")
x = torch.randn(256, 16)
mask = (torch.rand(256, 400) > 0.3).float()
for step in range(30):
    optimizer.zero_grad()
    with torch.autocast("cpu", dtype=torch.float16):
        logits = net(x)
        loss = dice_loss(logits, mask)
    scaler.scale(loss).backward()
    scaler.step(optimizer)
    scaler.update()
    if step % 10 == 0:
        print("dice loss", round(loss.item(), 4))
