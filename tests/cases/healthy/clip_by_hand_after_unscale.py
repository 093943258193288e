"""A hand-written clip multiplies every .grad in place, after unscale_."""
# must not find: clip-before-unscale, gradient-norm-overflow, double-unscale
# verdict: no alarm

import torch
from torch import nn

torch.set_num_threads(1)
torch.manual_seed(3)


def limit_gradients(parameters, limit):
    grads = [p.grad for p in parameters if p.grad is not None]
    norm = torch.sqrt(sum((g.double() ** 2).sum() for g in grads)).item()
    if norm > limit:
        for g in grads:
            g.mul_(limit / norm)


model = nn.Sequential(nn.Linear(12, 32), nn.ELU(), nn.Linear(32, 3))
opt = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
scaler = torch.amp.GradScaler("cpu", init_scale=2.0**14)
x, y = torch.randn(96, 12), torch.randint(3, (96,))
for step in range(60):
    batch = torch.randint(96, (32,))
    with torch.autocast("cpu", dtype=torch.float16):
        logits = model(x[batch])
    loss = nn.functional.cross_entropy(logits.float(), y[batch])
    scaler.scale(loss).backward()
    scaler.unscale_(opt)
    limit_gradients(list(model.parameters()), 0.2)
    scaler.step(opt)
    scaler.update()
    opt.zero_grad()
    if step % 15 == 0:
        print(f"{step} {loss.item():.4f}")
