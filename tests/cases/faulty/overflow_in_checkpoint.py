"""The second of three checkpointed blocks squares its gate and leaves the FP16 range inside the checkpoint."""
# must find: forward-overflow lead at <- gate
# must not find: gradient-overflow, layer-without-gradient, scale-thrashing
# verdict: failing

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

torch.set_num_threads(1)
torch.manual_seed(83)


class Block(nn.Module):
    def __init__(self, width, gain):
        super().__init__()
        self.gain = gain
        self.first = nn.Linear(width, width)
        self.second = nn.Linear(width, width)

    def forward(self, x):
        h = torch.relu(self.first(x)) * self.gain
        gate = h * h.flip(-1)  # <- gate
        return x + self.second(gate) / (1 + self.gain**2)


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(Block(24, gain) for gain in (1.0, 900.0, 1.0))
        self.out = nn.Linear(24, 3)

    def forward(self, x):
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False)
        return self.out(x)


model = Model()
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
scaler = torch.amp.GradScaler("cpu", init_scale=512.0)
x, y = torch.randn(32, 24), torch.randint(3, (32,))
for step in range(30):
    optimizer.zero_grad()
    with torch.autocast("cpu", dtype=torch.float16):
        logits = model(x)
    loss = nn.functional.cross_entropy(logits.float(), y)
    scaler.scale(loss).backward()
    scaler.step(optimizer)
    scaler.update()
    if step % 10 == 0:
        print("loss", loss.item())
