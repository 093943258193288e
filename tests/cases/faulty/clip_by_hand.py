"""A hand-written clip multiplies every .grad in place by limit / norm while the gradients are still scaled."""
# must find: clip-before-unscale lead at <- clip
# must not find: gradient-norm-overflow, step-bypasses-scaler, unscaled-backward
# verdict: failing

import torch
from torch import nn

torch.set_num_threads(1)
torch.manual_seed(45)


def limit_gradients(parameters, limit):
    grads = [p.grad for p in parameters if p.grad is not None]
    norm = torch.sqrt(sum((g.double() ** 2).sum() for g in grads)).item()
    if norm > limit:
        for g in grads:
            g.mul_(limit / norm)  # <- clip
    return norm


model = nn.Sequential(nn.Linear(12, 32), nn.ELU(), nn.Linear(32, 32), nn.ELU(), nn.Linear(32, 3))
opt = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
scaler = torch.amp.GradScaler("cpu", init_scale=2.0**14)
x = torch.randn(96, 12)
y = torch.randint(3, (96,))
for step in range(60):
    batch = torch.randint(96, (32,))
    with torch.autocast("cpu", dtype=torch.float16):
        logits = model(x[batch])
    loss = nn.functional.cross_entropy(logits.float(), y[batch])
    scaler.scale(loss).backward()
    limit_gradients(list(model.parameters()), 1.0)
    scaler.step(opt)
    scaler.update()
    opt.zero_grad()
    if step % 15 == 0:
        print(f"{step} {loss.item():.4f}")
