"""An embedding table most of whose rows are never used, and dictionary batches from a DataLoader."""
# must not find: gradient-underflow, layer-without-gradient, nonfinite-input
# verdict: no alarm

import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset

torch.set_num_threads(1)
torch.manual_seed(34)


class Clicks(Dataset):
    def __len__(self):
        return 128

    def __getitem__(self, index):
        generator = torch.Generator().manual_seed(index)
        item = torch.randint(1, 40, (5,), generator=generator)
        return {"items": item, "age": torch.rand(1, generator=generator), "clicked": (item.sum() % 2).float()}


class Recommender(nn.Module):
    def __init__(self, items=1000, dim=16):
        super().__init__()
        self.items = nn.Embedding(items, dim, padding_idx=0)
        self.mlp = nn.Sequential(nn.Linear(dim + 1, 32), nn.ReLU(), nn.Linear(32, 1))

    def forward(self, batch):
        return self.mlp(torch.cat([self.items(batch["items"]).mean(1), batch["age"]], dim=1)).squeeze(1)


model = Recommender()
optimizer = torch.optim.Adagrad(model.parameters(), lr=0.05)
scaler = torch.amp.GradScaler("cpu")
for epoch in range(6):
    for batch in DataLoader(Clicks(), batch_size=16, shuffle=True):
        optimizer.zero_grad()
        with torch.autocast("cpu", dtype=torch.float16):
            score = model(batch)
        loss = nn.functional.binary_cross_entropy_with_logits(score.float(), batch["clicked"])
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
    print(f"epoch {epoch} loss {loss.item():.4f}")
