"""A dice loss adds up a whole mask in half: 90,000 pixels near one do not fit."""
# must find: reduction-overflow lead at <- sums
# must not find: forward-overflow, gradient-overflow, epsilon-flushed
# verdict: failing

import torch
from torch import nn

torch.set_num_threads(1)
torch.manual_seed(26)


def dice_loss(prob, mask, smooth=1.0):
    overlap = (prob * mask).flatten().sum()  # <- sums
    total = prob.flatten().sum() + mask.flatten().sum()  # also too large
    return 1 - (2 * overlap + smooth) / (total + smooth)


segmenter = nn.Sequential(nn.Conv2d(1, 4, 3, padding=1), nn.ReLU(), nn.Conv2d(4, 1, 1))
nn.init.constant_(segmenter[2].bias, 6.0)
optimizer = torch.optim.Adam(segmenter.parameters(), lr=1e-3)
scaler = torch.amp.GradScaler("cpu")
image = torch.rand(1, 1, 300, 300)
mask = torch.ones(1, 1, 300, 300, dtype=torch.float16)
mask[..., :40] = 0

for step in range(12):
    optimizer.zero_grad()
    with torch.autocast("cpu", dtype=torch.float16):
        prob = torch.sigmoid(segmenter(image))
        loss = dice_loss(prob, mask)
    scaler.scale(loss).backward()
    scaler.step(optimizer)
    scaler.update()
    if step % 4 == 0:
        print(f"step {step} dice loss {loss.item()}")
