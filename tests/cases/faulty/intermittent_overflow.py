"""Every eighth batch comes from a second data source whose units push one product out of range."""
# must find: forward-overflow lead at <- momentum
# must not find: gradient-overflow, scale-hunting, divergence, nonfinite-input
# verdict: failing

import torch
from torch import nn

torch.set_num_threads(1)
torch.manual_seed(82)


class Physics(nn.Module):
    def __init__(self):
        super().__init__()
        self.mass = nn.Linear(6, 16)
        self.velocity = nn.Linear(6, 16)
        self.head = nn.Linear(16, 1)

    def forward(self, x):
        momentum = self.mass(x) * self.velocity(x)  # <- momentum
        return self.head(0.01 * momentum)


def sources(count):
    for index in range(count):
        units = 400.0 if index % 8 == 7 else 1.0
        yield units * torch.randn(32, 6), torch.randn(32, 1)


model = Physics()
nn.init.constant_(model.mass.bias, 2.0)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
scaler = torch.amp.GradScaler("cpu", init_scale=2.0**12)
for step, (x, y) in enumerate(sources(80)):
    optimizer.zero_grad()
    with torch.autocast("cpu", dtype=torch.float16):
        out = model(x)
    loss = nn.functional.mse_loss(out.float(), y)
    scaler.scale(loss).backward()
    scaler.step(optimizer)
    scaler.update()
    if step % 16 == 0:
        print(step, loss.item(), scaler.get_scale())
