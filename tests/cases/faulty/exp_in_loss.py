"""A hand-written log-sum-exp outside every module exponentiates half logits above 11."""
# must find: forward-overflow lead at <- exp
# must not find: attention-logits-overflow, gradient-overflow, masked-row
# verdict: failing

import torch
from torch import nn

torch.set_num_threads(1)
torch.manual_seed(31)


def softmax_loss(logits, labels):
    weights = torch.exp(logits)  # <- exp
    log_partition = torch.log(weights.sum(dim=1))
    return (log_partition - logits.gather(1, labels[:, None]).squeeze(1)).float().mean()


def main():
    model = nn.Sequential(nn.Linear(20, 32), nn.ReLU(), nn.Linear(32, 10))
    model[2].bias.data[4] = 13.0
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    scaler = torch.amp.GradScaler("cpu")
    x = torch.randn(50, 20)
    labels = torch.randint(10, (50,))
    for step in range(30):
        with torch.autocast("cpu", dtype=torch.float16):
            loss = softmax_loss(model(x), labels)
        optimizer.zero_grad()
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        if step % 10 == 0:
            print(step, loss.item())


if __name__ == "__main__":
    main()
