"""Two optimizers share a scaler; the first is unscaled before clipping, the second was forgotten."""
# must find: clip-before-unscale lead at <- decoder clip
# must not find: double-unscale, missing-update, several-scalers, optimizer-without-gradients
# verdict: failing

import torch
from torch import nn

torch.set_num_threads(1)
torch.manual_seed(46)

encoder = nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 8))
decoder = nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Linear(32, 16))
opt_enc = torch.optim.AdamW(encoder.parameters(), lr=1e-3)
opt_dec = torch.optim.SGD(decoder.parameters(), lr=1e-2)
scaler = torch.amp.GradScaler("cpu")
data = torch.randn(64, 16)

for step in range(50):
    opt_enc.zero_grad()
    opt_dec.zero_grad()
    with torch.autocast("cpu", dtype=torch.float16):
        output = decoder(encoder(data))
        loss = nn.functional.mse_loss(output.float(), data)
    scaler.scale(loss).backward()
    scaler.unscale_(opt_enc)
    nn.utils.clip_grad_norm_(encoder.parameters(), 1.0)
    nn.utils.clip_grad_norm_(decoder.parameters(), 1.0)  # <- decoder clip
    scaler.step(opt_enc)
    scaler.step(opt_dec)
    scaler.update()
    if step % 10 == 9:
        print(f"iter {step + 1} recon {loss.item():.4f}")
