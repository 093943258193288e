"""The clipping threshold is multiplied by the scale on purpose, so that clipping needs no unscale_."""
# must not find: clip-before-unscale, gradient-norm-overflow, scale-thrashing
# verdict: no alarm

import torch
from torch import nn

torch.set_num_threads(1)
torch.manual_seed(2)

model = nn.Sequential(nn.Linear(16, 32), nn.Tanh(), nn.Linear(32, 1))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
scaler = torch.amp.GradScaler("cpu", init_scale=2.0**12, growth_interval=15)
x = torch.randn(64, 16)
y = x.sum(1, keepdim=True)

for step in range(60):
    optimizer.zero_grad()
    with torch.autocast("cpu", dtype=torch.float16):
        out = model(x)
    loss = nn.functional.mse_loss(out.float(), y)
    scaler.scale(loss).backward()
    nn.utils.clip_grad_norm_(model.parameters(), 1.0 * scaler.get_scale())
    scaler.step(optimizer)
    scaler.update()
    if step % 20 == 0:
        print(step, loss.item())
