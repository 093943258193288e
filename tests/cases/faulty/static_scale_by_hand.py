"""The loss is multiplied by a fixed 4,096 and the gradients divided again, with nobody looking for inf."""
# must find: step-bypasses-scaler lead at <- step
# must not find: divergence, masked-row, epsilon-flushed, half-trainable-params
# verdict: failing

import torch
from torch import nn

torch.set_num_threads(1)
torch.manual_seed(75)
LOSS_SCALE = 2.0**12

model = nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 2))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for step in range(30):
    x = torch.randn(16, 16)
    y = x[:, :2] * (60.0 if step == 12 else 1.0)
    optimizer.zero_grad()
    with torch.autocast("cpu", dtype=torch.float16):
        out = model(x)
    loss = nn.functional.mse_loss(out.float(), y)
    (loss * LOSS_SCALE).backward()
    for p in model.parameters():
        p.grad.div_(LOSS_SCALE)
    optimizer.step()  # <- step
    if step % 10 == 0:
        print(step, loss.item())
