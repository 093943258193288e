"""A half model whose optimizer keeps FP32 masters, with a hand-made loss scale that is divided out again."""
# must not find: half-trainable-params, swallowed-updates, optimizer-eps-flushed, step-bypasses-scaler
# verdict: no alarm

import torch
from torch import nn

torch.set_num_threads(1)
torch.manual_seed(32)
SCALE = 1024.0

model = nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 4)).half()
masters = [nn.Parameter(p.detach().float()) for p in model.parameters()]
optimizer = torch.optim.AdamW(masters, lr=1e-3)
x = torch.randn(64, 16).half()
labels = torch.randint(4, (64,))


def to_masters():
    for master, p in zip(masters, model.parameters(), strict=True):
        master.grad = p.grad.float() / SCALE
        p.grad = None


@torch.no_grad()
def from_masters():
    for master, p in zip(masters, model.parameters(), strict=True):
        p.copy_(master)


for step in range(50):
    loss = nn.functional.cross_entropy(model(x).float(), labels)
    (loss * SCALE).backward()
    to_masters()
    torch.nn.utils.clip_grad_norm_(masters, 1.0)
    optimizer.step()
    from_masters()
    if step % 10 == 0:
        print(step, loss.item())
