"""Five folds, each with a new model, optimizer and scaler."""
# must not find: scaler-recreated, several-scalers, resume-reset-scale, scale-thrashing
# verdict: no alarm

import torch
from torch import nn

torch.set_num_threads(1)
torch.manual_seed(33)
x = torch.randn(100, 12)
y = (x[:, 0] * x[:, 1] > 0).long()


def fit_fold(held_out):
    keep = torch.ones(100, dtype=torch.bool)
    keep[held_out] = False
    model = nn.Sequential(nn.Linear(12, 32), nn.ReLU(), nn.Linear(32, 2))
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**14)
    for _ in range(15):
        optimizer.zero_grad()
        with torch.autocast("cpu", dtype=torch.float16):
            logits = model(x[keep])
        scaler.scale(nn.functional.cross_entropy(logits.float(), y[keep])).backward()
        scaler.step(optimizer)
        scaler.update()
    with torch.no_grad():
        return (model(x[held_out]).argmax(1) == y[held_out]).float().mean().item()


scores = [fit_fold(slice(20 * k, 20 * k + 20)) for k in range(5)]
print("accuracy", sum(scores) / len(scores))
