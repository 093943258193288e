"""Handwritten digits in mixed precision, with a mistake that costs the run: see `gradaudit demo`."""

import torch
from sklearn.datasets import load_digits
from torch import nn

device = "cuda" if torch.cuda.is_available() else "cpu"
torch.manual_seed(0)
torch.set_num_threads(1)

digits = load_digits()
images = torch.tensor(digits.data, dtype=torch.float32, device=device) / 16
labels = torch.tensor(digits.target, device=device)


def network(depth=6, width=64):
    layers = []
    for _ in range(depth):
        layers += [nn.Linear(width, width), nn.ReLU()]
    for layer in layers:
        if isinstance(layer, nn.Linear):
            nn.init.kaiming_normal_(layer.weight, nonlinearity="relu")
    return nn.Sequential(*layers, nn.Linear(width, 10))


WEIGHT = 1e-5  # the share of this loss in what was once a larger sum

model = network().to(device)
optimizer = torch.optim.Adam(model.parameters(), lr=2e-3, eps=1e-12)
# "start small, it will grow": after 2,000 clean steps, which this run does not have
scaler = torch.amp.GradScaler(device, init_scale=1.0)

for step in range(300):
    batch = torch.randint(len(images), (64,), device=device)
    with torch.autocast(device, dtype=torch.float16):
        loss = nn.functional.cross_entropy(model(images[batch]), labels[batch])
    optimizer.zero_grad()
    scaler.scale(WEIGHT * loss).backward()
    scaler.step(optimizer)
    scaler.update()
    if step % 50 == 49:
        print(f"step {step + 1:3d}  loss {loss.item():.3f}", flush=True)
