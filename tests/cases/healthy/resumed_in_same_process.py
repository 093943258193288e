"""A checkpoint is written and read back within one process: new objects, each with the state of the old one."""
# must not find: resume-reset-scale, scaler-recreated, several-scalers
# verdict: no alarm

import io

import torch
from torch import nn

torch.set_num_threads(1)
torch.manual_seed(43)
x, y = torch.randn(64, 16), torch.randn(64, 4)


def build(**settings):
    model = nn.Sequential(nn.Linear(16, 48), nn.ReLU(), nn.Linear(48, 4))
    return model, torch.optim.Adam(model.parameters(), lr=1e-3), torch.amp.GradScaler("cpu", **settings)


def train(model, optimizer, scaler, steps):
    for step in range(steps):
        optimizer.zero_grad()
        with torch.autocast("cpu", dtype=torch.float16):
            loss = nn.functional.mse_loss(model(x).float(), y)
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        if step % 10 == 0:
            print(step, loss.item())


parts = build(init_scale=1024.0)
train(*parts, steps=20)
checkpoint = io.BytesIO()
torch.save([part.state_dict() for part in parts], checkpoint)
checkpoint.seek(0)
parts = build()
for part, state in zip(parts, torch.load(checkpoint), strict=True):
    part.load_state_dict(state)
train(*parts, steps=20)
