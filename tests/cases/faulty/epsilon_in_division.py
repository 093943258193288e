"""A batch standardisation divides by std + 1e-8 in half; the epsilon is zero there and one feature is constant."""
# must find: epsilon-flushed lead at <- divide
# must not find: forward-overflow, gradient-overflow, reduction-overflow, nonfinite-input
# verdict: failing

import torch
from torch import nn

torch.set_num_threads(1)
torch.manual_seed(20)

encoder = nn.Sequential(nn.Linear(8, 24), nn.ReLU())
readout = nn.Linear(24, 1)
with torch.no_grad():
    encoder[0].weight[5] = 0.0  # a dead feature
    encoder[0].bias[5] = -1.0


def standardise(h):
    centred = h - h.mean(0)
    return centred / (centred.abs().mean(0) + 1e-8)  # <- divide


def train(steps):
    params = list(encoder.parameters()) + list(readout.parameters())
    optimizer = torch.optim.AdamW(params, lr=1e-3)
    scaler = torch.amp.GradScaler("cpu")
    x, y = torch.randn(64, 8), torch.randn(64, 1)
    for step in range(steps):
        optimizer.zero_grad()
        with torch.autocast("cpu", dtype=torch.float16):
            prediction = readout(standardise(encoder(x)))
        loss = nn.functional.mse_loss(prediction.float(), y)
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        if step % 10 == 0:
            print(step, loss.item())


train(30)
