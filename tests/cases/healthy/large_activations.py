"""Activations stand at 30,000: large, finite, and more than a binade away from the limit."""
# must not find: forward-headroom-low, forward-overflow, gradient-overflow, divergence
# verdict: no alarm

import torch
from torch import nn
from torch.nn.functional import cross_entropy

torch.set_num_threads(1)
torch.manual_seed(30)

expand = nn.Linear(16, 16)
nn.init.constant_(expand.bias, 30000.0)
model = nn.Sequential()
model.add_module("stem", nn.Linear(8, 16))
model.add_module("expand", expand)
model.add_module("norm", nn.LayerNorm(16))
model.add_module("head", nn.Linear(16, 5))
with torch.no_grad():
    expand.bias[:4] = torch.tensor([0.0, 1000.0, -500.0, 20.0])
x, y = torch.randn(40, 8), torch.randint(5, (40,))
opt = torch.optim.SGD(model[3].parameters(), lr=0.05)
model[:3].requires_grad_(False)
scaler = torch.amp.GradScaler("cpu")
for epoch in range(8):
    for i in range(0, 40, 8):
        opt.zero_grad()
        with torch.autocast("cpu", dtype=torch.float16):
            h = model.expand(model.stem(x[i : i + 8]))
            logits = model.head(model.norm(h.float()))
        loss = cross_entropy(logits.float(), y[i : i + 8])
        scaler.scale(loss).backward()
        scaler.step(opt)
        scaler.update()
    print(f"epoch {epoch} loss {loss.item():.4f}")
