"""The learning rate is far too high: loss and gradients grow step by step until everything overflows."""
# must find: divergence lead
# must not find: gradient-overflow, scale-thrashing, nonfinite-input, attention-logits-overflow
# verdict: failing

import torch
from torch import nn

torch.set_num_threads(1)
torch.manual_seed(70)

model = nn.Linear(8, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.75)
scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
x = torch.randn(64, 8)
y = x @ torch.randn(8, 1) * 2

for step in range(60):
    optimizer.zero_grad()
    with torch.autocast("cpu", dtype=torch.float16):
        out = model(x)
    loss = nn.functional.mse_loss(out.float(), y)
    scaler.scale(loss).backward()
    scaler.step(optimizer)
    scaler.update()
    if step % 2 == 0 and step < 40:
        print(f"step {step} loss {loss.item():.4g}")
