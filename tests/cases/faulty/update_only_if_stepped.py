"""The script skips a step on its own when the norm is large, and skips scaler.update() with it."""
# must find: missing-update lead
# must not find: double-unscale, clip-before-unscale, update-inside-accumulation
# verdict: failing
# raises: RuntimeError

import torch
from torch import nn

torch.set_num_threads(1)
torch.manual_seed(48)


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.f = nn.Linear(16, 32)
        self.g = nn.Linear(32, 1)

    def forward(self, x):
        return self.g(torch.tanh(self.f(x)))


net = Net()
optimizer = torch.optim.Adam(net.parameters(), lr=1e-3)
scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
for step in range(40):
    x = torch.randn(16, 16)
    y = x.sum(1, keepdim=True) * (10.0 if step == 17 else 1.0)
    optimizer.zero_grad()
    with torch.autocast("cpu", dtype=torch.float16):
        out = net(x)
    loss = nn.functional.mse_loss(out.float(), y)
    scaler.scale(loss).backward()
    scaler.unscale_(optimizer)
    norm = nn.utils.clip_grad_norm_(net.parameters(), 1.0)
    if norm < 20.0:
        scaler.step(optimizer)
        scaler.update()
    else:
        print(f"step {step}: skipped, norm {norm:.1f}")
