"""Sharpness-aware minimisation: two scaled backwards a step, the first only to find the perturbation."""
# must not find: clip-before-unscale, update-inside-accumulation, double-unscale, step-bypasses-scaler, missing-update
# verdict: no alarm

import torch
from torch import nn

torch.set_num_threads(1)
torch.manual_seed(26)
RHO = 0.05

model = nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 3))
params = list(model.parameters())
optimizer = torch.optim.SGD(params, lr=0.05, momentum=0.9)
scaler = torch.amp.GradScaler("cpu", init_scale=2.0**12)
x, y = torch.randn(64, 16), torch.randint(3, (64,))


def scaled_backward():
    with torch.autocast("cpu", dtype=torch.float16):
        logits = model(x)
    loss = nn.functional.cross_entropy(logits.float(), y)
    scaler.scale(loss).backward()
    return loss.item()


for step in range(40):
    optimizer.zero_grad()
    loss = scaled_backward()
    with torch.no_grad():
        norm = torch.stack([p.grad.norm() for p in params]).norm()
        climb = [p.grad * (RHO / norm) for p in params]
        for p, e in zip(params, climb, strict=True):
            p.add_(e)
    optimizer.zero_grad()
    scaled_backward()
    with torch.no_grad():
        for p, e in zip(params, climb, strict=True):
            p.sub_(e)
    scaler.step(optimizer)
    scaler.update()
    if step % 10 == 0:
        print(f"step {step} loss {loss:.4f}")
