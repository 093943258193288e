"""Model and optimizer are restored after 30 steps, the scaler is not: it starts again at its initial scale."""
# must find: resume-reset-scale lead
# must not find: scaler-recreated, several-scalers, forward-overflow
# verdict: attention

import torch
from torch import nn

torch.set_num_threads(1)


def build():
    torch.manual_seed(78)
    model = nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 1))
    return model, torch.optim.AdamW(model.parameters(), lr=1e-3)


def finished_run():
    """What the first job left behind."""
    model, optimizer = build()
    for _ in range(30):
        optimizer.zero_grad()
        model(torch.randn(8, 16)).square().mean().backward()
        optimizer.step()
    return {"model": model.state_dict(), "optimizer": optimizer.state_dict()}


saved = finished_run()
model, optimizer = build()
model.load_state_dict(saved["model"])
optimizer.load_state_dict(saved["optimizer"])
scaler = torch.amp.GradScaler("cpu", init_scale=2.0**24)
x, y = torch.randn(32, 16), 30 * torch.randn(32, 1)
for step in range(40):
    with torch.autocast("cpu", dtype=torch.float16):
        out = model(x)
    loss = nn.functional.mse_loss(out.float(), y)
    optimizer.zero_grad()
    scaler.scale(loss).backward()
    scaler.step(optimizer)
    scaler.update()
    if step % 10 == 0:
        print(step, loss.item(), scaler.get_scale())
