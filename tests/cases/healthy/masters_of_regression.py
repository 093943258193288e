"""A half model and FP32 masters that get their gradients as copies, divided by the scale of the loss."""
# must not find: missing-loss-scaling, clip-before-unscale, half-trainable-params, step-bypasses-scaler
# verdict: no alarm

import torch
from torch import nn

torch.set_num_threads(1)
torch.manual_seed(44)
SCALE = 512.0

model = nn.Sequential(nn.Linear(16, 48), nn.ReLU(), nn.Linear(48, 4)).half()
masters = [p.detach().clone().float().requires_grad_() for p in model.parameters()]
optimizer = torch.optim.AdamW(masters, lr=1e-3)
x, y = torch.randn(64, 16).half(), torch.randn(64, 4)

for step in range(40):
    model.zero_grad()
    loss = nn.functional.mse_loss(model(x).float(), y)
    (loss * SCALE).backward()
    for p, master in zip(model.parameters(), masters, strict=True):
        master.grad = p.grad.float() / SCALE
    nn.utils.clip_grad_norm_(masters, 1.0)
    optimizer.step()
    with torch.no_grad():
        for p, master in zip(model.parameters(), masters, strict=True):
            p.copy_(master)
    if step % 10 == 0:
        print(step, loss.item())
