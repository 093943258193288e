"""Self-attention divides by sqrt(d) only after the query-key product has overflowed in half."""
# must find: attention-logits-overflow lead at <- scores
# must not find: forward-overflow, gradient-overflow, masked-row, reduction-overflow
# verdict: failing

import math

import torch
from torch import nn

torch.set_num_threads(1)
torch.manual_seed(6)


class SelfAttention(nn.Module):
    def __init__(self, dim, heads):
        super().__init__()
        self.heads = heads
        self.qkv = nn.Linear(dim, 3 * dim)
        self.proj = nn.Linear(dim, dim)

    def forward(self, x):
        b, t, c = x.shape
        q, k, v = self.qkv(x).chunk(3, dim=-1)
        q = q.view(b, t, self.heads, -1).transpose(1, 2)
        k = k.view(b, t, self.heads, -1).transpose(1, 2)
        v = v.view(b, t, self.heads, -1).transpose(1, 2)
        scores = q @ k.transpose(-2, -1)  # <- scores
        weights = torch.softmax(scores / math.sqrt(c // self.heads), dim=-1)
        return self.proj((weights @ v).transpose(1, 2).reshape(b, t, c))


class Classifier(nn.Module):
    def __init__(self):
        super().__init__()
        self.attn = SelfAttention(32, 2)
        self.head = nn.Linear(32, 6)

    def forward(self, x):
        return self.head((x + self.attn(x)).mean(1))


model = Classifier()
with torch.no_grad():
    model.attn.qkv.bias[:64] = 75.0
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
scaler = torch.amp.GradScaler("cpu")
tokens = torch.randn(8, 10, 32)
labels = torch.randint(6, (8,))

for step in range(30):
    optimizer.zero_grad()
    with torch.autocast("cpu", dtype=torch.float16):
        logits = model(tokens)
    loss = nn.functional.cross_entropy(logits.float(), labels)
    scaler.scale(loss).backward()
    scaler.step(optimizer)
    scaler.update()
    if step % 10 == 0:
        print(f"step={step} loss={loss.item():.4f}")
