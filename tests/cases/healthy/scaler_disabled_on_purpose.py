"""One flag turns mixed precision off: autocast and scaler are both built with enabled=False."""
# must not find: autocast-inactive, missing-loss-scaling, scaler-without-fp16, step-bypasses-scaler
# verdict: no alarm

import torch
from torch import nn

torch.set_num_threads(1)
torch.manual_seed(37)
USE_AMP = False

model = nn.Sequential(nn.Linear(12, 32), nn.ReLU(), nn.Linear(32, 12))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
scaler = torch.amp.GradScaler("cpu", enabled=USE_AMP)
x = torch.randn(64, 12)
for step in range(40):
    optimizer.zero_grad()
    with torch.autocast("cpu", dtype=torch.float16, enabled=USE_AMP):
        loss = nn.functional.mse_loss(model(x), x)
    scaler.scale(loss).backward()
    scaler.unscale_(optimizer)
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    scaler.step(optimizer)
    scaler.update()
    if step % 10 == 0:
        print(step, loss.item())
