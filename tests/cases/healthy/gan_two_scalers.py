"""Generator and discriminator have a scaler each."""
# must not find: several-scalers, scaler-recreated, unscaled-backward, update-inside-accumulation
# verdict: no alarm

from itertools import pairwise

import torch
import torch.nn as nn

torch.set_num_threads(1)
torch.manual_seed(8)
bce = nn.BCEWithLogitsLoss()


def mlp(*sizes):
    layers = []
    for i, (a, b) in enumerate(pairwise(sizes)):
        layers += [nn.Linear(a, b)] + ([nn.LeakyReLU(0.2)] if i < len(sizes) - 2 else [])
    return nn.Sequential(*layers)


G, D = mlp(4, 32, 2), mlp(2, 32, 1)
optimizers = {"G": torch.optim.Adam(G.parameters(), 1e-3), "D": torch.optim.Adam(D.parameters(), 1e-3)}
scalers = {name: torch.amp.GradScaler("cpu", init_scale=2.0**12) for name in optimizers}


def update(name, loss):
    optimizers[name].zero_grad()
    scalers[name].scale(loss).backward()
    scalers[name].step(optimizers[name])
    scalers[name].update()
    return loss.item()


for step in range(40):
    data, noise = torch.randn(32, 2) * 0.2 + 2, torch.randn(32, 4)
    with torch.autocast("cpu", dtype=torch.float16):
        real, fake = D(data).float(), D(G(noise).detach()).float()
    loss_d = update("D", bce(real, torch.ones_like(real)) + bce(fake, torch.zeros_like(fake)))
    with torch.autocast("cpu", dtype=torch.float16):
        fooled = D(G(noise)).float()
    loss_g = update("G", bce(fooled, torch.ones_like(fooled)))
    if step % 10 == 0:
        print(step, round(loss_d, 4), round(loss_g, 4))
