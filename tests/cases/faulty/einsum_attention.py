"""Attention written as a function with einsum, outside every module, overflows in its score product."""
# must find: attention-logits-overflow lead at <- scores
# must not find: forward-overflow, gradient-overflow, scale-thrashing
# verdict: failing

import torch
from torch import nn

torch.set_num_threads(1)
torch.manual_seed(9)

query = nn.Linear(24, 24)
key = nn.Linear(24, 24)
value = nn.Linear(24, 24)
readout = nn.Linear(24, 1)
params = [p for m in (query, key, value, readout) for p in m.parameters()]
with torch.no_grad():
    query.weight.mul_(300)
    key.weight.mul_(300)


def attend(q, k, v):
    scores = torch.einsum("bqd,bkd->bqk", q, k)  # <- scores
    return torch.einsum("bqk,bkd->bqd", (scores * q.shape[-1] ** -0.5).softmax(-1), v)


def loss_fn(x, y):
    h = attend(query(x), key(x), value(x))
    return nn.functional.mse_loss(readout(h).float().squeeze(-1), y)


opt = torch.optim.Adam(params, lr=1e-4)
scaler = torch.amp.GradScaler("cpu")
x, y = torch.randn(6, 12, 24), torch.randn(6, 12)
for _ in range(30):
    with torch.autocast("cpu", dtype=torch.float16):
        loss = loss_fn(x, y)
    opt.zero_grad()
    scaler.scale(loss).backward()
    scaler.step(opt)
    scaler.update()
print(f"final loss: {loss.item()}")
