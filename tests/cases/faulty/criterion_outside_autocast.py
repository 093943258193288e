"""The loss is taken outside the autocast block on half predictions against half targets."""
# must find: loss-in-half lead at <- criterion
# must not find: forward-overflow, scale-collapse, gradient-overflow, missing-loss-scaling
# verdict: failing

import torch
from torch import nn

torch.set_num_threads(1)
torch.manual_seed(30)


class Regressor(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(10, 32), nn.Tanh(), nn.Linear(32, 2))

    def forward(self, x):
        with torch.autocast("cpu", dtype=torch.float16):
            return self.layers(x)


model = Regressor()
criterion = nn.MSELoss()
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
scaler = torch.amp.GradScaler("cpu", init_scale=128.0)
x = torch.randn(64, 10)
y = torch.stack([x.sum(1), x[:, 0] * 2], dim=1).half()

for step in range(40):
    optimizer.zero_grad()
    prediction = model(x)
    loss = criterion(prediction, y)  # <- criterion
    scaler.scale(loss).backward()
    scaler.step(optimizer)
    scaler.update()
    if step % 10 == 0:
        print(f"{step:3d} {loss.item():.4f}")
