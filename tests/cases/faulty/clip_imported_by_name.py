"""The clip function was imported by name, and the clipping happens in a helper before the scaler is asked to step."""
# must find: clip-before-unscale lead at <- clip
# must not find: gradient-norm-overflow, scheduler-ahead, step-bypasses-scaler
# verdict: failing

import torch
from torch import nn
from torch.amp import GradScaler, autocast
from torch.nn.utils import clip_grad_norm_

torch.set_num_threads(1)
torch.manual_seed(43)
MAX_NORM = 0.5


def optimise(loss, optimizer, scaler, parameters):
    scaler.scale(loss).backward()
    clip_grad_norm_(parameters, MAX_NORM)  # <- clip
    scaler.step(optimizer)
    scaler.update()
    optimizer.zero_grad(set_to_none=True)


class Rnn(nn.Module):
    def __init__(self):
        super().__init__()
        self.cell = nn.RNNCell(8, 32)
        self.out = nn.Linear(32, 8)

    def forward(self, sequence):
        h = sequence.new_zeros(sequence.shape[1], 32)
        for item in sequence:
            h = self.cell(item, h)
        return self.out(h)


model = Rnn()
opt = torch.optim.AdamW(model.parameters(), lr=2e-3)
sched = torch.optim.lr_scheduler.CosineAnnealingLR(opt, T_max=40)
scaler = GradScaler("cpu")
series = torch.randn(6, 32, 8)
for step in range(40):
    with autocast("cpu", dtype=torch.float16):
        prediction = model(series[:-1])
    optimise(nn.functional.mse_loss(prediction.float(), series[-1]), opt, scaler, model.parameters())
    sched.step()
    if step % 10 == 0:
        print("step", step, "norm", sum(p.norm() for p in model.parameters()).item())
