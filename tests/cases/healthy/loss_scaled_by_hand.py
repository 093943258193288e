"""A second loss is multiplied by scaler.get_scale() by hand, which is what scaler.scale does."""
# must not find: unscaled-backward, several-scalers, missing-loss-scaling, step-bypasses-scaler
# verdict: no alarm

import torch
from torch import nn

torch.set_num_threads(1)
torch.manual_seed(36)

body = nn.Sequential(nn.Linear(16, 32), nn.ReLU())
classes, angle = nn.Linear(32, 4), nn.Linear(32, 1)
model = nn.ModuleDict({"body": body, "classes": classes, "angle": angle})
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
scaler = torch.amp.GradScaler("cpu", init_scale=2.0**12)
x = torch.randn(64, 16)
kind, wanted = torch.randint(4, (64,)), torch.rand(64, 1)
for step in range(40):
    optimizer.zero_grad()
    with torch.autocast("cpu", dtype=torch.float16):
        h = body(x)
        logits, predicted = classes(h), angle(h)
    main = nn.functional.cross_entropy(logits.float(), kind)
    side = nn.functional.mse_loss(predicted.float(), wanted)
    scaler.scale(main).backward(retain_graph=True)
    (side * scaler.get_scale()).backward()
    scaler.step(optimizer)
    scaler.update()
    if step % 10 == 0:
        print(step, main.item(), side.item())
