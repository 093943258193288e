"""WGAN-GP takes the penalty's gradient of a scaled output and uses it as it is, 1,024 times too large."""
# must find: scaled-gradient-penalty lead at <- grad
# must not find: unscaled-backward, several-scalers, update-inside-accumulation
# verdict: attention

import torch
from torch import nn

torch.set_num_threads(1)
torch.manual_seed(64)


class Critic(nn.Module):
    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(8, 32), nn.Softplus(), nn.Linear(32, 1))

    def forward(self, x):
        return self.net(x)


critic = Critic()
optimizer = torch.optim.Adam(critic.parameters(), lr=1e-4, betas=(0.0, 0.9))
scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)


def gradient_penalty(real, fake):
    mix = torch.rand(len(real), 1)
    blend = (mix * real + (1 - mix) * fake).requires_grad_()
    with torch.autocast("cpu", dtype=torch.float16):
        score = critic(blend)
    scaled = scaler.scale(score.float().sum())
    (gradient,) = torch.autograd.grad(scaled, blend, create_graph=True)  # <- grad
    return (gradient.norm(dim=1) - 1).pow(2).mean()


for step in range(40):
    real, fake = torch.randn(32, 8) + 1, torch.randn(32, 8)
    with torch.autocast("cpu", dtype=torch.float16):
        gap = critic(fake).float().mean() - critic(real).float().mean()
    loss = gap + 1e-5 * gradient_penalty(real, fake)
    optimizer.zero_grad()
    scaler.scale(loss).backward()
    scaler.step(optimizer)
    scaler.update()
    if step % 10 == 0:
        print(step, f"{loss.item():.4f}")
