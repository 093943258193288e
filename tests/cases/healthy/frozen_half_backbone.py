"""A frozen backbone in half under a trainable FP32 head."""
# must not find: half-trainable-params, swallowed-updates, layer-without-gradient, optimizer-eps-flushed
# verdict: no alarm

import torch
from torch import nn

torch.set_num_threads(1)
torch.manual_seed(10)


class Backbone(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 32))

    def forward(self, x):
        return self.layers(x)


backbone = Backbone().half().eval().requires_grad_(False)
head = nn.Linear(32, 4)
optimizer = torch.optim.Adam(head.parameters(), lr=1e-3)
scaler = torch.amp.GradScaler("cpu")
x = torch.randn(64, 16)
y = torch.randint(4, (64,))
for step in range(50):
    optimizer.zero_grad()
    with torch.autocast("cpu", dtype=torch.float16):
        logits = head(backbone(x.half()))
    loss = nn.functional.cross_entropy(logits.float(), y)
    scaler.scale(loss).backward()
    scaler.step(optimizer)
    scaler.update()
    if step % 10 == 0:
        print(step, f"{loss.item():.4f}")
