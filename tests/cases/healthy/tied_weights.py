"""Custom autograd function, weight tying and an in-place ReLU: unusual, eager and fine."""
# must not find: compiled-blind-spot, rank-disagreement, hysteresis-growth-bug, layer-without-gradient
# verdict: no alarm

import torch
from torch import nn

torch.set_num_threads(1)
torch.manual_seed(49)


class Squash(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        y = torch.tanh(x)
        ctx.save_for_backward(y)
        return y

    @staticmethod
    def backward(ctx, grad):
        (y,) = ctx.saved_tensors
        return grad * (1 - y * y)


class Tied(nn.Module):
    def __init__(self, vocab=40, dim=32):
        super().__init__()
        self.embed = nn.Embedding(vocab, dim)
        self.mix = nn.Linear(dim, dim)
        self.act = nn.ReLU(inplace=True)

    def forward(self, ids):
        h = self.act(self.mix(self.embed(ids).mean(1)))
        return Squash.apply(h) @ self.embed.weight.t()


model = Tied()
optimizer = torch.optim.NAdam(model.parameters(), lr=2e-3)
scaler = torch.amp.GradScaler("cpu", init_scale=2.0**12)
ids = torch.randint(40, (64, 5))
for step in range(50):
    optimizer.zero_grad()
    with torch.autocast("cpu", dtype=torch.float16):
        logits = model(ids)
    loss = nn.functional.cross_entropy(logits.float(), ids[:, 0])
    scaler.scale(loss).backward()
    scaler.step(optimizer)
    scaler.update()
    if step % 10 == 0:
        print(step, loss.item())
