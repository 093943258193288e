"""Two networks are trained in turns; on each step only the one whose turn it is has gradients and steps."""
# must not find: optimizer-without-gradients, never-applied, layer-without-gradient, missing-update
# verdict: no alarm

import torch
from torch import nn

torch.set_num_threads(1)
torch.manual_seed(44)


def tower():
    return nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Linear(32, 8))


towers = [tower(), tower()]
optimizers = [torch.optim.Adam(t.parameters(), lr=1e-3) for t in towers]
scaler = torch.amp.GradScaler("cpu", init_scale=2.0**12)
x = torch.randn(32, 8)
for step in range(60):
    turn = step % 2
    optimizers[turn].zero_grad()
    with torch.autocast("cpu", dtype=torch.float16):
        mine = towers[turn](x)
        with torch.no_grad():
            other = towers[1 - turn](x)
    loss = nn.functional.mse_loss(mine.float(), 0.5 * (other.float() + x))
    scaler.scale(loss).backward()
    scaler.step(optimizers[turn])
    scaler.update()
    if step % 20 < 2:
        print(step, loss.item())
