"""unscale_ and update run on every micro-batch, the step on every fourth: gradients of different scales add up."""
# must find: update-inside-accumulation lead at <- unscale
# must not find: double-unscale, missing-update, clip-before-unscale, scaler-recreated
# verdict: failing

import torch
from torch import nn

torch.set_num_threads(1)
torch.manual_seed(55)

model = nn.Sequential(nn.Linear(16, 48), nn.GELU(), nn.Linear(48, 6))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
scaler = torch.amp.GradScaler("cpu", growth_interval=10)
x, y = torch.randn(64, 16), torch.randint(6, (64,))
steps_per_update = 4

for i in range(80):
    rows = torch.randint(64, (16,))
    with torch.autocast("cpu", dtype=torch.float16):
        logits = model(x[rows])
    loss = nn.functional.cross_entropy(logits.float(), y[rows])
    scaler.scale(loss / steps_per_update).backward()
    scaler.unscale_(optimizer)  # <- unscale
    if (i + 1) % steps_per_update == 0:
        scaler.step(optimizer)
        optimizer.zero_grad()
    scaler.update()
    if i % 20 == 0:
        print(f"{i}: {loss.item():.4f} {scaler.get_scale():g}")
