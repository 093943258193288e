"""The scaler was kept but the autocast block got lost: the run is plain FP32."""
# must find: scaler-without-fp16 lead
# must not find: missing-loss-scaling, autocast-inactive, unscaled-backward
# verdict: attention

import torch
from torch import nn

torch.set_num_threads(1)
torch.manual_seed(67)


def run_epoch(net, batches, optimizer, scaler):
    for x, y in batches:
        optimizer.zero_grad()
        loss = nn.functional.binary_cross_entropy_with_logits(net(x), y)
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        nn.utils.clip_grad_norm_(net.parameters(), 1.0)
        scaler.step(optimizer)
        scaler.update()
    return loss.item()


net = nn.Sequential(nn.Linear(20, 32), nn.ReLU(), nn.Linear(32, 1))
batches = [(torch.randn(16, 20), torch.randint(2, (16, 1)).float()) for _ in range(10)]
optimizer = torch.optim.RMSprop(net.parameters(), lr=1e-3)
scaler = torch.amp.GradScaler("cpu")
for epoch in range(4):
    print("epoch", epoch, run_epoch(net, batches, optimizer, scaler))
