"""Each of two losses has a GradScaler of its own, yet both fill the gradients of one optimizer."""
# must find: several-scalers lead
# must not find: scaler-recreated, double-unscale, unscaled-backward
# verdict: attention

import torch
from torch import nn

torch.set_num_threads(1)
torch.manual_seed(58)

model = nn.Sequential(nn.Linear(10, 32), nn.ReLU(), nn.Linear(32, 10))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
scaler_recon = torch.amp.GradScaler("cpu", init_scale=2.0**14)
scaler_sparse = torch.amp.GradScaler("cpu", init_scale=2.0**8)
x = torch.randn(64, 10)

for step in range(40):
    with torch.autocast("cpu", dtype=torch.float16):
        hidden = model[1](model[0](x))
        out = model[2](hidden)
    recon = nn.functional.mse_loss(out.float(), x)
    sparse = hidden.float().abs().mean()
    optimizer.zero_grad()
    scaler_recon.scale(recon).backward(retain_graph=True)
    scaler_sparse.scale(0.1 * sparse).backward()
    scaler_recon.step(optimizer)
    scaler_recon.update()
    if step % 10 == 0:
        print(f"{step} recon {recon.item():.4f} sparse {sparse.item():.4f}")
