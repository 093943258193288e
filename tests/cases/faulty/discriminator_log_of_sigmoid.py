"""A discriminator loss by hand takes log(sigmoid(x)) in half, where a confident sigmoid is 0 or 1."""
# must find: forward-overflow lead at <- log
# may find: gradient-underflow
# must not find: loss-in-half, epsilon-flushed, nonfinite-backward
# verdict: failing

import torch
from torch import nn

torch.set_num_threads(1)
torch.manual_seed(9)
critic = nn.Sequential(nn.Linear(8, 32), nn.LeakyReLU(0.2), nn.Linear(32, 1))
optimizer = torch.optim.Adam(critic.parameters(), lr=1e-3, betas=(0.5, 0.999))
scaler = torch.amp.GradScaler("cpu")
for step in range(60):
    shift = 2 if step < 20 else 30
    real, fake = torch.randn(16, 8) + shift, torch.randn(16, 8) - shift
    with torch.autocast("cpu", dtype=torch.float16):
        is_real, is_fake = torch.sigmoid(critic(real) * 10), torch.sigmoid(critic(fake) * 10)
        loss = -(torch.log(is_real) + torch.log(1 - is_fake)).mean()  # <- log
    optimizer.zero_grad()
    scaler.scale(loss).backward()
    scaler.step(optimizer)
    scaler.update()
