"""One batch with a large target overflows the backward once; the scaler skips it and the run goes on."""
# must not find: gradient-overflow, scale-decay, scale-collapse, nonfinite-weight, forward-overflow, unlocated-nonfinite
# verdict: no alarm

import torch
from torch import nn

torch.set_num_threads(1)
torch.manual_seed(43)
model = nn.Sequential(nn.Linear(12, 32), nn.ReLU(), nn.Linear(32, 1))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
scaler = torch.amp.GradScaler("cpu", init_scale=2.0**13)
for step in range(80):
    x = torch.randn(32, 12)
    y = x[:, :1] * (60.0 if step == 41 else 1.0)
    optimizer.zero_grad()
    with torch.autocast("cpu", dtype=torch.float16):
        out = model(x)
    loss = nn.functional.mse_loss(out.float(), y)
    scaler.scale(loss).backward()
    scaler.step(optimizer)
    scaler.update()
    if step % 10 == 1:
        print(step, loss.item(), scaler.get_scale())
