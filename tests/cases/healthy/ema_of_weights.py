"""An exponential moving average of the weights, kept in a second model and updated in place."""
# must not find: optimizer-without-gradients, layer-without-gradient, clip-before-unscale, nonfinite-weight
# verdict: no alarm

import copy

import torch
from torch import nn

torch.set_num_threads(1)
torch.manual_seed(27)

student = nn.Sequential(nn.Linear(12, 32), nn.BatchNorm1d(32), nn.ReLU(), nn.Linear(32, 12))
teacher = copy.deepcopy(student).requires_grad_(False)
optimizer = torch.optim.AdamW(student.parameters(), lr=1e-3)
scaler = torch.amp.GradScaler("cpu", init_scale=2.0**14)


@torch.no_grad()
def follow(decay=0.95):
    for slow, fast in zip(teacher.parameters(), student.parameters(), strict=True):
        slow.lerp_(fast, 1 - decay)
    for slow, fast in zip(teacher.buffers(), student.buffers(), strict=True):
        slow.copy_(fast)


x = torch.randn(64, 12)
for step in range(50):
    with torch.autocast("cpu", dtype=torch.float16):
        with torch.no_grad():
            wanted = teacher(x + 0.1 * torch.randn_like(x))
        got = student(x + 0.1 * torch.randn_like(x))
    loss = nn.functional.mse_loss(got.float(), wanted.float() + 0.3 * x)
    optimizer.zero_grad()
    scaler.scale(loss).backward()
    scaler.step(optimizer)
    scaler.update()
    follow()
    if step % 10 == 0:
        print(step, loss.item())
