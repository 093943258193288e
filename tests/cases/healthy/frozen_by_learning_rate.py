"""Probing run with a learning rate of zero for one of two parameter groups."""
# must not find: never-applied, layer-without-gradient, swallowed-updates, optimizer-without-gradients
# verdict: no alarm

import torch
from torch import nn

torch.set_num_threads(1)
torch.manual_seed(46)

trunk = nn.Sequential(nn.Linear(12, 32), nn.ReLU())
head = nn.Linear(32, 3)
optimizer = torch.optim.AdamW([{"params": trunk.parameters(), "lr": 0.0}, {"params": head.parameters(), "lr": 1e-2}])
scaler = torch.amp.GradScaler("cpu", init_scale=2.0**14)
x, y = torch.randn(64, 12), torch.randint(3, (64,))
for step in range(40):
    optimizer.zero_grad()
    with torch.autocast("cpu", dtype=torch.float16):
        logits = head(trunk(x))
    loss = nn.functional.cross_entropy(logits.float(), y)
    scaler.scale(loss).backward()
    scaler.step(optimizer)
    scaler.update()
    if step % 10 == 0:
        print(step, loss.item())
