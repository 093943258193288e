"""The loss is scaled but the optimizer is stepped directly, so SGD moves 1,024 times too far."""
# must find: step-bypasses-scaler lead at <- step
# must not find: forward-overflow, unscaled-backward, missing-loss-scaling, optimizer-without-gradients
# verdict: failing

import torch
from torch import nn

torch.set_num_threads(1)
torch.manual_seed(53)

field = nn.Sequential(nn.Linear(3, 32), nn.ReLU(), nn.Linear(32, 4))
optimizer = torch.optim.SGD(field.parameters(), lr=1e-5)
grad_scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10)
rays = torch.rand(128, 3)
colours = torch.rand(128, 4)
for step in range(40):
    with torch.autocast("cpu", dtype=torch.float16):
        rgb = field(rays)
    loss = nn.functional.smooth_l1_loss(rgb.float(), colours)
    optimizer.zero_grad()
    grad_scaler.scale(loss).backward()
    optimizer.step()  # <- step
    if step % 20 == 0:
        print(f"loss={loss.item():.5f}")
