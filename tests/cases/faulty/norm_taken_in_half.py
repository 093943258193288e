"""Half gradients are clipped before they reach the FP32 masters: the norm is inf, so every gradient becomes zero."""
# must find: gradient-norm-overflow lead
# must not find: half-trainable-params, forward-overflow, nonfinite-weight, optimizer-eps-flushed
# verdict: failing

import torch
from torch import nn

torch.set_num_threads(1)
torch.manual_seed(77)

model = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 64)).half()
masters = [nn.Parameter(p.detach().float()) for p in model.parameters()]
optimizer = torch.optim.SGD(masters, lr=1e-4)
x = torch.randn(64, 64).half()
y = torch.randn(64, 64) * 30
SCALE = 2.0**11

for step in range(30):
    loss = (model(x).float() - y).pow(2).sum(1).mean()
    (loss * SCALE).backward()
    norm = nn.utils.clip_grad_norm_(model.parameters(), 1.0 * SCALE)
    for master, p in zip(masters, model.parameters(), strict=True):
        master.grad = p.grad.float() / SCALE
        p.grad = None
    optimizer.step()
    with torch.no_grad():
        for master, p in zip(masters, model.parameters(), strict=True):
            p.copy_(master)
    if step % 10 == 0:
        print(f"step {step} loss {loss.item():.2f} norm {norm.item()}")
