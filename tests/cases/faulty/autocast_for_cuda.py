"""Autocast and scaler are written for cuda while the model is on the CPU: mixed precision is silently off."""
# must find: autocast-inactive lead
# must not find: forward-overflow, missing-loss-scaling, scaler-without-fp16, unscaled-backward
# verdict: attention

import warnings

import torch
from torch import nn

warnings.filterwarnings("ignore")
torch.set_num_threads(1)
torch.manual_seed(68)

model = nn.Sequential(nn.Linear(12, 32), nn.ReLU(), nn.Linear(32, 12))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
scaler = torch.amp.GradScaler("cuda")
x = torch.randn(64, 12)

for step in range(40):
    optimizer.zero_grad()
    with torch.autocast("cuda", dtype=torch.float16):
        loss = nn.functional.mse_loss(model(x), x)
    scaler.scale(loss).backward()
    scaler.step(optimizer)
    scaler.update()
    if step % 10 == 0:
        print(step, loss.item())
