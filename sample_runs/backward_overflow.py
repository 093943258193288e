"""The scale is held at 2^19 by hand: the forward is finite, the gradients of most steps are not."""

import torch
from sklearn.datasets import load_digits
from torch import nn

device = "cuda" if torch.cuda.is_available() else "cpu"
torch.manual_seed(0)
SCALE = 2.0**19


class Block(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.inner = nn.Linear(width, width)
        self.outer = nn.Linear(width, width)

    def forward(self, x):
        return x + self.outer(torch.relu(self.inner(x)))


digits = load_digits()
images = torch.tensor(digits.data, dtype=torch.float32, device=device) / 16
labels = torch.tensor(digits.target, device=device)

model = nn.Sequential(*[Block(64) for _ in range(3)], nn.Linear(64, 10)).to(device)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
scaler = torch.amp.GradScaler(device, init_scale=SCALE)

for step in range(120):
    batch = torch.randint(len(images), (64,), device=device)
    with torch.autocast(device, dtype=torch.float16):
        loss = nn.functional.cross_entropy(model(images[batch]), labels[batch])
    optimizer.zero_grad()
    scaler.scale(loss).backward()
    scaler.step(optimizer)
    scaler.update(SCALE)

print(f"loss {loss.item():.3f}")
