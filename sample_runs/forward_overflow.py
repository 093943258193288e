"""A gate is multiplied by its value without a bound: once the product passes 65,504 the loss is NaN at every scale."""

import torch
from sklearn.datasets import load_digits
from torch import nn

device = "cuda" if torch.cuda.is_available() else "cpu"
torch.manual_seed(0)


class GatedBlock(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.gate = nn.Linear(width, width)
        self.value = nn.Linear(width, width)

    def forward(self, x):
        return torch.relu(self.gate(x)) * self.value(x)


digits = load_digits()
images = torch.tensor(digits.data, dtype=torch.float32, device=device)
labels = torch.tensor(digits.target, device=device)

model = nn.Sequential(GatedBlock(64), GatedBlock(64), GatedBlock(64), nn.Linear(64, 10)).to(device)
optimizer = torch.optim.AdamW(model.parameters(), lr=2e-2)
scaler = torch.amp.GradScaler(device)

for step in range(120):
    batch = torch.randint(len(images), (64,), device=device)
    with torch.autocast(device, dtype=torch.float16):
        loss = nn.functional.cross_entropy(model(images[batch]), labels[batch])
    optimizer.zero_grad()
    scaler.scale(loss).backward()
    scaler.step(optimizer)
    scaler.update()

print(f"loss {loss.item():.3f}")
