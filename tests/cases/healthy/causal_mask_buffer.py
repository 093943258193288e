"""A causal mask with -inf lives in a buffer and is added to the scores of every block."""
# must not find: nonfinite-buffer, masked-row, attention-logits-overflow, forward-overflow
# verdict: no alarm

import torch
from torch import nn

torch.set_num_threads(1)
torch.manual_seed(13)


class CausalBlock(nn.Module):
    def __init__(self, dim, length):
        super().__init__()
        self.norm = nn.LayerNorm(dim)
        self.qkv = nn.Linear(dim, 3 * dim)
        self.proj = nn.Linear(dim, dim)
        mask = torch.full((length, length), float("-inf")).triu(1)
        self.register_buffer("mask", mask)

    def forward(self, x):
        q, k, v = self.qkv(self.norm(x)).chunk(3, dim=-1)
        scores = (q * q.shape[-1] ** -0.5) @ k.transpose(-2, -1)
        weights = torch.softmax(scores + self.mask, dim=-1)
        return x + self.proj(weights.to(v.dtype) @ v)


class TinyGpt(nn.Module):
    def __init__(self, vocab=32, dim=32, length=10):
        super().__init__()
        self.tokens = nn.Embedding(vocab, dim)
        self.places = nn.Parameter(torch.randn(length, dim) * 0.02)
        self.blocks = nn.Sequential(CausalBlock(dim, length), CausalBlock(dim, length))
        self.head = nn.Linear(dim, vocab)

    def forward(self, ids):
        return self.head(self.blocks(self.tokens(ids) + self.places))


model = TinyGpt()
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
scaler = torch.amp.GradScaler("cpu")
text = torch.randint(32, (8, 11))
for step in range(40):
    optimizer.zero_grad()
    with torch.autocast("cpu", dtype=torch.float16):
        logits = model(text[:, :-1])
    loss = nn.functional.cross_entropy(logits.flatten(0, 1).float(), text[:, 1:].flatten())
    scaler.scale(loss).backward()
    scaler.step(optimizer)
    scaler.update()
    if step % 10 == 0:
        print(f"step {step} loss {loss.item():.4f}")
