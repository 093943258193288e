"""clip_grad_value_ on scaled gradients turns an inf into 1.0, so the scaler never learns of the overflow."""
# must find: clip-before-unscale lead at <- clip
# must not find: forward-overflow, nonfinite-weight, scale-collapse, gradient-norm-overflow
# verdict: failing

import torch
from torch import nn
from torch.nn import functional as F

torch.set_num_threads(1)
torch.manual_seed(44)


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.first = nn.Linear(16, 64)
        self.second = nn.Linear(64, 64)
        self.last = nn.Linear(64, 1)

    def forward(self, x):
        return self.last(F.relu(self.second(F.relu(self.first(x)))))


model = Net()
optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
scaler = torch.amp.GradScaler("cpu", init_scale=2.0**12)
x = torch.randn(64, 16)
y = 60 + torch.randn(64, 1)

for step in range(50):
    optimizer.zero_grad()
    with torch.autocast("cpu", dtype=torch.float16):
        out = model(x)
    loss = F.mse_loss(out.float(), y)
    scaler.scale(loss).backward()
    nn.utils.clip_grad_value_(model.parameters(), 1.0)  # <- clip
    scaler.step(optimizer)
    scaler.update()
    if step % 10 == 0:
        print(f"step {step} loss {loss.item():.2f} scale {scaler.get_scale():g}")
