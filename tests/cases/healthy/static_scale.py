"""A static scale of 1,024 that fits: no overflow, no harmful underflow."""
# must not find: static-scale-unsafe, gradient-underflow, scale-never-grew, scale-at-floor
# verdict: no alarm

import torch
from torch import nn

torch.set_num_threads(1)
torch.manual_seed(35)
net = nn.Sequential(nn.Linear(16, 48), nn.GELU(), nn.Linear(48, 3))
optimizer = torch.optim.AdamW(net.parameters(), lr=1e-3)
scaler = torch.amp.GradScaler("cpu", init_scale=1024.0, growth_factor=1.0 + 1e-6, growth_interval=10**9)
x, y = torch.randn(32, 16), torch.randint(3, (32,))
for step in range(50):
    with torch.autocast("cpu", dtype=torch.float16):
        logits = net(x)
    loss = nn.functional.cross_entropy(logits.float(), y)
    optimizer.zero_grad()
    scaler.scale(loss).backward()
    scaler.step(optimizer)
    scaler.update()
    if step % 10 == 0:
        print(step, loss.item())
