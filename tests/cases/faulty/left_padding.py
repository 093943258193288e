"""A causal mask and left padding leave the first tokens of the shorter sequence with nothing to look at."""
# must find: masked-row lead at <- fill
# must not find: forward-overflow, attention-logits-overflow, gradient-overflow
# verdict: failing

import torch
from torch import nn

torch.set_num_threads(1)
torch.manual_seed(16)


@torch.no_grad()
def build_mask(lengths, size):
    position = torch.arange(size)
    causal = position[None, :] <= position[:, None]
    real = position[None, :] >= (size - lengths)[:, None]
    return causal[None] & real[:, None, :]


class TinyLlama(nn.Module):
    def __init__(self, vocab=30, dim=32):
        super().__init__()
        self.embed = nn.Embedding(vocab, dim)
        self.q_proj = nn.Linear(dim, dim, bias=False)
        self.k_proj = nn.Linear(dim, dim, bias=False)
        self.v_proj = nn.Linear(dim, dim, bias=False)
        self.lm_head = nn.Linear(dim, vocab, bias=False)

    def forward(self, ids, allowed):
        x = self.embed(ids)
        scores = torch.bmm(self.q_proj(x), self.k_proj(x).mT) * x.shape[-1] ** -0.5
        scores = scores.masked_fill(~allowed, float("-inf"))  # <- fill
        weights = scores.softmax(dim=-1)
        return self.lm_head(torch.bmm(weights, self.v_proj(x)))


model = TinyLlama()
optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4)
scaler = torch.amp.GradScaler("cpu")
ids = torch.randint(30, (2, 9))
lengths = torch.tensor([9, 6])
allowed = build_mask(lengths, 9)

for step in range(30):
    optimizer.zero_grad()
    with torch.autocast("cpu", dtype=torch.float16):
        logits = model(ids, allowed)
    loss = nn.functional.cross_entropy(logits[:, :-1].reshape(-1, 30).float(), ids[:, 1:].reshape(-1))
    scaler.scale(loss).backward()
    scaler.step(optimizer)
    scaler.update()
    print(f"{step} {loss.item():.4f}") if step % 10 == 0 else None
