"""loss.backward() is called without scaler.scale; scaler.step then has no scale to divide by and asserts."""
# must find: unscaled-backward lead at <- backward
# must not find: optimizer-without-gradients, double-unscale, missing-update, step-bypasses-scaler
# verdict: failing
# raises: AssertionError

import torch
from torch import nn

torch.set_num_threads(1)
torch.manual_seed(50)


class LitModel(nn.Module):
    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 1))

    def training_step(self, batch):
        x, y = batch
        return nn.functional.mse_loss(self.net(x).float(), y)


lit = LitModel()
optimizer = torch.optim.Adam(lit.parameters())
scaler = torch.amp.GradScaler("cpu")
for _ in range(10):
    batch = torch.randn(8, 8), torch.randn(8, 1)
    optimizer.zero_grad()
    with torch.autocast("cpu", dtype=torch.float16):
        loss = lit.training_step(batch)
    loss.backward()  # <- backward
    scaler.step(optimizer)
    scaler.update()
