"""One feature column of the data set holds NaN where a sensor was off: FP16 is innocent."""
# must find: nonfinite-input lead
# must not find: forward-overflow, gradient-overflow, divergence, epsilon-flushed, masked-row
# verdict: failing

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

torch.set_num_threads(1)
torch.manual_seed(72)

table = torch.randn(128, 14)
table[::9, 3] = float("nan")
loader = DataLoader(TensorDataset(table, table[:, :1].nan_to_num() * 2), batch_size=32, shuffle=True)
model = nn.Sequential(nn.Linear(14, 32), nn.ReLU(), nn.Linear(32, 1))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
scaler = torch.amp.GradScaler("cpu")

for epoch in range(8):
    for features, target in loader:
        optimizer.zero_grad()
        with torch.autocast("cpu", dtype=torch.float16):
            prediction = model(features)
        loss = nn.functional.mse_loss(prediction.float(), target)
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
    print(f"epoch {epoch}: {loss.item():.4f}")
