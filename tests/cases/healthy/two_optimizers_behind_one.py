"""One object steps two optimizers, each for its own layers; the scaler knows only that object."""
# must not find: clip-before-unscale, step-bypasses-scaler, several-scalers, optimizer-without-gradients
# verdict: no alarm

import torch
from torch import nn

torch.set_num_threads(1)
torch.manual_seed(42)


class Both(torch.optim.Optimizer):
    def __init__(self, *optimizers):
        self.optimizers = optimizers
        self.state, self.defaults = {}, {}

    @property
    def param_groups(self):
        return [group for optimizer in self.optimizers for group in optimizer.param_groups]

    def zero_grad(self, set_to_none=True):
        for optimizer in self.optimizers:
            optimizer.zero_grad(set_to_none)

    def step(self, closure=None):
        for optimizer in self.optimizers:
            optimizer.step()


model = nn.Sequential(nn.Linear(16, 48), nn.ReLU(), nn.Linear(48, 4))
optimizer = Both(
    torch.optim.SGD(model[0].parameters(), lr=1e-2, momentum=0.9),
    torch.optim.AdamW(model[2].parameters(), lr=1e-3),
)
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
