"""Instance statistics are computed by hand in half; the squared deviations overflow before they are averaged."""
# must find: reduction-overflow lead at <- variance
# must not find: forward-overflow, gradient-overflow, epsilon-flushed
# verdict: failing

import torch
from torch import nn
from torch.nn import functional as F

torch.set_num_threads(1)
torch.manual_seed(18)


def standardise(x, eps=1e-3):
    mean = x.mean(dim=(2, 3), keepdim=True)
    variance = ((x - mean) ** 2).mean(dim=(2, 3), keepdim=True)  # <- variance
    return (x - mean) / (variance + eps).sqrt()


class Stylizer(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv1 = nn.Conv2d(1, 8, 3, padding=1)
        self.conv2 = nn.Conv2d(8, 8, 3, padding=1)
        self.conv3 = nn.Conv2d(8, 1, 3, padding=1)

    def forward(self, img):
        h = F.relu(standardise(self.conv1(img)))
        h = F.relu(standardise(self.conv2(h) * 400.0))
        return self.conv3(h)


model = Stylizer()
optimizer = torch.optim.Adam(model.parameters(), 1e-3)
scaler = torch.amp.GradScaler("cpu")
images = torch.rand(4, 1, 12, 12)
for step in range(25):
    optimizer.zero_grad()
    with torch.autocast("cpu", dtype=torch.float16):
        out = model(images)
    loss = F.l1_loss(out.float(), images)
    scaler.scale(loss).backward()
    scaler.step(optimizer)
    scaler.update()
    if step % 5 == 4:
        print(f"step {step + 1:2d}  l1 {loss.item():.4f}")
