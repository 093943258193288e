"""The loss is a half tensor of one element; times the scale it stays half and becomes inf."""
# must find: loss-in-half lead at <- scaled
# must not find: gradient-overflow, forward-overflow, scale-thrashing
# verdict: failing

import torch
from torch import nn

torch.set_num_threads(1)
torch.manual_seed(29)


class Energy(nn.Module):
    """Returns the energy of the batch, shape (1,)."""

    def __init__(self):
        super().__init__()
        self.hidden = nn.Linear(8, 16)
        self.energy = nn.Linear(16, 1)

    def forward(self, x):
        return self.energy(torch.tanh(self.hidden(x))).mean(0)


model = Energy()
nn.init.constant_(model.energy.bias, 40.0)
optimizer = torch.optim.SGD(model.parameters(), lr=1e-5)
scaler = torch.amp.GradScaler("cpu", growth_interval=4)
x = torch.randn(32, 8)
for step in range(40):
    optimizer.zero_grad()
    with torch.autocast("cpu", dtype=torch.float16):
        loss = model(x)
    scaler.scale(loss).backward()  # <- scaled
    scaler.step(optimizer)
    scaler.update()
    if step % 10 == 0:
        print(f"step {step}: energy {loss.item():.3f} scale {scaler.get_scale():g}")
