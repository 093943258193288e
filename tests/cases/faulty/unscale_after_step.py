"""unscale_ is called after scaler.step, to log the gradient norm; torch raises."""
# must find: double-unscale lead at <- unscale
# must not find: missing-update, clip-before-unscale, step-bypasses-scaler
# verdict: failing
# raises: RuntimeError

import torch
from torch import nn

torch.set_num_threads(1)
torch.manual_seed(49)

model = nn.Linear(32, 32)
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
scaler = torch.amp.GradScaler("cpu")


def gradient_norm(parameters):
    return torch.stack([p.grad.norm() for p in parameters]).norm().item()


for step in range(5):
    optimizer.zero_grad()
    x = torch.randn(16, 32)
    with torch.autocast("cpu", dtype=torch.float16):
        loss = (model(x).float() - x).pow(2).mean()
    scaler.scale(loss).backward()
    scaler.step(optimizer)
    scaler.unscale_(optimizer)  # <- unscale
    print(step, loss.item(), gradient_norm(model.parameters()))
    scaler.update()
