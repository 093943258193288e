"""Model, optimizer and scaler are all restored; the scale goes on from where it was."""
# must not find: resume-reset-scale, scaler-recreated, nonfinite-weight, half-trainable-params
# verdict: no alarm

import io

import torch
from torch import nn

torch.set_num_threads(1)


def build():
    torch.manual_seed(41)
    model = nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 1))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    return model, optimizer, torch.amp.GradScaler("cpu", init_scale=2.0**20, growth_interval=500)


def checkpoint_of_first_job():
    model, optimizer, scaler = build()
    for _ in range(5):
        optimizer.zero_grad()
        model(torch.randn(8, 16)).square().mean().backward()
        optimizer.step()
    state = scaler.state_dict()
    state["scale"], state["_growth_tracker"] = 256.0, 120
    file = io.BytesIO()
    torch.save([model.state_dict(), optimizer.state_dict(), state], file)
    file.seek(0)
    return file


model, optimizer, scaler = build()
for part, state in zip((model, optimizer, scaler), torch.load(checkpoint_of_first_job()), strict=True):
    part.load_state_dict(state)
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
