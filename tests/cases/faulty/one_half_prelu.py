"""A single PReLU of an FP32 network was edited to half; torch refuses its gradient and does not say whose it is."""
# must find: half-trainable-params lead at act2.weight
# must not find: forward-overflow, double-unscale, missing-update, optimizer-without-gradients
# verdict: failing
# raises: ValueError

import torch
from torch import nn

torch.set_num_threads(1)
torch.manual_seed(37)


class FaceNet(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv1 = nn.Conv2d(1, 8, 3)
        self.act1 = nn.PReLU(8)
        self.conv2 = nn.Conv2d(8, 8, 3)
        self.act2 = nn.PReLU(8).half()
        self.fc = nn.Linear(8, 10)

    def forward(self, x):
        x = self.act1(self.conv1(x))
        x = self.act2(self.conv2(x).half())
        return self.fc(x.mean((2, 3)))


net = FaceNet()
optimizer = torch.optim.SGD(net.parameters(), lr=0.01, momentum=0.9)
scaler = torch.amp.GradScaler("cpu")
faces, ids = torch.rand(16, 1, 10, 10), torch.randint(10, (16,))
for epoch in range(5):
    optimizer.zero_grad()
    with torch.autocast("cpu", dtype=torch.float16):
        loss = nn.functional.cross_entropy(net(faces).float(), ids)
    scaler.scale(loss).backward()
    scaler.unscale_(optimizer)
    nn.utils.clip_grad_norm_(net.parameters(), 5.0)
    scaler.step(optimizer)
    scaler.update()
    print("epoch", epoch, loss.item())
