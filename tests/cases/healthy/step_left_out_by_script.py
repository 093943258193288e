"""The script leaves out a step whose norm is too large, and still calls update()."""
# must not find: missing-update, double-unscale, optimizer-without-gradients, step-bypasses-scaler
# verdict: no alarm

import torch
from torch import nn

torch.set_num_threads(1)
torch.manual_seed(42)

net = nn.Sequential(nn.Linear(16, 32), nn.Tanh(), nn.Linear(32, 1))
optimizer = torch.optim.Adam(net.parameters(), lr=1e-3)
scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
left_out = 0
for step in range(60):
    x = torch.randn(16, 16)
    y = x.sum(1, keepdim=True) * (10.0 if step in (17, 40) else 1.0)
    optimizer.zero_grad()
    with torch.autocast("cpu", dtype=torch.float16):
        out = net(x)
    loss = nn.functional.mse_loss(out.float(), y)
    scaler.scale(loss).backward()
    scaler.unscale_(optimizer)
    if nn.utils.clip_grad_norm_(net.parameters(), 1.0) < 30.0:
        scaler.step(optimizer)
    else:
        left_out += 1
    scaler.update()
print("left out", left_out, "loss", loss.item())
