"""Random-feature attention takes exp of its projections in half, far above exp(11)."""
# must find: forward-overflow lead at <- features
# must not find: attention-logits-overflow, gradient-overflow, masked-row
# verdict: failing

import torch
from torch import nn

torch.set_num_threads(1)
torch.manual_seed(10)


class FeatureAttention(nn.Module):
    def __init__(self, dim, features):
        super().__init__()
        self.to_q = nn.Linear(dim, dim)
        self.to_k = nn.Linear(dim, dim)
        self.to_v = nn.Linear(dim, dim)
        self.register_buffer("projection", torch.randn(features, dim))

    def feature_map(self, x):
        return torch.exp(x @ self.projection.t())  # <- features

    def forward(self, x):
        q, k = self.feature_map(self.to_q(x)), self.feature_map(self.to_k(x))
        v = self.to_v(x)
        context = k.transpose(-1, -2) @ v
        norm = q @ k.sum(dim=-2, keepdim=True).transpose(-1, -2)
        return (q @ context) / norm


model = nn.Sequential(FeatureAttention(32, 16), nn.Linear(32, 32))
with torch.no_grad():
    model[0].to_q.weight.mul_(4.0)
    model[0].to_k.weight.mul_(0.2)
optimizer = torch.optim.RAdam(model.parameters(), lr=1e-4)
scaler = torch.amp.GradScaler("cpu")
x = torch.randn(4, 16, 32)

for step in range(30):
    optimizer.zero_grad()
    with torch.autocast("cpu", dtype=torch.float16):
        y = model(x)
        loss = (y.float() - x).pow(2).mean()
    scaler.scale(loss).backward()
    scaler.step(optimizer)
    scaler.update()
    if (step + 1) % 10 == 0:
        print(step + 1, loss.item())
