"""The forward is finite and in FP32, but the square root of zero has an infinite slope: NaN gradients at any scale."""
# must find: nonfinite-backward lead at <- root
# must not find: gradient-overflow, forward-overflow, epsilon-flushed, scale-thrashing
# verdict: failing

import torch
from torch import nn

torch.set_num_threads(1)
torch.manual_seed(25)

net = nn.Sequential(nn.Linear(6, 32), nn.SiLU(), nn.Linear(32, 3))
opt = torch.optim.AdamW(net.parameters(), lr=1e-3)
scaler = torch.amp.GradScaler("cpu", init_scale=256.0)


def pair_distances(points):
    delta = points[:, None, :] - points[None, :, :]
    return delta.pow(2).sum(-1).sqrt()  # <- root


atoms = torch.randn(20, 6)
wanted = torch.rand(20, 20)
for step in range(30):
    opt.zero_grad()
    with torch.autocast("cpu", dtype=torch.float16):
        points = net(atoms)
    distances = pair_distances(points.float())
    loss = (distances - wanted).abs().mean()
    scaler.scale(loss).backward()
    scaler.step(opt)
    scaler.update()
    if step % 15 == 0:
        print(step, loss.item())
