"""A matcher sums a pairwise cost over 70,000 points with one half matmul."""
# must find: reduction-overflow lead at <- cost
# must not find: attention-logits-overflow, gradient-overflow
# verdict: failing

import torch
from torch import nn
from torch.nn import functional as F

torch.set_num_threads(1)
torch.manual_seed(27)


class PointHead(nn.Module):
    def __init__(self, queries=4):
        super().__init__()
        self.embed = nn.Linear(3, 8)
        self.queries = nn.Linear(8, queries)

    def forward(self, points):
        return self.queries(torch.relu(self.embed(points))).t()


def pairwise_cost(masks, targets):
    positive = F.softplus(-masks)
    return torch.einsum("np,mp->nm", positive, targets)  # <- cost


head = PointHead()
nn.init.constant_(head.queries.bias, -2.5)
optimizer = torch.optim.AdamW(head.parameters(), lr=1e-4)
scaler = torch.amp.GradScaler("cpu")
points = torch.rand(70_000, 3)
targets = torch.ones(2, 70_000)

for _ in range(8):
    optimizer.zero_grad()
    with torch.autocast("cpu", dtype=torch.float16):
        cost = pairwise_cost(head(points), targets)
        loss = cost.float().mean() / points.shape[0]
    scaler.scale(loss).backward()
    scaler.step(optimizer)
    scaler.update()
    print("matching loss", loss.item())
