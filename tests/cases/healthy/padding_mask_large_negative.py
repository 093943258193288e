"""The mask constant -1e9 becomes -inf in half, but every row keeps at least one entry and softmax absorbs it."""
# must not find: masked-row, forward-overflow, attention-logits-overflow, epsilon-flushed, nonfinite-backward
# verdict: no alarm

import torch
from torch import nn

torch.set_num_threads(1)
torch.manual_seed(12)

embed = nn.Embedding(30, 24)
project = nn.Linear(24, 48)
readout = nn.Linear(24, 30)
params = [p for m in (embed, project, readout) for p in m.parameters()]


def forward(ids, keep):
    x = embed(ids)
    q, k = project(x).chunk(2, dim=-1)
    bias = (1.0 - keep.to(q.dtype))[:, None, :] * -1e9
    weights = torch.softmax(torch.bmm(q, k.mT) * 0.2 + bias, dim=-1)
    return readout(torch.bmm(weights, x.to(weights.dtype)))


optimizer = torch.optim.AdamW(params, lr=1e-3)
scaler = torch.amp.GradScaler("cpu", init_scale=2.0**12)
ids = torch.randint(30, (6, 8))
keep = torch.arange(8)[None, :] < torch.tensor([8, 8, 5, 3, 1, 7])[:, None]
for _ in range(40):
    optimizer.zero_grad()
    with torch.autocast("cpu", dtype=torch.float16):
        logits = forward(ids, keep)
    loss = nn.functional.cross_entropy(logits.float()[keep], ids[keep])
    scaler.scale(loss).backward()
    scaler.step(optimizer)
    scaler.update()
print(f"masked loss {loss.item():.4f}")
