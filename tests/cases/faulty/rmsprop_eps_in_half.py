"""A policy network in half with RMSprop: its square average flushes to zero and so does eps."""
# must find: optimizer-eps-flushed
# must find: half-trainable-params
# must not find: forward-overflow, gradient-overflow, divergence
# verdict: failing

import torch

torch.set_num_threads(1)
torch.manual_seed(35)


class Policy(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.hidden = torch.nn.Linear(6, 24, dtype=torch.float16)
        self.logits = torch.nn.Linear(24, 3, dtype=torch.float16)

    def forward(self, state):
        return self.logits(torch.tanh(self.hidden(state)))


policy = Policy()
optimizer = torch.optim.RMSprop(policy.parameters(), lr=1e-3, eps=1e-8)
for episode in range(15):
    states = torch.randn(24, 6).half()
    rewards = torch.randn(24)
    probabilities = policy(states).float().log_softmax(-1)
    loss = -(probabilities[:, 0] * rewards).mean() * 1e-3
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    if episode % 5 == 0:
        print(f"episode {episode} objective {loss.item():.6f}")
