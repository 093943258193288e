"""The epoch function builds a new GradScaler each time, so every epoch starts with the same skipped steps."""
# must find: scaler-recreated lead at <- new scaler
# must not find: several-scalers, resume-reset-scale, missing-update
# verdict: failing

import torch
from torch import nn

torch.set_num_threads(1)
torch.manual_seed(57)


def train_epoch(model, optimizer, loader):
    scaler = torch.amp.GradScaler("cpu")  # <- new scaler
    total = 0.0
    for x, y in loader:
        optimizer.zero_grad()
        with torch.autocast("cpu", dtype=torch.float16):
            out = model(x)
        loss = nn.functional.cross_entropy(out.float() * 40, y)
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        total += loss.item()
    return total / len(loader)


dataset = torch.utils.data.TensorDataset(torch.randn(96, 12), torch.randint(3, (96,)))
loader = torch.utils.data.DataLoader(dataset, batch_size=8, shuffle=True)
model = nn.Sequential(nn.Linear(12, 32), nn.ReLU(), nn.Linear(32, 3))
optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
for epoch in range(5):
    print(f"epoch {epoch} loss {train_epoch(model, optimizer, loader):.3f}")
