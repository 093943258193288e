"""The loss scale is fixed at 2^24 by a backoff factor of nearly one: the forward is finite, the backward is not."""
# must find: never-applied lead
# must not find: forward-overflow, nonfinite-weight, divergence, loss-in-half
# verdict: failing

import torch
from torch import nn

torch.set_num_threads(1)
torch.manual_seed(33)


class Residual(nn.Module):
    def __init__(self, dim):
        super().__init__()
        self.a, self.b = nn.Linear(dim, dim), nn.Linear(dim, dim)

    def forward(self, x):
        return x + self.b(torch.relu(self.a(x)))


net = nn.Sequential(*[Residual(32) for _ in range(8)], nn.Linear(32, 4))
optimizer = torch.optim.AdamW(net.parameters(), lr=1e-4)
scaler = torch.amp.GradScaler("cpu", init_scale=2.0**24, growth_interval=10**6, backoff_factor=0.999999)
x, y = torch.randn(32, 32), torch.randint(4, (32,))
for step in range(40):
    optimizer.zero_grad()
    with torch.autocast("cpu", dtype=torch.float16):
        logits = net(x)
    loss = nn.functional.cross_entropy(logits.float(), y)
    scaler.scale(loss).backward()
    scaler.step(optimizer)
    scaler.update()
    if step % 10 == 0:
        print(f"step {step} loss {loss.item():.5f}")
