"""Gradient accumulation with unscale_ and clipping on every micro-batch; torch raises at the second one."""
# must find: double-unscale lead at <- unscale
# must not find: missing-update, clip-before-unscale, half-trainable-params, optimizer-without-gradients
# verdict: failing
# raises: RuntimeError

import torch
from torch import nn

torch.set_num_threads(1)
torch.manual_seed(47)
ACCUMULATE = 4

model = nn.Sequential(nn.Linear(20, 40), nn.ReLU(), nn.Linear(40, 5))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
scaler = torch.amp.GradScaler("cpu")
x, y = torch.randn(64, 20), torch.randint(5, (64,))

for i in range(40):
    part = slice(8 * (i % 8), 8 * (i % 8) + 8)
    with torch.autocast("cpu", dtype=torch.float16):
        logits = model(x[part])
    loss = nn.functional.cross_entropy(logits.float(), y[part]) / ACCUMULATE
    scaler.scale(loss).backward()
    scaler.unscale_(optimizer)  # <- unscale
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    if (i + 1) % ACCUMULATE == 0:
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
