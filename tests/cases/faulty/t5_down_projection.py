"""A T5 feed-forward block whose down-projection is a hair over the largest FP16 number."""
# must find: forward-overflow lead at ffn.wo
# must not find: gradient-overflow, scale-thrashing, attention-logits-overflow, reduction-overflow
# verdict: failing

import torch
from torch import nn
from torch.nn import functional as F

torch.set_num_threads(1)
torch.manual_seed(1)


class FeedForward(nn.Module):
    def __init__(self, d_model: int, d_ff: int):
        super().__init__()
        self.wi = nn.Linear(d_model, d_ff, bias=False)
        self.wo = nn.Linear(d_ff, d_model, bias=False)

    def forward(self, x):
        return self.wo(F.relu(self.wi(x)))


class Encoder(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Linear(16, 32)
        self.ffn = FeedForward(32, 64)
        self.norm = nn.LayerNorm(32)
        self.head = nn.Linear(32, 4)

    def forward(self, x):
        h = self.embed(x)
        h = h + self.ffn(h).float()
        return self.head(self.norm(h))


model = Encoder()
with torch.no_grad():  # one outlier channel, as in the released checkpoint
    model.embed.bias[0] = 30.0
    model.ffn.wi.weight[:, 0] = 3.0
    model.ffn.wo.weight[3] = 11.5
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
scaler = torch.amp.GradScaler("cpu")
inputs = torch.randn(64, 16)
labels = torch.randint(4, (64,))

for step in range(40):
    optimizer.zero_grad()
    with torch.autocast("cpu", dtype=torch.float16):
        logits = model(inputs)
    loss = F.cross_entropy(logits.float(), labels)
    scaler.scale(loss).backward()
    scaler.step(optimizer)
    scaler.update()
    if step % 10 == 0:
        print(f"step {step} loss {loss.item():.4f}")
