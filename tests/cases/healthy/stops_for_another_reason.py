"""A sound run whose script ends in an error of its own, after a forward with -inf on purpose and with gradients."""
# must not find: unlocated-nonfinite, nonfinite-input, forward-overflow, masked-row
# verdict: no alarm
# raises: KeyError

import torch
from torch import nn

torch.set_num_threads(1)
torch.manual_seed(2)


class Policy(nn.Module):
    def __init__(self):
        super().__init__()
        self.body = nn.Sequential(nn.Linear(12, 64), nn.Tanh(), nn.Linear(64, 6))

    def forward(self, x, legal=None):
        scores = self.body(x)
        return scores if legal is None else scores.masked_fill(~legal, float("-inf"))


policy = Policy()
optimizer = torch.optim.AdamW(policy.parameters(), lr=1e-3)
scaler = torch.amp.GradScaler("cpu", init_scale=256.0)
for _ in range(30):
    state, action = torch.randn(8, 12), torch.randint(6, (8,))
    with torch.autocast("cpu", dtype=torch.float16):
        loss = nn.functional.cross_entropy(policy(state).float(), action)
    optimizer.zero_grad()
    scaler.scale(loss).backward()
    scaler.step(optimizer)
    scaler.update()

policy.eval()
legal = torch.zeros(2, 6, dtype=torch.bool)
legal[:, 0] = True
best = policy(torch.randn(2, 12), legal).argmax(-1)
print({"move": best.tolist()}["moves"])
