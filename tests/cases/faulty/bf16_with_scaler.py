"""bf16 autocast with an enabled GradScaler: nothing runs in FP16 and the scaler only costs time."""
# must find: scaler-without-fp16 lead
# must not find: missing-loss-scaling, half-trainable-params, scale-never-grew, swallowed-updates
# verdict: attention

import torch
from torch import nn

torch.set_num_threads(1)
torch.manual_seed(66)

model = nn.Sequential(nn.Embedding(100, 32), nn.Flatten(), nn.Linear(32 * 6, 32), nn.ReLU(), nn.Linear(32, 100))
optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
scaler = torch.amp.GradScaler("cpu")
corpus = torch.randint(100, (300,))

for step in range(40):
    start = torch.randint(len(corpus) - 7, (16,))
    context = torch.stack([corpus[s : s + 6] for s in start])
    following = corpus[start + 6]
    with torch.autocast("cpu", dtype=torch.bfloat16):
        loss = nn.functional.cross_entropy(model(context), following)
    optimizer.zero_grad()
    scaler.scale(loss).backward()
    scaler.step(optimizer)
    scaler.update()
    if step % 10 == 0:
        print("perplexity", loss.exp().item())
