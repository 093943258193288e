"""An optimizer.step() of the FP32 version was left in behind scaler.step(optimizer)."""
# must find: step-bypasses-scaler lead at <- leftover
# must not find: unscaled-backward, double-unscale, missing-update, clip-before-unscale
# verdict: failing

import torch
import torch.nn as nn

torch.set_num_threads(1)
torch.manual_seed(52)

net_g = nn.Sequential(nn.Linear(10, 32), nn.LeakyReLU(0.1), nn.Linear(32, 10))
optim_g = torch.optim.AdamW(net_g.parameters(), lr=1e-4)
scaler = torch.amp.GradScaler("cpu", enabled=True)
mel = torch.randn(32, 10)

for step in range(40):
    with torch.autocast("cpu", dtype=torch.float16):
        y_hat = net_g(mel)
    loss_mel = (y_hat.float() - mel).abs().mean()
    optim_g.zero_grad()
    scaler.scale(loss_mel).backward()
    scaler.step(optim_g)
    optim_g.step()  # <- leftover
    scaler.update()
    if step % 10 == 0:
        print(f"step {step}, loss_mel={loss_mel.item():.4f}")
