"""Planes of finfo.min for causality, padded keys and padded queries are added up; padded rows become all -inf."""
# must find: masked-row lead at <- planes
# must not find: forward-overflow, attention-logits-overflow, gradient-overflow
# verdict: failing

import torch
import torch.nn as nn

torch.set_num_threads(1)
torch.manual_seed(15)
LOWEST = torch.finfo(torch.float16).min


def causal_plane(length):
    plane = torch.full((length, length), LOWEST, dtype=torch.float16)
    return torch.triu(plane, diagonal=1)


def padding_planes(keep):
    padded = (~keep).to(torch.float16) * LOWEST
    return padded[:, None, :], padded[:, :, None]


class Decoder(nn.Module):
    def __init__(self, dim=32, vocab=40):
        super().__init__()
        self.tokens = nn.Embedding(vocab, dim)
        self.qk = nn.Linear(dim, 2 * dim)
        self.v = nn.Linear(dim, dim)
        self.lm_head = nn.Linear(dim, vocab)

    def forward(self, ids, keep):
        x = self.tokens(ids)
        q, k = self.qk(x).chunk(2, -1)
        keys, queries = padding_planes(keep)
        planes = causal_plane(ids.shape[1]) + keys + queries  # <- planes
        scores = torch.baddbmm(planes, q, k.transpose(1, 2), alpha=0.17)
        return self.lm_head(torch.softmax(scores, dim=-1) @ self.v(x))


model = Decoder()
opt = torch.optim.Adam(model.parameters(), lr=1e-3)
scaler = torch.amp.GradScaler("cpu", init_scale=2.0**12)
ids = torch.randint(40, (4, 10))
keep = torch.ones(4, 10, dtype=torch.bool)
keep[1, :4] = False  # padded on the left
for _ in range(30):
    with torch.autocast("cpu", dtype=torch.float16):
        logits = model(ids, keep)
        nll = nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1).float(), ids[:, 1:].flatten())
    opt.zero_grad()
    scaler.scale(nll).backward()
    scaler.step(opt)
    scaler.update()
print("nll", nll.item())
