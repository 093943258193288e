"""Every epoch puts the scale back to 2^26: five or so steps are skipped each time until it has come down again."""

import torch
from sklearn.datasets import load_digits
from torch import nn

device = "cuda" if torch.cuda.is_available() else "cpu"
torch.manual_seed(0)

digits = load_digits()
images = torch.tensor(digits.data, dtype=torch.float32, device=device) / 16
labels = torch.tensor(digits.target, device=device)

model = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10)).to(device)
optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
scaler = torch.amp.GradScaler(device)

for epoch in range(10):
    for batch in torch.randperm(len(images), device=device)[:1600].split(64):
        with torch.autocast(device, dtype=torch.float16):
            loss = nn.functional.cross_entropy(model(images[batch]), labels[batch])
        optimizer.zero_grad()
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
    scaler.update(2.0**26)

print(f"loss {loss.item():.3f}")
