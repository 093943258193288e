"""On resuming, the trainable adapters are rebuilt in half while the base stays frozen: unscaling is refused."""
# must find: half-trainable-params lead at adapter
# must not find: forward-overflow, double-unscale, layer-without-gradient, resume-reset-scale
# verdict: failing
# raises: ValueError

import io

import torch
from torch import nn

torch.set_num_threads(1)
torch.manual_seed(38)


class Layer(nn.Module):
    def __init__(self, dim=32, rank=4):
        super().__init__()
        self.base = nn.Linear(dim, dim).requires_grad_(False)
        self.adapter = nn.Sequential(nn.Linear(dim, rank, bias=False), nn.Linear(rank, dim, bias=False))

    def forward(self, x):
        return torch.relu(self.base(x) + self.adapter(x))


def build():
    return nn.Sequential(Layer(), Layer(), nn.Linear(32, 2).requires_grad_(False))


def trainable(model):
    return [p for p in model.parameters() if p.requires_grad]


checkpoint = io.BytesIO()
torch.save({k: v.half() for k, v in build().state_dict().items() if "adapter" in k}, checkpoint)
checkpoint.seek(0)

model = build()
for layer in model[:2]:
    layer.adapter.half()
model.load_state_dict(torch.load(checkpoint), strict=False)
optimizer = torch.optim.AdamW(trainable(model), lr=1e-3)
scaler = torch.amp.GradScaler("cpu")

for _ in range(8):
    with torch.autocast("cpu", dtype=torch.float16):
        logits = model(torch.randn(16, 32))
    loss = nn.functional.cross_entropy(logits.float(), torch.randint(2, (16,)))
    scaler.scale(loss).backward()
    scaler.step(optimizer)
    scaler.update()
    optimizer.zero_grad(set_to_none=True)
