"""Large queries and keys, scaled before the product: the scores stay inside FP16."""
# must not find: attention-logits-overflow, forward-overflow, forward-headroom-low, masked-row
# verdict: no alarm

import torch
from torch import nn

torch.set_num_threads(1)
torch.manual_seed(39)


class Attention(nn.Module):
    def __init__(self, dim):
        super().__init__()
        self.q, self.k, self.v = nn.Linear(dim, dim), nn.Linear(dim, dim), nn.Linear(dim, dim)

    def forward(self, x):
        q = self.q(x) * x.shape[-1] ** -0.5
        scores = q @ self.k(x).transpose(-2, -1)
        weights = scores.float().softmax(dim=-1)
        return weights.to(x.dtype) @ self.v(x)


model = nn.Sequential(nn.Linear(8, 32), Attention(32), nn.Linear(32, 8))
with torch.no_grad():
    model[1].q.bias.fill_(40.0)
    model[1].k.bias.fill_(60.0)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10)
x = torch.randn(8, 10, 8)
for step in range(40):
    optimizer.zero_grad()
    with torch.autocast("cpu", dtype=torch.float16):
        out = model(x)
    loss = nn.functional.mse_loss(out.float(), x)
    scaler.scale(loss).backward()
    scaler.step(optimizer)
    scaler.update()
    if step % 10 == 0:
        print(step, loss.item())
