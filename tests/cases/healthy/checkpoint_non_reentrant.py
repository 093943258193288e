"""Non-reentrant activation checkpointing of a functional segment, with accumulation over two micro-batches."""
# must not find: layer-without-gradient, update-inside-accumulation, unscaled-backward, nonfinite-backward
# verdict: no alarm

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

torch.set_num_threads(1)
torch.manual_seed(18)

first, second, third = nn.Linear(12, 48), nn.Linear(48, 48), nn.Linear(48, 1)
everything = nn.ModuleList([first, second, third])


def segment(h):
    return torch.tanh(second(torch.tanh(h)))


def model(x):
    return third(checkpoint(segment, first(x), use_reentrant=False))


optimizer = torch.optim.SGD(everything.parameters(), lr=0.05)
scaler = torch.amp.GradScaler("cpu", init_scale=2.0**12)
data = torch.randn(32, 12)
target = data.mean(1, keepdim=True)
for _ in range(40):
    optimizer.zero_grad(set_to_none=True)
    for half in (slice(0, 16), slice(16, 32)):
        with torch.autocast("cpu", dtype=torch.float16):
            out = model(data[half])
        loss = (out.float() - target[half]).square().mean() / 2
        scaler.scale(loss).backward()
    scaler.step(optimizer)
    scaler.update()
print("loss", loss.item())
