"""The whole model is cast to bfloat16 and trained with plain SGD: most updates are smaller than half a spacing."""
# must find: swallowed-updates lead
# must not find: half-trainable-params, optimizer-eps-flushed, scaler-without-fp16, missing-loss-scaling
# verdict: failing

import torch
from torch import nn

torch.set_num_threads(1)
torch.manual_seed(40)

net = nn.Sequential(nn.Linear(24, 48), nn.GELU(), nn.Linear(48, 24)).to(torch.bfloat16)
optimizer = torch.optim.SGD(net.parameters(), lr=1e-3)
data = torch.randn(128, 24)

for epoch in range(8):
    for batch in data.split(16):
        optimizer.zero_grad()
        output = net(batch.bfloat16())
        loss = nn.functional.mse_loss(output.float(), batch)
        loss.backward()
        optimizer.step()
    print(f"epoch {epoch} loss {loss.item():.4f}")
