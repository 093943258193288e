"""Half weights under an optimizer that keeps FP32 masters in its state and steps those."""
# must not find: half-trainable-params, swallowed-updates, optimizer-eps-flushed, nonfinite-weight
# verdict: no alarm

import torch
from torch import nn

torch.set_num_threads(1)
torch.manual_seed(50)
LOSS_SCALE = 512.0


class MasterSgd(torch.optim.Optimizer):
    def __init__(self, params, lr, momentum=0.9):
        super().__init__(params, {"lr": lr, "momentum": momentum})

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for p in group["params"]:
                state = self.state[p]
                if not state:
                    state["master"] = p.detach().float().clone()
                    state["velocity"] = torch.zeros_like(state["master"])
                grad = p.grad.float() / LOSS_SCALE
                state["velocity"].mul_(group["momentum"]).add_(grad)
                state["master"].sub_(group["lr"] * state["velocity"])
                p.copy_(state["master"])


model = nn.Sequential(nn.Linear(16, 32), nn.Tanh(), nn.Linear(32, 2)).half()
optimizer = MasterSgd(model.parameters(), lr=0.01)
x = torch.randn(64, 16)
y = x[:, :2] * 0.5
for step in range(60):
    optimizer.zero_grad()
    loss = (model(x.half()).float() - y).square().mean()
    (loss * LOSS_SCALE).backward()
    optimizer.step()
    if step % 20 == 0:
        print(step, loss.item())
