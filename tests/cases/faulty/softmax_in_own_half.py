"""A block leaves autocast, casts its scores to half itself and takes their softmax there."""
# must find: critical-op-in-half lead at <- softmax
# must not find: forward-overflow, attention-logits-overflow, masked-row, epsilon-flushed
# verdict: attention

import torch
from torch import nn

torch.set_num_threads(1)
torch.manual_seed(32)


class Mixer(nn.Module):
    def __init__(self, dim):
        super().__init__()
        self.score = nn.Linear(dim, 6)
        self.experts = nn.ModuleList(nn.Linear(dim, dim) for _ in range(6))

    def forward(self, x):
        scores = self.score(x) * 300.0
        with torch.autocast("cpu", enabled=False):
            gate = torch.softmax(scores.half(), dim=-1)  # <- softmax
        stacked = torch.stack([expert(x) for expert in self.experts], dim=-1)
        return (stacked * gate[:, None, :]).sum(-1)


model = nn.Sequential(nn.Linear(12, 32), Mixer(32), nn.Linear(32, 3))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10)
x, y = torch.randn(64, 12), torch.randint(3, (64,))
for step in range(40):
    optimizer.zero_grad()
    with torch.autocast("cpu", dtype=torch.float16):
        out = model(x)
    loss = nn.functional.cross_entropy(out.float(), y)
    scaler.scale(loss).backward()
    scaler.step(optimizer)
    scaler.update()
    if step % 20 == 0:
        print(f"loss {loss.item():.4f}")
