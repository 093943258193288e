"""Features are detached before the head, so the encoder's own optimizer never sees a gradient."""
# must find: optimizer-without-gradients lead at <- step
# must not find: unscaled-backward, missing-update, never-applied
# verdict: failing
# raises: AssertionError

import torch
from torch import nn

torch.set_num_threads(1)
torch.manual_seed(61)


class Pipeline(nn.Module):
    def __init__(self):
        super().__init__()
        self.encoder = nn.Sequential(nn.Linear(16, 32), nn.ReLU())
        self.head = nn.Linear(32, 3)

    def forward(self, x):
        with torch.no_grad():
            features = self.encoder(x)
        return self.head(features)


pipe = Pipeline()
optimizers = [
    torch.optim.AdamW(pipe.head.parameters(), lr=1e-3),
    torch.optim.AdamW(pipe.encoder.parameters(), lr=1e-4),
]
scaler = torch.amp.GradScaler("cpu")
x, y = torch.randn(32, 16), torch.randint(3, (32,))
for _ in range(10):
    for optimizer in optimizers:
        optimizer.zero_grad()
    with torch.autocast("cpu", dtype=torch.float16):
        logits = pipe(x)
    scaler.scale(nn.functional.cross_entropy(logits.float(), y)).backward()
    for optimizer in optimizers:
        scaler.step(optimizer)  # <- step
    scaler.update()
