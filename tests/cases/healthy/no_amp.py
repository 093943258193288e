"""Plain FP32 training with clipping and a schedule: no autocast, no scaler."""
# must not find: missing-loss-scaling, scaler-without-fp16, clip-before-unscale, step-bypasses-scaler, autocast-inactive
# verdict: no alarm

import torch
from torch import nn

torch.set_num_threads(1)
torch.manual_seed(20)

net = nn.Sequential(nn.Linear(10, 32), nn.Sigmoid(), nn.Linear(32, 1))
optimizer = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)
schedule = torch.optim.lr_scheduler.StepLR(optimizer, step_size=20, gamma=0.5)
x = torch.randn(64, 10)
y = torch.sin(x.sum(1, keepdim=True))
for epoch in range(60):
    loss = nn.functional.mse_loss(net(x), y)
    optimizer.zero_grad()
    loss.backward()
    nn.utils.clip_grad_norm_(net.parameters(), 1.0)
    optimizer.step()
    schedule.step()
    if epoch % 20 == 0:
        print(f"epoch {epoch} {loss.item():.4f}")
