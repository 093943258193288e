"""A distillation loss squares the difference of half feature maps: 300 squared does not fit."""
# must find: reduction-overflow lead at <- distance
# must not find: forward-overflow, gradient-overflow, epsilon-flushed
# verdict: failing

import torch
from torch import nn

torch.set_num_threads(1)
torch.manual_seed(28)

teacher = nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 32)).requires_grad_(False)
teacher[2].bias.fill_(310.0)
student = nn.Sequential(nn.Linear(16, 16), nn.ReLU(), nn.Linear(16, 32))


def distil(a, b):
    return torch.mean((a - b) ** 2)  # <- distance


opt = torch.optim.AdamW(student.parameters(), lr=1e-3)
scaler = torch.amp.GradScaler("cpu")
loader = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(torch.randn(64, 16)), batch_size=16)

for epoch in range(6):
    for (x,) in loader:
        with torch.autocast("cpu", dtype=torch.float16):
            loss = distil(student(x), teacher(x))
        opt.zero_grad()
        scaler.scale(loss).backward()
        scaler.step(opt)
        scaler.update()
    print(f"epoch {epoch}: {loss.item():.4f}")
