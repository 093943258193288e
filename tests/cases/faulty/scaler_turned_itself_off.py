"""GradScaler() without a device turns itself off where there is no CUDA; FP16 autocast runs on without loss scaling."""
# must find: autocast-inactive lead at <- scaler
# must not find: scaler-without-fp16, unscaled-backward, step-bypasses-scaler
# verdict: attention

import torch
from torch import nn

torch.set_num_threads(1)
torch.manual_seed(69)


class Autoencoder(nn.Module):
    def __init__(self):
        super().__init__()
        self.down = nn.Linear(24, 6)
        self.up = nn.Linear(6, 24)

    def forward(self, x):
        return self.up(torch.relu(self.down(x)))


net = Autoencoder()
optimizer = torch.optim.Adam(net.parameters(), lr=1e-3)
scaler = torch.amp.GradScaler()  # <- scaler
x = torch.randn(32, 24)
for _ in range(40):
    with torch.autocast("cpu", dtype=torch.float16):
        out = net(x)
    loss = nn.functional.mse_loss(out.float(), x)
    optimizer.zero_grad()
    scaler.scale(loss).backward()
    scaler.step(optimizer)
    scaler.update()
print(f"reconstruction error {loss.item():.4f}")
