"""One single batch overflows once in the middle of a sound run, and nothing was watching at that moment."""
# must find: unlocated-nonfinite lead
# must not find: forward-overflow, scale-collapse, divergence, nonfinite-weight, nonfinite-input
# verdict: attention

import torch
from torch import nn

torch.set_num_threads(1)
torch.manual_seed(0)
model = nn.Sequential(nn.Linear(12, 32), nn.ReLU(), nn.Linear(32, 32), nn.ReLU(), nn.Linear(32, 2))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
scaler = torch.amp.GradScaler("cpu")

data = torch.randn(60, 16, 12)
data[33] *= 3e6  # a sensor glitch
truth = torch.randint(2, (60, 16))

for step, (batch, labels) in enumerate(zip(data, truth, strict=True)):
    optimizer.zero_grad()
    with torch.autocast("cpu", dtype=torch.float16):
        logits = model(batch)
    loss = nn.functional.cross_entropy(logits.float(), labels)
    scaler.scale(loss).backward()
    scaler.step(optimizer)
    scaler.update()
    if step % 20 == 19:
        print(f"step {step + 1}: {loss.item():.4f}")
