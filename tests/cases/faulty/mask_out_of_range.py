"""Padding is masked by adding -1e9 to half scores; one sample is nothing but padding, so its rows are all -inf."""
# must find: masked-row lead at <- mask
# must not find: forward-overflow, attention-logits-overflow, gradient-overflow, nonfinite-input
# verdict: failing

import torch
from torch import nn
from torch.nn import functional as F

torch.set_num_threads(1)
torch.manual_seed(14)


class Pooler(nn.Module):
    def __init__(self, dim):
        super().__init__()
        self.q = nn.Linear(dim, dim)
        self.k = nn.Linear(dim, dim)
        self.v = nn.Linear(dim, dim)

    def forward(self, x, mask):
        scores = self.q(x) @ self.k(x).transpose(1, 2) / x.shape[-1] ** 0.5
        scores = scores + (1.0 - mask[:, None, :]).to(scores.dtype) * -1e9  # <- mask
        return F.softmax(scores, dim=-1) @ self.v(x)


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(50, 32)
        self.pool = Pooler(32)
        self.out = nn.Linear(32, 2)

    def forward(self, ids):
        mask = (ids != 0).float()
        return self.out(self.pool(self.embed(ids), mask).mean(1))


ids = torch.randint(1, 50, (8, 12))
ids[2, 5:] = 0
ids[5, :] = 0  # an empty document
labels = torch.randint(2, (8,))
model = Model()
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
scaler = torch.amp.GradScaler("cpu")
for step in range(30):
    optimizer.zero_grad()
    with torch.autocast("cpu", dtype=torch.float16):
        logits = model(ids)
    loss = F.cross_entropy(logits.float(), labels)
    scaler.scale(loss).backward()
    scaler.step(optimizer)
    scaler.update()
    if step % 10 == 0:
        print("loss", loss.item())
