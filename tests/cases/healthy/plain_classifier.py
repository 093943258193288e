"""A textbook mixed-precision loop with torch's own settings."""
# must not find: missing-loss-scaling, missing-update, critical-op-in-half, never-applied, scale-never-grew
# verdict: no alarm

import torch
from torch import nn

torch.set_num_threads(1)
torch.manual_seed(0)

model = nn.Sequential(nn.Linear(16, 64), nn.ReLU(), nn.Dropout(0.1), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 5))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
scaler = torch.amp.GradScaler("cpu")
x = torch.randn(256, 16)
y = x[:, :5].argmax(1)

for step in range(80):
    rows = torch.randint(256, (32,))
    optimizer.zero_grad()
    with torch.autocast("cpu", dtype=torch.float16):
        logits = model(x[rows])
    loss = nn.functional.cross_entropy(logits.float(), y[rows])
    scaler.scale(loss).backward()
    scaler.step(optimizer)
    scaler.update()
    if step % 20 == 0:
        print(f"step {step} loss {loss.item():.4f}")
