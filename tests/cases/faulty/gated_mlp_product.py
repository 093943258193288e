"""A gated MLP multiplies gate and up in the block's own forward and leaves the FP16 range there."""
# must find: forward-overflow lead at <- product
# must not find: gradient-overflow, scale-thrashing, reduction-overflow
# verdict: failing

import torch
import torch.nn as nn
import torch.nn.functional as F

torch.set_num_threads(1)
torch.manual_seed(0)


class GatedMlp(nn.Module):
    def __init__(self, dim, hidden):
        super().__init__()
        self.gate = nn.Linear(dim, hidden)
        self.up = nn.Linear(dim, hidden)
        self.down = nn.Linear(hidden, dim)

    def forward(self, x):
        gate = F.silu(self.gate(x))
        up = self.up(x)
        gated = gate * up  # <- product
        return self.down(gated)


class Block(nn.Module):
    def __init__(self, dim):
        super().__init__()
        self.norm = nn.LayerNorm(dim)
        self.mlp = GatedMlp(dim, 2 * dim)

    def forward(self, x):
        return x + self.mlp(self.norm(x))


model = nn.Sequential(Block(32), Block(32), nn.Linear(32, 8))
nn.init.constant_(model[1].mlp.gate.bias, 290.0)
nn.init.constant_(model[1].mlp.up.bias, 290.0)
opt = torch.optim.Adam(model.parameters(), lr=1e-3)
scaler = torch.amp.GradScaler("cpu")
x, y = torch.randn(32, 32), torch.randn(32, 8)

for it in range(30):
    with torch.autocast(device_type="cpu", dtype=torch.float16):
        out = model(x)
        loss = F.mse_loss(out.float(), y)
    opt.zero_grad(set_to_none=True)
    scaler.scale(loss).backward()
    scaler.step(opt)
    scaler.update()
    if it % 10 == 9:
        print(it, loss.item())
