"""An LSTM cell written out by hand, unrolled over time with truncated backpropagation."""
# must not find: critical-op-in-half, layer-without-gradient, forward-overflow, clip-before-unscale
# verdict: no alarm

import torch
from torch import nn

torch.set_num_threads(1)
torch.manual_seed(29)


class Lstm(nn.Module):
    def __init__(self, inputs, hidden):
        super().__init__()
        self.x2h = nn.Linear(inputs, 4 * hidden)
        self.h2h = nn.Linear(hidden, 4 * hidden, bias=False)
        self.read = nn.Linear(hidden, inputs)

    def forward(self, sequence, state):
        h, c = state
        outputs = []
        for x in sequence:
            i, f, g, o = (self.x2h(x) + self.h2h(h)).chunk(4, dim=-1)
            c = torch.sigmoid(f) * c + torch.sigmoid(i) * torch.tanh(g)
            h = torch.sigmoid(o) * torch.tanh(c)
            outputs.append(self.read(h))
        return torch.stack(outputs), (h.detach(), c.detach())


net = Lstm(6, 32)
optimizer = torch.optim.Adam(net.parameters(), lr=3e-3)
scaler = torch.amp.GradScaler("cpu", init_scale=2.0**12)
wave = torch.sin(torch.arange(241.0)[:, None, None] * torch.rand(1, 8, 6))
state = (torch.zeros(8, 32), torch.zeros(8, 32))
for step in range(40):
    start = 6 * step % 234
    optimizer.zero_grad()
    with torch.autocast("cpu", dtype=torch.float16):
        out, state = net(wave[start : start + 6], state)
    loss = nn.functional.mse_loss(out.float(), wave[start + 1 : start + 7])
    scaler.scale(loss).backward()
    scaler.unscale_(optimizer)
    nn.utils.clip_grad_norm_(net.parameters(), 0.25)
    scaler.step(optimizer)
    scaler.update()
    if step % 10 == 0:
        print(step, loss.item())
