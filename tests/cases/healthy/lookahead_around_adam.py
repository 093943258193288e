"""A look-ahead that is no torch optimizer itself steps Adam for it; the scaler is given the wrapper."""
# must not find: clip-before-unscale, step-bypasses-scaler, several-scalers, optimizer-without-gradients
# verdict: no alarm

import torch
from torch import nn

torch.set_num_threads(1)
torch.manual_seed(41)


class Lookahead:
    def __init__(self, inner, every=5, alpha=0.5):
        self.inner, self.every, self.alpha, self.count = inner, every, alpha, 0
        self.params = [p for group in inner.param_groups for p in group["params"]]
        self.slow = [p.detach().clone() for p in self.params]

    @property
    def param_groups(self):
        return self.inner.param_groups

    def zero_grad(self):
        self.inner.zero_grad()

    @torch.no_grad()
    def step(self):
        self.inner.step()
        self.count += 1
        if self.count % self.every == 0:
            for slow, p in zip(self.slow, self.params, strict=True):
                slow.lerp_(p, self.alpha)
                p.copy_(slow)


model = nn.Sequential(nn.Linear(16, 48), nn.ReLU(), nn.Linear(48, 4))
optimizer = Lookahead(torch.optim.Adam(model.parameters(), lr=1e-3))
scaler = torch.amp.GradScaler("cpu")
x, y = torch.randn(64, 16), torch.randn(64, 4)

for step in range(40):
    optimizer.zero_grad()
    with torch.autocast("cpu", dtype=torch.float16):
        loss = nn.functional.mse_loss(model(x).float(), y)
    scaler.scale(loss).backward()
    scaler.unscale_(optimizer)
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    scaler.step(optimizer)
    scaler.update()
    if step % 10 == 0:
        print(step, loss.item())
