"""The blocks are compiled, so what happens inside them cannot be seen."""
# must find: compiled-blind-spot lead
# must not find: layer-without-gradient, missing-loss-scaling, scaler-without-fp16
# verdict: healthy

import torch
from torch import nn

torch.set_num_threads(1)
torch.manual_seed(79)

trunk = torch.compile(nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 32)), backend="eager")
head = nn.Linear(32, 4)
optimizer = torch.optim.AdamW([*trunk.parameters(), *head.parameters()], lr=1e-3)
scaler = torch.amp.GradScaler("cpu")
x, y = torch.randn(64, 16), torch.randint(4, (64,))
for _ in range(40):
    optimizer.zero_grad()
    with torch.autocast("cpu", dtype=torch.float16):
        logits = head(trunk(x))
    loss = nn.functional.cross_entropy(logits.float(), y)
    scaler.scale(loss).backward()
    scaler.step(optimizer)
    scaler.update()
print("loss", loss.item())
