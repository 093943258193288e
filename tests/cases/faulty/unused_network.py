"""The second optimizer belongs to a network whose output never enters the loss; the scaler asserts."""
# must find: optimizer-without-gradients lead at <- step
# must not find: layer-without-gradient, missing-update, half-trainable-params, never-applied
# verdict: failing
# raises: AssertionError

import torch
from torch import nn

torch.set_num_threads(1)
torch.manual_seed(59)


class Field(nn.Module):
    def __init__(self):
        super().__init__()
        self.density = nn.Sequential(nn.Linear(3, 32), nn.ReLU(), nn.Linear(32, 1))

    def forward(self, points):
        return self.density(points)


coarse, fine = Field(), Field()
opt_coarse = torch.optim.Adam(coarse.parameters(), lr=1e-3)
opt_fine = torch.optim.Adam(fine.parameters(), lr=1e-3)
scaler = torch.amp.GradScaler("cpu")

for _ in range(20):
    points = torch.rand(64, 3)
    target = points.norm(dim=1, keepdim=True)
    opt_coarse.zero_grad()
    opt_fine.zero_grad()
    with torch.autocast("cpu", dtype=torch.float16):
        prediction = coarse(points)
        refined = fine(points)
    loss = nn.functional.mse_loss(prediction.float(), target)
    scaler.scale(loss).backward()
    scaler.step(opt_coarse)
    scaler.step(opt_fine)  # <- step
    scaler.update()
