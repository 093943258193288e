"""optimizer.step() is called directly on scaled gradients that have overflowed: the weights become NaN."""
# must find: step-bypasses-scaler lead at <- step
# must not find: divergence, optimizer-eps-flushed, masked-row
# verdict: failing

import torch
from torch import nn

torch.set_num_threads(1)
torch.manual_seed(54)


class Net(nn.Module):
    def __init__(self, dim=32, depth=4):
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(dim, dim) for _ in range(depth))
        self.out = nn.Linear(dim, 1)

    def forward(self, x):
        for block in self.blocks:
            x = x + torch.relu(block(x))
        return self.out(x)


net = Net()
optimizer = torch.optim.SGD(net.parameters(), lr=1e-9)
scaler = torch.amp.GradScaler("cpu", init_scale=2.0**14)
x = torch.randn(16, 32)
for step in range(40):
    y = torch.randn(16, 1) * (2000.0 if step == 15 else 1.0)
    optimizer.zero_grad()
    with torch.autocast("cpu", dtype=torch.float16):
        out = net(x)
    loss = nn.functional.mse_loss(out.float(), y)
    scaler.scale(loss).backward()
    optimizer.step()  # <- step
    print(step, round(loss.item(), 4)) if step % 13 == 0 else None
