"""From step 9 on the objective has the wrong sign: the loss climbs through several decades, then the forward breaks."""
# must find: divergence lead
# must not find: scale-thrashing, nonfinite-input, attention-logits-overflow, masked-row
# verdict: failing

import torch
from torch import nn

torch.set_num_threads(1)
torch.manual_seed(81)


class Regression(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Linear(32, 32), nn.ReLU(), nn.Linear(32, 1))

    def forward(self, x):
        return self.layers(x)


model = Regression()
optimizer = torch.optim.Adam(model.parameters(), lr=0.8)
scaler = torch.amp.GradScaler("cpu", init_scale=1.0)
for step in range(60):
    x = torch.randn(32, 8)
    y = x.sum(1, keepdim=True)
    optimizer.zero_grad()
    with torch.autocast("cpu", dtype=torch.float16):
        out = model(x)
    loss = nn.functional.smooth_l1_loss(out.float(), y)
    scaler.scale(-loss if step > 8 else loss).backward()
    scaler.step(optimizer)
    scaler.update()
    if step % 3 == 0:
        print(f"{step} {loss.item():.5g}")
