"""Gradient accumulation as it should be: scale every micro-batch; unscale, clip, step and update at the boundary."""
# must not find: update-inside-accumulation, double-unscale, missing-update, clip-before-unscale
# verdict: no alarm

import torch
from torch import nn

torch.set_num_threads(1)
torch.manual_seed(5)
ACCUMULATE = 4

model = nn.Sequential(nn.Linear(20, 40), nn.ReLU(), nn.Linear(40, 5))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
scaler = torch.amp.GradScaler("cpu")
x = torch.randn(64, 20)
y = x[:, :5].argmax(1)

for i in range(160):
    part = slice(8 * (i % 8), 8 * (i % 8) + 8)
    with torch.autocast("cpu", dtype=torch.float16):
        logits = model(x[part])
    loss = nn.functional.cross_entropy(logits.float(), y[part]) / ACCUMULATE
    scaler.scale(loss).backward()
    if (i + 1) % ACCUMULATE == 0:
        scaler.unscale_(optimizer)
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
    if i % 40 == 0:
        print(f"{i} {loss.item() * ACCUMULATE:.4f}")
