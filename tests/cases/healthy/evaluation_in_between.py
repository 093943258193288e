"""Evaluation without gradients runs in between, once in FP16 autocast and once in plain FP32."""
# must not find: missing-loss-scaling, nonfinite-buffer, layer-without-gradient, never-applied
# verdict: no alarm

import torch
from torch import nn

torch.set_num_threads(1)
torch.manual_seed(28)


class ConvNet(nn.Module):
    def __init__(self, classes=4):
        super().__init__()
        self.features = nn.Sequential(
            nn.Conv2d(1, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU(inplace=True), nn.MaxPool2d(2),
            nn.Conv2d(8, 16, 3, padding=1), nn.BatchNorm2d(16), nn.ReLU(inplace=True), nn.AdaptiveAvgPool2d(1),
        )  # fmt: skip
        self.classifier = nn.Linear(16, classes)

    def forward(self, x):
        return self.classifier(self.features(x).flatten(1))


def evaluate(net, x, y, half):
    net.eval()
    with torch.no_grad(), torch.autocast("cpu", dtype=torch.float16, enabled=half):
        right = (net(x).argmax(1) == y).float().mean().item()
    net.train()
    return right


net = ConvNet()
optimizer = torch.optim.SGD(net.parameters(), lr=0.05, momentum=0.9)
scaler = torch.amp.GradScaler("cpu", init_scale=2.0**12)
images = torch.randn(48, 1, 10, 10)
labels = torch.randint(4, (48,))
for epoch in range(5):
    for i in range(0, 48, 12):
        optimizer.zero_grad()
        with torch.autocast("cpu", dtype=torch.float16):
            logits = net(images[i : i + 12])
        loss = nn.functional.cross_entropy(logits.float(), labels[i : i + 12])
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
    print(epoch, evaluate(net, images, labels, half=True), evaluate(net, images, labels, half=False))
