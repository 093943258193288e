"""A training loop of the detection kind leaves at its first NaN loss, so the bad step is also the last one."""
# must find: unlocated-nonfinite lead at <- stop
# must not find: nonfinite-input, forward-overflow, scale-collapse
# verdict: attention
# raises: Loss is nan

import math
import sys

import torch
from torch import nn

torch.set_num_threads(1)
torch.manual_seed(0)
model = nn.Sequential(nn.Linear(12, 64), nn.ReLU(), nn.Linear(64, 4))
criterion = nn.MSELoss()
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
scaler = torch.amp.GradScaler("cpu", init_scale=256.0)


def train(num_steps):
    for step in range(num_steps):
        images = torch.randn(8, 12) * (1 if step < 23 else 1e6)
        targets = torch.randn(8, 4)
        with torch.autocast("cpu", dtype=torch.float16):
            loss = criterion(model(images), targets)
        if not math.isfinite(loss.item()):
            print(f"Loss is {loss.item()}, stopping training", file=sys.stderr)
            sys.exit(1)  # <- stop
        optimizer.zero_grad()
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()


train(60)
