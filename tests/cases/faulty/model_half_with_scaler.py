"""model.half() with a GradScaler: torch refuses to unscale FP16 gradients at the first step."""
# must find: half-trainable-params lead at 0.weight
# must not find: forward-overflow, nonfinite-weight, double-unscale, optimizer-without-gradients
# verdict: failing
# raises: ValueError

import torch
from torch import nn

torch.set_num_threads(1)
torch.manual_seed(36)
model = nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 4))
model.half()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
scaler = torch.amp.GradScaler("cpu")

for _ in range(10):
    x, y = torch.randn(8, 16), torch.randint(4, (8,))
    with torch.autocast("cpu", dtype=torch.float16):
        loss = nn.functional.cross_entropy(model(x).float(), y)
    scaler.scale(loss).backward()
    scaler.step(optimizer)
    scaler.update()
    optimizer.zero_grad()
