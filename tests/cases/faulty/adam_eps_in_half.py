"""Pure half training with Adam's default eps of 1e-8, which is zero in half: weights are NaN after one step."""
# must find: optimizer-eps-flushed
# must find: half-trainable-params
# must not find: forward-overflow, divergence, gradient-overflow, nonfinite-input
# verdict: failing

import torch
from torch import nn

torch.set_num_threads(1)
torch.manual_seed(34)

model = nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 4)).half()
optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
x = torch.randn(64, 16).half()
labels = torch.randint(4, (64,))

for step in range(20):
    optimizer.zero_grad()
    logits = model(x)
    loss = nn.functional.cross_entropy(logits.float(), labels)
    loss.backward()
    optimizer.step()
    if step < 3 or step == 19:
        print(f"step {step} loss {loss.item():.4f}")
