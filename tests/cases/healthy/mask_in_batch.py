"""The data loader hands over an additive mask that holds -inf on purpose."""
# must not find: nonfinite-input, masked-row, forward-overflow, nonfinite-buffer
# verdict: no alarm

import torch
from torch import nn

torch.set_num_threads(1)
torch.manual_seed(14)


class Reader(nn.Module):
    def __init__(self):
        super().__init__()
        self.inp = nn.Linear(8, 32)
        self.score = nn.Linear(32, 1)
        self.out = nn.Linear(32, 3)

    def forward(self, x, additive_mask):
        h = torch.tanh(self.inp(x))
        weights = torch.softmax(self.score(h).squeeze(-1) + additive_mask, dim=-1)
        return self.out((weights.unsqueeze(-1) * h).sum(1))


def batches(count):
    for _ in range(count):
        lengths = torch.randint(1, 9, (16,))
        mask = torch.zeros(16, 8).masked_fill(torch.arange(8)[None] >= lengths[:, None], float("-inf"))
        yield torch.randn(16, 8, 8), mask, torch.randint(3, (16,))


model = Reader()
optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
scaler = torch.amp.GradScaler("cpu")
for x, mask, y in batches(40):
    with torch.autocast("cpu", dtype=torch.float16):
        logits = model(x, mask)
    loss = nn.functional.cross_entropy(logits.float(), y)
    optimizer.zero_grad()
    scaler.scale(loss).backward()
    scaler.step(optimizer)
    scaler.update()
print("last loss", round(loss.item(), 4))
