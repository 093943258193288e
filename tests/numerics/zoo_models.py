"""Trainings of many kinds of models."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from tests.numerics.trainings import WIDTH, Recipe, Training, batch, half, mlp, regression, scaler, supervised


def convnet_with_inplace_relu() -> Training:
    model = nn.Sequential(
        nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(inplace=True), nn.Conv2d(8, 8, 3), nn.BatchNorm2d(8),
        nn.ReLU(inplace=True), nn.Flatten(), nn.Linear(8 * 16, 4),
    )  # fmt: skip

    def loss(model: nn.Module, i: int) -> torch.Tensor:
        return F.cross_entropy(model(batch(i, 4, 3, 8, 8)), torch.arange(4))

    return supervised(model, loss=loss, scaler=scaler(), clip=1.0)


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(20, WIDTH)
        self.body = mlp()
        self.head = nn.Linear(WIDTH, 20, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        logits: torch.Tensor = self.head(self.body(self.embed(tokens)))
        return logits


def tokens_loss(model: nn.Module, i: int) -> torch.Tensor:
    tokens = torch.randint(0, 20, (4, 6), generator=torch.Generator().manual_seed(i))
    return F.cross_entropy(model(tokens).flatten(0, 1), tokens.flatten())


def tied_weights() -> Training:
    return supervised(Tied(), loss=tokens_loss, scaler=scaler())


@dataclass
class Output:
    hidden: torch.Tensor
    pair: tuple[torch.Tensor, None]
    named: dict[str, Any]


class ManyOutputs(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.twice, self.last = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor, *, gate: torch.Tensor | None = None) -> Output:
        hidden = self.twice(torch.tanh(self.twice(self.first(x))))
        if gate is not None:
            hidden = hidden * gate
        return Output(hidden, (self.last(hidden), None), {"x": [hidden, None], "text": "x"})


def outputs_of_every_kind() -> Training:
    def loss(model: nn.Module, i: int) -> torch.Tensor:
        out = model(batch(i, 4, WIDTH), gate=batch(i + 1, 4, WIDTH))
        return (out.hidden.float() + out.pair[0]).square().mean() + out.named["x"][0].float().mean()

    return supervised(ManyOutputs(), loss=loss, scaler=scaler())


def recurrent(cls: type[nn.Module]) -> Training:
    model = nn.ModuleDict({"rnn": cls(WIDTH, WIDTH, 2, batch_first=True), "head": nn.Linear(WIDTH, 1)})

    def loss(model: nn.Module, i: int) -> torch.Tensor:
        out, _ = model["rnn"](batch(i, 4, 5, WIDTH))  # type: ignore[index]
        return model["head"](out).float().square().mean()  # type: ignore[index, no-any-return]

    return supervised(model, loss=loss, scaler=scaler(), autocast=None)


def sparse_embedding() -> Training:
    model = nn.Sequential(nn.Embedding(30, WIDTH, sparse=True), nn.Linear(WIDTH, 20))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    return supervised(model, loss=tokens_loss, optimizer=optimizer, scaler=scaler())


class Checkpointed(nn.Module):
    def __init__(self, *, use_reentrant: bool) -> None:
        super().__init__()
        self.use_reentrant = use_reentrant
        self.embed = nn.Linear(WIDTH, WIDTH)
        self.blocks = nn.ModuleList(nn.Sequential(mlp(), nn.Dropout(0.1)) for _ in range(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.embed(x)
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=self.use_reentrant)
        return x


def checkpointing(*, use_reentrant: bool) -> Training:
    return supervised(Checkpointed(use_reentrant=use_reentrant), loss=regression(), scaler=scaler())


def selective_checkpointing() -> Training:
    from torch.utils.checkpoint import CheckpointPolicy, create_selective_checkpoint_contexts

    def policy(ctx: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
        saved = op in (torch.ops.aten.mm.default, torch.ops.aten.addmm.default, torch.ops.aten.sum.default)
        return CheckpointPolicy.MUST_SAVE if saved else CheckpointPolicy.PREFER_RECOMPUTE

    block = mlp()

    def loss(model: nn.Module, i: int) -> torch.Tensor:
        out = checkpoint(
            model, batch(i, 4, WIDTH), use_reentrant=False,
            context_fn=lambda: create_selective_checkpoint_contexts(policy),
        )  # fmt: skip
        value: torch.Tensor = out.float().square().mean()
        return value

    return supervised(block, loss=loss, scaler=scaler(), autocast=None)


def frozen_layers() -> Training:
    model = nn.Sequential(mlp(), mlp(), mlp())
    for param in model[1].parameters():
        param.requires_grad_(False)
    return supervised(model, loss=regression(), scaler=scaler())


class Adapter(nn.Module):
    """A frozen linear layer with a trained low-rank detour."""

    def __init__(self, base: nn.Linear) -> None:
        super().__init__()
        self.base = base.requires_grad_(False)
        self.down, self.up = nn.Parameter(torch.randn(2, WIDTH) * 0.1), nn.Parameter(torch.zeros(WIDTH, 2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.base(x) + F.linear(F.linear(x, self.down), self.up)
        return out


def adapters() -> Training:
    model = nn.Sequential(Adapter(nn.Linear(WIDTH, WIDTH)), nn.GELU(), Adapter(nn.Linear(WIDTH, WIDTH)))
    return supervised(model, loss=regression(), scaler=scaler())


def two_optimizers_on_one_loss() -> Training:
    model, s = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.ReLU(), nn.Linear(WIDTH, WIDTH)), scaler()
    first, second = torch.optim.SGD(model[0].parameters(), lr=0.1), torch.optim.Adam(model[2].parameters())

    def step(i: int) -> list[torch.Tensor]:
        first.zero_grad()
        second.zero_grad()
        with half():
            loss = regression()(model, i)
        s.scale(loss).backward()
        s.unscale_(first)
        nn.utils.clip_grad_value_(model[0].parameters(), 0.5)
        s.step(first)
        s.step(second)
        s.update()
        return [loss.detach()]

    return Training([model], [first, second], step, s, num_updates=2)


def gan_with_one_scaler() -> Training:
    generator, critic, s = mlp(), nn.Sequential(mlp(), nn.Linear(WIDTH, 1)), scaler()
    opt_g, opt_c = (torch.optim.Adam(m.parameters(), lr=1e-2) for m in (generator, critic))

    def step(i: int) -> list[torch.Tensor]:
        with half():
            fake = generator(batch(i, 4, WIDTH))
            loss_c = F.softplus(critic(fake.detach())).mean() + F.softplus(-critic(batch(i + 1, 4, WIDTH))).mean()
        opt_c.zero_grad()
        s.scale(loss_c).backward()
        s.step(opt_c)
        with half():
            loss_g = F.softplus(-critic(fake)).mean()
        opt_g.zero_grad()
        s.scale(loss_g).backward()
        s.step(opt_g)
        s.update()
        return [loss_c.detach(), loss_g.detach()]

    return Training([generator, critic], [opt_g, opt_c], step, s, num_updates=2)


def lbfgs_closure() -> Training:
    model = mlp()
    optimizer = torch.optim.LBFGS(model.parameters(), lr=0.1, max_iter=3)

    def step(i: int) -> list[torch.Tensor]:
        losses = []

        def closure() -> torch.Tensor:
            optimizer.zero_grad()
            loss = regression()(model, 0)
            loss.backward()
            losses.append(loss.detach())
            return loss

        optimizer.step(closure)  # type: ignore[arg-type]
        return losses

    return Training([model], [optimizer], step)


class Parallel(nn.Module):
    """Wraps like torch's own DataParallel does."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module

    def forward(self, *args: Any) -> Any:
        return self.module(*args)


def wrapped_model() -> Training:
    wrapper = type("DataParallel", (Parallel,), {})
    return supervised(wrapper(nn.Sequential(mlp(), nn.Linear(WIDTH, 2))), loss=regression(), scaler=scaler())


MODELS: dict[str, Recipe] = {
    "convnet, in-place ReLU, BatchNorm, clipping": convnet_with_inplace_relu,
    "tied weights": tied_weights,
    "outputs of every kind, a module called twice": outputs_of_every_kind,
    "RNN": lambda: recurrent(nn.RNN),
    "LSTM": lambda: recurrent(nn.LSTM),
    "GRU": lambda: recurrent(nn.GRU),
    "sparse embedding": sparse_embedding,
    "checkpointing, reentrant": lambda: checkpointing(use_reentrant=True),
    "checkpointing": lambda: checkpointing(use_reentrant=False),
    "selective checkpointing": selective_checkpointing,
    "frozen layers": frozen_layers,
    "low-rank adapters": adapters,
    "two optimizers on one loss": two_optimizers_on_one_loss,
    "GAN with one scaler": gan_with_one_scaler,
    "LBFGS": lbfgs_closure,
    "DataParallel": wrapped_model,
}
