"""The loss is multiplied by 4,096 by hand; gradients are clipped at 1 first and divided by 4,096 after that."""
# must find: clip-before-unscale lead at <- clip
# must not find: missing-loss-scaling
# verdict: failing

import torch
from torch import nn

torch.set_num_threads(1)
torch.manual_seed(47)
SCALE = 4096.0

model = nn.Sequential(nn.Linear(16, 48), nn.ReLU(), nn.Linear(48, 4))
optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)
x, y = torch.randn(64, 16), torch.randn(64, 4) * 2

for step in range(40):
    optimizer.zero_grad()
    with torch.autocast("cpu", dtype=torch.float16):
        loss = nn.functional.mse_loss(model(x).float(), y)
    (loss * SCALE).backward()
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)  # <- clip
    for p in model.parameters():
        p.grad.div_(SCALE)
    optimizer.step()
    if step % 10 == 0:
        print(step, loss.item())
