"""The main loss goes through the scaler, an auxiliary loss does not: its gradients end up 65,536 times too small."""
# must find: unscaled-backward lead at <- auxiliary
# must not find: step-bypasses-scaler, several-scalers, update-inside-accumulation, clip-before-unscale
# verdict: failing

import torch
from torch import nn

torch.set_num_threads(1)
torch.manual_seed(51)


class TwoHeads(nn.Module):
    def __init__(self):
        super().__init__()
        self.body = nn.Sequential(nn.Linear(16, 32), nn.ReLU())
        self.classes = nn.Linear(32, 4)
        self.angle = nn.Linear(32, 1)

    def forward(self, x):
        h = self.body(x)
        return self.classes(h), self.angle(h)


model = TwoHeads()
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
scaler = torch.amp.GradScaler("cpu")
x = torch.randn(64, 16)
kind, angle = torch.randint(4, (64,)), torch.rand(64, 1)

for step in range(40):
    optimizer.zero_grad()
    with torch.autocast("cpu", dtype=torch.float16):
        classes, predicted = model(x)
    main = nn.functional.cross_entropy(classes.float(), kind)
    auxiliary = nn.functional.mse_loss(predicted.float(), angle)
    scaler.scale(main).backward(retain_graph=True)
    auxiliary.backward()  # <- auxiliary
    scaler.step(optimizer)
    scaler.update()
    if step % 10 == 0:
        print(f"{step} main {main.item():.3f} aux {auxiliary.item():.3f}")
