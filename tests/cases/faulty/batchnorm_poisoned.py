"""One huge batch is skipped by the scaler, but the BatchNorm behind the Linear has kept its inf for good."""
# must find: nonfinite-buffer at norm
# must not find: nonfinite-weight, divergence, scale-collapse, forward-overflow
# may find: unlocated-nonfinite
# verdict: failing

import torch
from torch import nn

torch.set_num_threads(1)
torch.manual_seed(19)


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.lift = nn.Linear(10, 32)
        self.norm = nn.BatchNorm1d(32)
        self.head = nn.Linear(32, 3)

    def forward(self, x):
        return self.head(torch.relu(self.norm(self.lift(x))))


net = Net()
optimizer = torch.optim.SGD(net.parameters(), lr=0.05)
scaler = torch.amp.GradScaler("cpu")
for step in range(60):
    x = torch.randn(32, 10)
    y = (x[:, 0] > 0).long()
    if step == 24:
        x[7] = 6e4  # one corrupt record
    net.train()
    optimizer.zero_grad()
    with torch.autocast("cpu", dtype=torch.float16):
        logits = net(x)
    loss = nn.functional.cross_entropy(logits.float(), y)
    scaler.scale(loss).backward()
    scaler.step(optimizer)
    scaler.update()
    if step % 20 == 19:
        net.eval()
        with torch.no_grad():
            held_out = net(torch.randn(8, 10))
        print(f"step {step + 1} train {loss.item():.3f} eval mean {held_out.mean().item():.3f}")
