"""A Dense layer with weights of one adds up 4,096 histogram counts, more than FP16 can hold."""
# must find: forward-overflow lead at total
# must not find: gradient-overflow, static-scale-unsafe
# verdict: failing

import torch
from torch import nn

torch.set_num_threads(1)
torch.manual_seed(11)


class Counter(nn.Module):
    def __init__(self):
        super().__init__()
        self.total = nn.Linear(4096, 1, bias=False)
        self.fit = nn.Linear(2, 1)
        nn.init.ones_(self.total.weight)

    def forward(self, counts, exposure):
        total = self.total(counts)
        return self.fit(torch.cat([torch.log1p(total.float()), exposure], dim=1))


model = Counter()
optimizer = torch.optim.SGD(model.parameters(), lr=1e-6)
scaler = torch.amp.GradScaler("cpu")

for step in range(35):
    counts = torch.poisson(torch.full((8, 4096), 20.0))
    exposure = torch.rand(8, 1)
    optimizer.zero_grad(set_to_none=True)
    with torch.autocast("cpu", dtype=torch.float16):
        rate = model(counts, exposure)
        loss = nn.functional.huber_loss(rate.float(), exposure * 3)
    scaler.scale(loss).backward()
    scaler.step(optimizer)
    scaler.update()
    if step % 7 == 0:
        print(f"[{step}] loss={loss.item():.3f}")
