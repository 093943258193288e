"""Two heads share one scale, but their losses differ by ten decades: what saves the one destroys the other."""

import torch
from sklearn.datasets import load_digits
from torch import nn

device = "cuda" if torch.cuda.is_available() else "cpu"
torch.manual_seed(0)


class TwoTasks(nn.Module):
    def __init__(self):
        super().__init__()
        self.classifier = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10))
        self.brightness = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 1))

    def forward(self, x):
        return self.classifier(x), self.brightness(x)


digits = load_digits()
images = torch.tensor(digits.data, dtype=torch.float32, device=device) / 16
labels = torch.tensor(digits.target, device=device)

model = TwoTasks().to(device)
optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
scaler = torch.amp.GradScaler(device)

for step in range(120):
    batch = torch.randint(len(images), (64,), device=device)
    with torch.autocast(device, dtype=torch.float16):
        logits, brightness = model(images[batch])
        classification = nn.functional.cross_entropy(logits, labels[batch])
        regression = nn.functional.mse_loss(brightness.squeeze(1).float(), 1e3 * images[batch].mean(1))
        loss = 1e-6 * classification + 10.0 * regression
    optimizer.zero_grad()
    scaler.scale(loss).backward()
    scaler.step(optimizer)
    scaler.update()

print(f"loss {loss.item():.3g}")
