"""A GAN with two optimizers and one scaler: each network's gradients are cleared before its own backward."""
# must not find: update-inside-accumulation, several-scalers, missing-update, optimizer-without-gradients
# verdict: no alarm

import torch
from torch import nn
from torch.nn.functional import softplus

torch.set_num_threads(1)
torch.manual_seed(7)

gen = nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Linear(32, 16))
disc = nn.Sequential(nn.Linear(16, 32), nn.LeakyReLU(0.2), nn.Linear(32, 1))
opt_g = torch.optim.Adam(gen.parameters(), lr=2e-4, betas=(0.5, 0.99))
opt_d = torch.optim.Adam(disc.parameters(), lr=2e-4, betas=(0.5, 0.99))
scaler = torch.amp.GradScaler("cpu", init_scale=2.0**12)

for it in range(50):
    real = torch.randn(32, 16) * 0.5 + 1
    noise = torch.randn(32, 8)

    opt_d.zero_grad()
    with torch.autocast("cpu", dtype=torch.float16):
        with torch.no_grad():
            fake = gen(noise)
        d_real, d_fake = disc(real), disc(fake)
    loss_d = softplus(-d_real.float()).mean() + softplus(d_fake.float()).mean()
    scaler.scale(loss_d).backward()
    scaler.step(opt_d)
    scaler.update()

    opt_g.zero_grad()
    with torch.autocast("cpu", dtype=torch.float16):
        score = disc(gen(noise))
    loss_g = softplus(-score.float()).mean()
    scaler.scale(loss_g).backward()
    scaler.step(opt_g)
    scaler.update()
    if it % 10 == 0:
        print(f"it {it} D {loss_d.item():.3f} G {loss_g.item():.3f}")
