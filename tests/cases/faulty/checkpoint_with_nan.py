"""The run resumes from a checkpoint saved in an earlier overflow loop: one weight is NaN from the start."""
# must find: nonfinite-weight lead at 2.weight
# must not find: forward-overflow, divergence, nonfinite-input, gradient-overflow, step-bypasses-scaler
# verdict: failing

import io

import torch
from torch import nn

torch.set_num_threads(1)
torch.manual_seed(71)


def make_model():
    return nn.Sequential(nn.Linear(10, 32), nn.ReLU(), nn.Linear(32, 32), nn.ReLU(), nn.Linear(32, 2))


def old_checkpoint():
    saved = make_model().state_dict()
    saved["2.weight"][4, 7] = float("nan")
    file = io.BytesIO()
    torch.save({"model": saved}, file)
    file.seek(0)
    return file


model = make_model()
model.load_state_dict(torch.load(old_checkpoint())["model"])
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
scaler = torch.amp.GradScaler("cpu")
x, y = torch.randn(32, 10), torch.randint(2, (32,))
for step in range(30):
    optimizer.zero_grad()
    with torch.autocast("cpu", dtype=torch.float16):
        logits = model(x)
    loss = nn.functional.cross_entropy(logits.float(), y)
    scaler.scale(loss).backward()
    scaler.step(optimizer)
    scaler.update()
    if step % 10 == 0:
        print(step, loss.item(), scaler.get_scale())
