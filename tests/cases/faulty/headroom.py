"""Activations of the last block stand at 45,000: finite, but within one binade of the FP16 limit."""
# must find: forward-headroom-low lead at expand
# must not find: forward-overflow, gradient-overflow, scale-collapse, divergence
# verdict: attention

import torch
from torch import nn
from torch.nn.functional import cross_entropy

torch.set_num_threads(1)
torch.manual_seed(2)

expand = nn.Linear(16, 16)
nn.init.constant_(expand.bias, 42000.0)
model = nn.Sequential()
model.add_module("stem", nn.Linear(8, 16))
model.add_module("expand", expand)
model.add_module("norm", nn.LayerNorm(16))
model.add_module("head", nn.Linear(16, 5))
with torch.no_grad():
    expand.bias[:4] = torch.tensor([0.0, 1000.0, -500.0, 20.0])

x = torch.randn(40, 8)
y = torch.randint(5, (40,))
opt = torch.optim.SGD(model.parameters(), lr=0.05)
scaler = torch.amp.GradScaler("cpu")


def run_model(batch):
    with torch.autocast("cpu", dtype=torch.float16):
        h = model.expand(model.stem(batch))
    return model.head(model.norm(h.float()))


for epoch in range(6):
    for i in range(0, 40, 8):
        opt.zero_grad()
        loss = cross_entropy(run_model(x[i : i + 8]), y[i : i + 8])
        scaler.scale(loss).backward()
        scaler.step(opt)
        scaler.update()
    print(f"epoch {epoch} loss {loss.item():.4f}")
