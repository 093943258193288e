"""Loss and log-softmax inside the autocast block, as most scripts have it; on CPU they stay in half and are fine."""
# must not find: loss-in-half, epsilon-flushed, forward-headroom-low, reduction-overflow
# verdict: no alarm

import torch
from torch import nn

torch.set_num_threads(1)
torch.manual_seed(51)

net = nn.Sequential(nn.Linear(20, 64), nn.ReLU(), nn.Linear(64, 10))
criterion = nn.CrossEntropyLoss(label_smoothing=0.1)
optimizer = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9, weight_decay=1e-4)
scaler = torch.amp.GradScaler("cpu")
x = torch.randn(320, 20)
y = (x @ torch.randn(20, 10)).argmax(1)

for epoch in range(6):
    for rows in torch.randperm(320).split(32):
        with torch.autocast("cpu", dtype=torch.float16):
            loss = criterion(net(x[rows]), y[rows])
        optimizer.zero_grad(set_to_none=True)
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
    print(f"epoch {epoch} loss {loss.item():.3f}")
