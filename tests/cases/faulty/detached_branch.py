"""A stray detach in the forward leaves one block of a single optimizer without any gradient, silently."""
# must find: layer-without-gradient lead at local
# must not find: optimizer-without-gradients, gradient-underflow, never-applied
# verdict: attention

import torch
from torch import nn

torch.set_num_threads(1)
torch.manual_seed(80)


class Fusion(nn.Module):
    def __init__(self):
        super().__init__()
        self.local = nn.Linear(12, 32)
        self.remote = nn.Linear(12, 32)
        self.out = nn.Linear(32, 2)

    def forward(self, x):
        local = torch.relu(self.local(x)).detach()
        return self.out(local + torch.relu(self.remote(x)))


model = Fusion()
optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
scaler = torch.amp.GradScaler("cpu")
x, y = torch.randn(48, 12), torch.randn(48, 2)
for step in range(50):
    optimizer.zero_grad()
    with torch.autocast("cpu", dtype=torch.float16):
        out = model(x)
    loss = nn.functional.mse_loss(out.float(), y)
    scaler.scale(loss).backward()
    scaler.step(optimizer)
    scaler.update()
    if step % 10 == 0:
        print(f"{step:3d} {loss.item():.4f}")
