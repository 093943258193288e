"""Gradients are unscaled first and clipped then, by norm."""
# must not find: clip-before-unscale, double-unscale, gradient-norm-overflow, step-bypasses-scaler
# verdict: no alarm

import torch
from torch import nn
from torch.nn.utils import clip_grad_norm_

torch.set_num_threads(1)
torch.manual_seed(1)


def train(model, x, y, epochs):
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    scaler = torch.amp.GradScaler("cpu")
    for epoch in range(epochs):
        optimizer.zero_grad()
        with torch.autocast("cpu", dtype=torch.float16):
            loss = nn.functional.mse_loss(model(x).float(), y)
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        clip_grad_norm_(model.parameters(), max_norm=1.0)
        scaler.step(optimizer)
        scaler.update()
        if epoch % 10 == 0:
            print(f"epoch {epoch}: loss {loss.item():.5f}")


net = nn.Sequential(nn.Linear(16, 48), nn.ReLU(), nn.Linear(48, 4))
train(net, x=torch.randn(128, 16), y=torch.randn(128, 4) * 3, epochs=50)
