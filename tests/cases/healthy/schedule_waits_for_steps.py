"""The scale starts far too high, and the schedule only advances on steps that were applied."""
# must not find: scheduler-ahead, scale-collapse, never-applied
# verdict: no alarm

import torch
from torch import nn

torch.set_num_threads(1)
torch.manual_seed(23)

model = nn.Sequential(nn.Linear(8, 32), nn.Tanh(), nn.Linear(32, 2))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
schedule = torch.optim.lr_scheduler.LinearLR(optimizer, 0.1, 1.0, total_iters=30)
scaler = torch.amp.GradScaler("cpu", init_scale=2.0**30)


def stepped(scaler, optimizer):
    before = scaler.get_scale()
    scaler.step(optimizer)
    scaler.update()
    return scaler.get_scale() >= before


for step in range(70):
    x = torch.randn(32, 8)
    with torch.autocast("cpu", dtype=torch.float16):
        out = model(x)
    loss = nn.functional.mse_loss(out.float(), x[:, :2])
    optimizer.zero_grad()
    scaler.scale(loss).backward()
    if stepped(scaler, optimizer):
        schedule.step()
    if step % 15 == 0:
        print(step, loss.item(), schedule.get_last_lr())
