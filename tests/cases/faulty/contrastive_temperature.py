"""A CLIP-style loss exponentiates a learned temperature in half; the parameter has grown past ln(65504)."""
# must find: forward-overflow lead at <- temperature
# must not find: gradient-overflow, attention-logits-overflow, masked-row
# verdict: failing

import torch
from torch import nn
from torch.nn import functional as F

torch.set_num_threads(1)
torch.manual_seed(4)

image_tower = nn.Sequential(nn.Linear(20, 32), nn.GELU(), nn.Linear(32, 16))
text_tower = nn.Sequential(nn.Linear(12, 32), nn.GELU(), nn.Linear(32, 16))
logit_scale = nn.Parameter(torch.tensor(11.3))


def clip_loss(images, texts):
    a = F.normalize(image_tower(images).float(), dim=-1)
    b = F.normalize(text_tower(texts).float(), dim=-1)
    similarity = a.half() @ b.half().t()
    logits = logit_scale.half().exp() * similarity  # <- temperature
    target = torch.arange(len(images))
    return (F.cross_entropy(logits.float(), target) + F.cross_entropy(logits.float().t(), target)) / 2


params = [*image_tower.parameters(), *text_tower.parameters(), logit_scale]
optimizer = torch.optim.AdamW(params, lr=2e-3)
scaler = torch.amp.GradScaler("cpu")
images, texts = torch.randn(24, 20), torch.randn(24, 12)

for step in range(30):
    optimizer.zero_grad()
    with torch.autocast("cpu", dtype=torch.float16):
        loss = clip_loss(images, texts)
    scaler.scale(loss).backward()
    scaler.step(optimizer)
    scaler.update()
    if step % 10 == 0:
        print(step, loss.item(), logit_scale.item())
