"""A dictionary batch holds a NaN once, at step 20 of 60."""
# must find: nonfinite-input lead
# must not find: forward-overflow, scale-collapse, divergence, unlocated-nonfinite, nonfinite-weight
# verdict: failing

import torch
from torch import nn

torch.set_num_threads(1)
torch.manual_seed(73)


class Forecaster(nn.Module):
    def __init__(self):
        super().__init__()
        self.past = nn.Linear(12, 32)
        self.static = nn.Linear(4, 32)
        self.out = nn.Linear(32, 3)

    def forward(self, batch):
        return self.out(torch.relu(self.past(batch["past"]) + self.static(batch["static"])))


model = Forecaster()
optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
scaler = torch.amp.GradScaler("cpu")
for step in range(60):
    batch = {"past": torch.randn(16, 12), "static": torch.randn(16, 4)}
    if step == 20:
        batch["past"][3, 5] = float("nan")
    with torch.autocast("cpu", dtype=torch.float16):
        out = model(batch)
    loss = (out.float() - batch["static"][:, :3]).pow(2).mean()
    optimizer.zero_grad()
    scaler.scale(loss).backward()
    scaler.step(optimizer)
    scaler.update()
    if step % 15 == 0:
        print(f"{step:2d} {loss.item():.4f}")
