"""clip_grad_norm_ runs on gradients that are still multiplied by 65,536, so the threshold of 1 is 1.5e-5 in truth."""
# must find: clip-before-unscale lead at <- clip
# must not find: gradient-norm-overflow, gradient-underflow, double-unscale, missing-update
# verdict: failing

import torch
from torch import nn

torch.set_num_threads(1)
torch.manual_seed(42)


def train(model, x, y, epochs):
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    scaler = torch.amp.GradScaler("cpu")
    for epoch in range(epochs):
        optimizer.zero_grad()
        with torch.autocast("cpu", dtype=torch.float16):
            loss = nn.functional.mse_loss(model(x).float(), y)
        scaler.scale(loss).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), max_norm=1.0)  # <- clip
        scaler.step(optimizer)
        scaler.update()
        if epoch % 10 == 0:
            print(f"epoch {epoch}: loss {loss.item():.5f}")


train(
    nn.Sequential(nn.Linear(16, 48), nn.ReLU(), nn.Linear(48, 4)),
    x=torch.randn(128, 16),
    y=torch.randn(128, 4) * 3,
    epochs=50,
)
