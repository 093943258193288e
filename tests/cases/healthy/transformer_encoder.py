"""torch's own transformer encoder with a padding mask, warm-up, clipping and weight decay groups."""
# must not find: masked-row, attention-logits-overflow, clip-before-unscale, scheduler-ahead, layer-without-gradient
# verdict: no alarm

import torch
from torch import nn

torch.set_num_threads(1)
torch.manual_seed(52)


class Tagger(nn.Module):
    def __init__(self, vocab=60, dim=32):
        super().__init__()
        self.embed = nn.Embedding(vocab, dim, padding_idx=0)
        layer = nn.TransformerEncoderLayer(dim, 4, 64, dropout=0.1, batch_first=True, norm_first=True)
        self.encoder = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.tags = nn.Linear(dim, 5)

    def forward(self, ids):
        return self.tags(self.encoder(self.embed(ids), src_key_padding_mask=ids == 0))


model = Tagger()
decayed = [p for p in model.parameters() if p.ndim > 1]
plain = [p for p in model.parameters() if p.ndim == 1]
optimizer = torch.optim.AdamW([{"params": decayed}, {"params": plain, "weight_decay": 0.0}], lr=2e-3)
warmup = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: min(1.0, (step + 1) / 10))
scaler = torch.amp.GradScaler("cpu", init_scale=2.0**14)

for step in range(40):
    ids = torch.randint(1, 60, (8, 10)) * (torch.arange(10)[None] < torch.randint(1, 11, (8, 1)))
    optimizer.zero_grad()
    with torch.autocast("cpu", dtype=torch.float16):
        logits = model(ids)
    loss = nn.functional.cross_entropy(logits.float().flatten(0, 1), (ids % 5).flatten())
    scaler.scale(loss).backward()
    scaler.unscale_(optimizer)
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    scaler.step(optimizer)
    scaler.update()
    warmup.step()
    if step % 10 == 0:
        print(step, round(loss.item(), 4))
