"""A gated MLP whose product of 290 by 290 is formed in an FP32 island inside the FP16 region."""
# must not find: forward-overflow, forward-headroom-low, critical-op-in-half, autocast-inactive, loss-in-half
# verdict: no alarm

import torch
import torch.nn.functional as F
from torch import nn

torch.set_num_threads(1)
torch.manual_seed(48)


class GatedMlp(nn.Module):
    def __init__(self, dim, hidden):
        super().__init__()
        self.gate = nn.Linear(dim, hidden)
        self.up = nn.Linear(dim, hidden)
        self.down = nn.Linear(hidden, dim)

    def forward(self, x):
        gate, up = F.silu(self.gate(x)), self.up(x)
        with torch.autocast("cpu", enabled=False):
            return self.down(gate.float() * up.float() / 290.0)


model = nn.Sequential(nn.Linear(8, 32), GatedMlp(32, 64), nn.Linear(32, 8))
nn.init.constant_(model[1].gate.bias, 290.0)
nn.init.constant_(model[1].up.bias, 290.0)
optimizer = torch.optim.Adam(model.parameters(), lr=1e-4)
scaler = torch.amp.GradScaler("cpu", init_scale=256.0)
x, y = torch.randn(32, 8), torch.randn(32, 8)
for step in range(40):
    with torch.autocast("cpu", dtype=torch.float16):
        out = model(x)
    loss = F.mse_loss(out.float(), y)
    optimizer.zero_grad(set_to_none=True)
    scaler.scale(loss).backward()
    scaler.step(optimizer)
    scaler.update()
    if step % 10 == 0:
        print(step, loss.item())
