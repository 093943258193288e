"""A chain of Linear layers from a bf16 checkpoint reaches 800,000, twelve times the FP16 limit."""
# must find: forward-overflow lead at layers.2
# must not find: gradient-overflow, divergence, nonfinite-weight
# verdict: failing

import torch
from torch import nn

torch.set_num_threads(1)


def build(seed):
    torch.manual_seed(seed)
    net = nn.ModuleDict({"layers": nn.ModuleList([nn.Linear(24, 24) for _ in range(4)]), "out": nn.Linear(24, 1)})
    for layer in net["layers"]:
        nn.init.eye_(layer.weight)
        layer.weight.data.mul_(90.0)
        nn.init.zeros_(layer.bias)
    return net


def forward(net, x):
    for layer in net["layers"]:
        x = torch.relu(layer(x))
    return net["out"](x)


net = build(3)
optimizer = torch.optim.SGD(net.parameters(), lr=1e-3, momentum=0.9)
scaler = torch.amp.GradScaler("cpu")
x = torch.rand(16, 24) + 0.2
target = torch.rand(16, 1)

for _ in range(25):
    optimizer.zero_grad()
    with torch.autocast("cpu", torch.float16):
        prediction = forward(net, x)
        loss = nn.functional.mse_loss(prediction.float(), target)
    scaler.scale(loss).backward()
    scaler.step(optimizer)
    scaler.update()
print("last loss", loss.item())
