"""A detector exponentiates box sizes in half; two modules later an assertion on the boxes stops the run."""
# must find: forward-overflow lead at <- exp
# must not find: masked-row, reduction-overflow
# verdict: failing
# raises: AssertionError

import torch
from torch import nn

torch.set_num_threads(1)
torch.manual_seed(5)


class Decoder(nn.Module):
    def __init__(self, width=32):
        super().__init__()
        self.stem = nn.Sequential(nn.Linear(10, width), nn.GELU())
        self.center = nn.Linear(width, 2)
        self.size = nn.Linear(width, 2)
        self.refine = nn.Linear(4, 4)

    def forward(self, x):
        h = self.stem(x)
        center = self.center(h)
        size = torch.exp(self.size(h))  # <- exp
        boxes = torch.cat([center - size, center + size], dim=-1)
        return boxes + 0.1 * self.refine(boxes)


def check_boxes(boxes):
    assert (boxes[:, 2:] >= boxes[:, :2]).all(), "degenerate boxes"


model = Decoder()
optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4)
scaler = torch.amp.GradScaler("cpu")
feats = torch.randn(48, 10)
gt = torch.rand(48, 4)

for step in range(40):
    if step == 6:  # harder crops
        feats = feats * 4
        model.size.bias.data += 11.5
    with torch.autocast("cpu", dtype=torch.float16):
        boxes = model(feats)
        loss = (boxes.float() - gt).abs().mean()
    if step >= 8:
        check_boxes(boxes)
    optimizer.zero_grad()
    scaler.scale(loss).backward()
    scaler.step(optimizer)
    scaler.update()
    print(f"{step:3d} {loss.item():.3f}")
