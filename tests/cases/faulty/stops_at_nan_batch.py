"""A broken file gives NaN in one batch, and the script asserts on its loss at once."""
# must find: nonfinite-input lead
# must not find: unlocated-nonfinite, forward-overflow
# verdict: failing
# raises: AssertionError

import torch
from torch import nn

torch.set_num_threads(1)
torch.manual_seed(1)
model = nn.Sequential(nn.Conv1d(2, 16, 5), nn.ReLU(), nn.AdaptiveAvgPool1d(1), nn.Flatten(), nn.Linear(16, 3))
optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)

for step in range(50):
    waves = torch.randn(8, 2, 40)
    if step == 27:
        waves[3, :, 10:] = float("nan")
    labels = torch.randint(3, (8,))
    with torch.autocast("cpu", dtype=torch.float16):
        logits = model(waves)
    loss = nn.functional.cross_entropy(logits.float(), labels)
    assert torch.isfinite(loss), f"bad loss at step {step}"
    optimizer.zero_grad(set_to_none=True)
    scaler.scale(loss).backward()
    scaler.step(optimizer)
    scaler.update()
