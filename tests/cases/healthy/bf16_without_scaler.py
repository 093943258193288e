"""bf16 autocast, and rightly no scaler."""
# must not find: missing-loss-scaling, scaler-without-fp16, half-trainable-params, swallowed-updates
# verdict: no alarm

import torch
from torch import nn

torch.set_num_threads(1)
torch.manual_seed(21)

model = nn.TransformerEncoderLayer(32, 2, 64, dropout=0.0, batch_first=True)
head = nn.Linear(32, 1)
optimizer = torch.optim.AdamW([*model.parameters(), *head.parameters()], lr=1e-3)
x = torch.randn(8, 6, 32)
y = x.mean((1, 2)).unsqueeze(1)
for step in range(40):
    optimizer.zero_grad()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        prediction = head(model(x).mean(1))
        loss = nn.functional.mse_loss(prediction, y)
    loss.backward()
    optimizer.step()
    if step % 10 == 0:
        print(step, loss.item())
