"""Padding is masked with -inf in half; the shortest sample keeps one token."""
# must not find: masked-row, forward-overflow, attention-logits-overflow, nonfinite-input, forward-headroom-low
# verdict: no alarm

import torch
from torch import nn

torch.set_num_threads(1)
torch.manual_seed(11)


class Pooler(nn.Module):
    def __init__(self, dim):
        super().__init__()
        self.q = nn.Linear(dim, dim)
        self.k = nn.Linear(dim, dim)
        self.v = nn.Linear(dim, dim)

    def forward(self, x, padded):
        scores = self.q(x) @ self.k(x).transpose(1, 2) * x.shape[-1] ** -0.5
        scores = scores.masked_fill(padded[:, None, :], float("-inf"))
        return torch.softmax(scores.float(), dim=-1).to(scores.dtype) @ self.v(x)


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(50, 32, padding_idx=0)
        self.pool = Pooler(32)
        self.out = nn.Linear(32, 2)

    def forward(self, ids):
        return self.out(self.pool(self.embed(ids), ids == 0).mean(1))


ids = torch.randint(1, 50, (8, 12))
ids[2, 5:] = 0
ids[5, 1:] = 0  # one word
labels = torch.randint(2, (8,))
model = Model()
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
scaler = torch.amp.GradScaler("cpu")
for step in range(40):
    optimizer.zero_grad()
    with torch.autocast("cpu", dtype=torch.float16):
        logits = model(ids)
    loss = nn.functional.cross_entropy(logits.float(), labels)
    scaler.scale(loss).backward()
    scaler.step(optimizer)
    scaler.update()
    if step % 10 == 0:
        print("loss", loss.item())
