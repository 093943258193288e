"""Two independent faults: gradients are clipped before they are unscaled, and later an auxiliary product overflows."""
# must find: forward-overflow at <- energy
# must find: clip-before-unscale at <- clip
# verdict: failing

import torch
from torch import nn

torch.set_num_threads(1)
torch.manual_seed(13)


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.enc = nn.Linear(16, 48)
        self.dec = nn.Linear(48, 16)
        self.gain = 1.0

    def forward(self, x):
        code = torch.relu(self.enc(x))
        amplitude = code * self.gain
        energy = amplitude * amplitude.roll(1, dims=-1)  # <- energy
        return self.dec(code), energy


model = Net()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
scaler = torch.amp.GradScaler("cpu")
data = torch.randn(64, 16)

for step in range(60):
    if step == 35:
        model.gain = 600.0
    optimizer.zero_grad()
    with torch.autocast("cpu", dtype=torch.float16):
        recon, energy = model(data)
        loss = nn.functional.mse_loss(recon.float(), data) + 1e-7 * energy.float().mean()
    scaler.scale(loss).backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)  # <- clip
    scaler.step(optimizer)
    scaler.update()
    if step % 20 == 0:
        print(f"step {step} loss {loss.item():.4f}")
