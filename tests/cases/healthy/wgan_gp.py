"""WGAN-GP as torch's AMP notes have it: the penalty's gradients are unscaled before they are used."""
# must not find: scaled-gradient-penalty, unscaled-backward, update-inside-accumulation, several-scalers
# verdict: no alarm

import torch
from torch import nn

torch.set_num_threads(1)
torch.manual_seed(24)

critic = nn.Sequential(nn.Linear(8, 32), nn.Softplus(), nn.Linear(32, 1))
optimizer = torch.optim.Adam(critic.parameters(), lr=1e-3, betas=(0.0, 0.9))
scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)


def gradient_penalty(real, fake):
    mix = torch.rand(len(real), 1)
    blend = (mix * real + (1 - mix) * fake).requires_grad_()
    with torch.autocast("cpu", dtype=torch.float16):
        score = critic(blend)
    scaled = torch.autograd.grad(scaler.scale(score.float().sum()), blend, create_graph=True)[0]
    gradient = scaled / scaler.get_scale()
    return (gradient.norm(dim=1) - 1).pow(2).mean()


for step in range(40):
    real, fake = torch.randn(32, 8) + 1, torch.randn(32, 8)
    with torch.autocast("cpu", dtype=torch.float16):
        gap = critic(fake).float().mean() - critic(real).float().mean()
    loss = gap + 10 * gradient_penalty(real, fake)
    optimizer.zero_grad()
    scaler.scale(loss).backward()
    scaler.step(optimizer)
    scaler.update()
    if step % 10 == 0:
        print(step, f"{loss.item():.4f}")
