"""The optimizer is built before the model is replaced by a copy; it holds parameters nobody uses any more."""
# must find: optimizer-without-gradients lead at <- step
# must not find: unscaled-backward, missing-update, half-trainable-params
# verdict: failing
# raises: AssertionError

import copy

import torch
from torch import nn

torch.set_num_threads(1)
torch.manual_seed(60)


def prepare(model):
    return copy.deepcopy(model)  # what moving to another device did


model = nn.Sequential(nn.Linear(6, 24), nn.Tanh(), nn.Linear(24, 2))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
model = prepare(model)
scaler = torch.amp.GradScaler("cpu")

for epoch in range(4):
    for batch in torch.randn(32, 6).split(8):
        optimizer.zero_grad()
        with torch.autocast("cpu", dtype=torch.float16):
            out = model(batch)
        loss = out.float().pow(2).mean()
        scaler.scale(loss).backward()
        scaler.step(optimizer)  # <- step
        scaler.update()
    print("epoch", epoch, loss.item())
