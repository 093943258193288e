"""One loss of a sum, weighted 1e-5, and a scale that starts at 1: most gradients round to zero."""

import torch
from sklearn.datasets import load_digits
from torch import nn

device = "cuda" if torch.cuda.is_available() else "cpu"
torch.manual_seed(0)

digits = load_digits()
images = torch.tensor(digits.data, dtype=torch.float32, device=device) / 16
labels = torch.tensor(digits.target, device=device)

layers = []
for _ in range(5):
    layers += [nn.Linear(64, 64), nn.ReLU()]
model = nn.Sequential(*layers, nn.Linear(64, 10)).to(device)
optimizer = torch.optim.Adam(model.parameters(), lr=2e-3, eps=1e-12)
scaler = torch.amp.GradScaler(device, init_scale=1.0)

for step in range(150):
    batch = torch.randint(len(images), (64,), device=device)
    with torch.autocast(device, dtype=torch.float16):
        loss = 1e-5 * nn.functional.cross_entropy(model(images[batch]), labels[batch])
    optimizer.zero_grad()
    scaler.scale(loss).backward()
    scaler.step(optimizer)
    scaler.update()

print(f"loss {1e5 * loss.item():.3f}")
