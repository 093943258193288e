"""The critic's loss takes the root of an exact zero: its every step is skipped while the actor trains on."""
# must find: never-applied
# must find: nonfinite-backward at <- root
# must not find: forward-overflow, optimizer-without-gradients, several-scalers
# verdict: failing

import torch
from torch import nn

torch.set_num_threads(1)
torch.manual_seed(62)

actor = nn.Sequential(nn.Linear(8, 32), nn.Tanh(), nn.Linear(32, 2))
critic = nn.Sequential(nn.Linear(10, 32), nn.Tanh(), nn.Linear(32, 1))
opt_actor = torch.optim.Adam(actor.parameters(), lr=1e-3)
opt_critic = torch.optim.Adam(critic.parameters(), lr=1e-3)
scaler = torch.amp.GradScaler("cpu", init_scale=2.0**16)


def rooted(values):
    squared = (values - values.detach()).pow(2)
    return torch.sqrt(squared.sum(1))  # <- root


for step in range(50):
    state = torch.randn(32, 8)
    with torch.autocast("cpu", dtype=torch.float16):
        action = actor(state)
        value = critic(torch.cat([state, action.detach()], 1))
    loss_actor = (action.float() - state[:, :2]).pow(2).mean()
    loss_critic = (value.float() - 1).pow(2).mean() + rooted(value.float()).mean()
    opt_actor.zero_grad()
    opt_critic.zero_grad()
    scaler.scale(loss_actor).backward()
    scaler.scale(loss_critic).backward()
    scaler.step(opt_actor)
    scaler.step(opt_critic)
    scaler.update()
    if step % 10 == 0:
        print(f"{step} actor {loss_actor.item():.4f} critic {loss_critic.item():.4f}")
