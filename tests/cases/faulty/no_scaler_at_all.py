"""The fp16 flag turns autocast on, but the trainer never creates a GradScaler; gradients of a small loss flush."""
# must find: missing-loss-scaling lead
# must not find: forward-overflow, step-bypasses-scaler, unscaled-backward, autocast-inactive
# verdict: attention

import torch
from torch import nn

torch.set_num_threads(1)
torch.manual_seed(41)


class Trainer:
    def __init__(self, model, fp16=True):
        self.model = model
        self.fp16 = fp16
        self.optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)

    def fit(self, x, y, steps):
        for step in range(steps):
            self.optimizer.zero_grad()
            with torch.autocast("cpu", dtype=torch.float16, enabled=self.fp16):
                out = self.model(x)
            loss = (out.float() - y).pow(2).mean() * 1e-4
            loss.backward()
            self.optimizer.step()
            if step % 15 == 0:
                print(f"{step:4d} {loss.item():.3e}")


layers = []
for _ in range(4):
    layers += [nn.Linear(32, 32), nn.ReLU()]
Trainer(nn.Sequential(*layers, nn.Linear(32, 2))).fit(torch.randn(256, 32), torch.randn(256, 2), steps=45)
