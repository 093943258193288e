"""Small trainings of every kind that gradaudit has to leave alone.

Each recipe builds everything from its own seed and returns what a step does; `Training.step` returns the losses.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

WIDTH = 16


@dataclass
class Training:
    """One training: `step(i)` does iteration i and returns its losses; `num_updates` optimizer updates per iteration."""

    modules: list[nn.Module]
    optimizers: list[torch.optim.Optimizer]
    step: Callable[[int], list[torch.Tensor]]
    scaler: torch.amp.GradScaler | None = None
    num_updates: float = 1
    extra: dict[str, torch.Tensor] = field(default_factory=dict)


Recipe = Callable[[], Training]


def scaler(**more: Any) -> torch.amp.GradScaler:
    """A scaler that overflows, backs off and grows within a few steps."""
    return torch.amp.GradScaler("cpu", **{"init_scale": 2.0**16, "growth_interval": 5, **more})


def half() -> Any:
    """FP16 autocast on the CPU."""
    return torch.autocast("cpu", dtype=torch.float16)


def batch(i: int, *shape: int) -> torch.Tensor:
    """Reproducible inputs that leave the global generator alone."""
    return torch.randn(*shape, generator=torch.Generator().manual_seed(i))


def supervised(
    model: nn.Module,
    *,
    loss: Callable[[nn.Module, int], torch.Tensor],
    optimizer: torch.optim.Optimizer | None = None,
    scaler: torch.amp.GradScaler | None = None,
    autocast: torch.dtype | None = torch.float16,
    clip: float | None = None,
    accumulate: int = 1,
) -> Training:
    """The plain loop, with and without a scaler, clipping, accumulation."""
    params = [param for param in model.parameters() if param.requires_grad]
    opt = optimizer or torch.optim.AdamW(params, lr=1e-2)

    def step(i: int) -> list[torch.Tensor]:
        opt.zero_grad()
        losses = []
        for micro in range(accumulate):
            with torch.autocast("cpu", dtype=autocast or torch.bfloat16, enabled=autocast is not None):
                value = loss(model, i * accumulate + micro) / accumulate
            (scaler.scale(value) if scaler else value).backward()
            losses.append(value.detach())
        if clip is not None:
            if scaler:
                scaler.unscale_(opt)
            nn.utils.clip_grad_norm_(params, max_norm=clip)
        if scaler:
            scaler.step(opt)
            scaler.update()
        else:
            opt.step()
        return losses

    return Training([model], [opt], step, scaler)


def regression(out: Callable[[Any], torch.Tensor] = lambda y: y) -> Callable[[nn.Module, int], torch.Tensor]:
    """Mean square of the model's output on a random batch."""
    return lambda model, i: out(model(batch(i, 8, WIDTH))).float().square().mean()


def mlp(*, bias: bool = True) -> nn.Sequential:
    return nn.Sequential(nn.Linear(WIDTH, WIDTH, bias=bias), nn.ReLU(), nn.Linear(WIDTH, WIDTH, bias=bias))


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


class Scale(torch.autograd.Function):
    """Keeps things on its context under names that gradaudit looks at on torch's own nodes."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, factor: float) -> torch.Tensor:
        ctx.variable, ctx.factor = factor, factor
        return x * factor

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        return grad * ctx.factor, None


class TwoOutputs(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        ctx.set_materialize_grads(False)
        return x.clone(), x * 2

    @staticmethod
    def backward(ctx: Any, first: torch.Tensor | None, second: torch.Tensor | None) -> torch.Tensor | None:
        return first if second is None else second * 2


def custom_functions() -> Training:
    def out(y: torch.Tensor) -> torch.Tensor:
        once, _ = TwoOutputs.apply(y)
        scaled: torch.Tensor = Scale.apply(once, 3.0)
        return scaled

    return supervised(mlp(), loss=regression(out), scaler=scaler())


def gradient_penalty() -> Training:
    model, s = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, 1)), scaler(init_scale=256.0)
    optimizer = torch.optim.Adam(model.parameters())

    def step(i: int) -> list[torch.Tensor]:
        optimizer.zero_grad()
        x = batch(i, 4, WIDTH).requires_grad_()
        with half():
            loss = model(x).float().square().mean()
        (grad,) = torch.autograd.grad(s.scale(loss), x, create_graph=True)
        penalty = (grad / s.get_scale()).square().sum()
        s.scale(loss + penalty).backward()
        s.step(optimizer)
        s.update()
        return [loss.detach(), penalty.detach()]

    return Training([model], [optimizer], step, s)


def backward_that_builds_a_graph() -> Training:
    model = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)

    def step(i: int) -> list[torch.Tensor]:
        optimizer.zero_grad()
        loss = regression()(model, i)
        loss.backward(create_graph=True)
        norm = sum(param.grad.square().sum() for param in model.parameters() if param.grad is not None)
        optimizer.zero_grad()
        (0.1 * norm).backward()  # type: ignore[union-attr]
        optimizer.step()
        return [loss.detach()]

    return Training([model], [optimizer], step)


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.out, self.norm = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH), nn.LayerNorm(WIDTH)
        self.drop = nn.Dropout(0.2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = self.qkv(self.norm(x)).chunk(3, dim=-1)
        scores = (q @ k.transpose(-1, -2) / WIDTH**0.5).masked_fill(torch.ones(5, 5).triu(1).bool(), float("-inf"))
        return x + self.drop(self.out(scores.softmax(-1) @ v))


def attention() -> Training:
    model = nn.Sequential(Attention(), Attention())
    return supervised(model, loss=lambda m, i: m(batch(i, 2, 5, WIDTH)).float().square().mean(), scaler=scaler())


def encoder_layer() -> Training:
    model = nn.TransformerEncoderLayer(WIDTH, 2, 32, batch_first=True)
    return supervised(model, loss=lambda m, i: m(batch(i, 2, 5, WIDTH)).float().square().mean(), scaler=scaler())


def accumulation_with_clipping() -> Training:
    return supervised(mlp(), loss=regression(), scaler=scaler(), accumulate=3, clip=0.1)


def fused_adam() -> Training:
    model = mlp()
    optimizer = torch.optim.Adam(model.parameters(), fused=True)
    return supervised(model, loss=regression(), optimizer=optimizer, scaler=scaler(init_scale=2.0**24))


def half_parameters() -> Training:
    model = mlp().half()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    return supervised(
        model,
        loss=lambda m, i: m(batch(i, 8, WIDTH).half()).float().square().mean(),
        optimizer=optimizer,
        autocast=None,
    )


def retained_graph() -> Training:
    model, s = mlp(), scaler()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)

    def step(i: int) -> list[torch.Tensor]:
        optimizer.zero_grad()
        with half():
            loss = regression()(model, i)
        s.scale(loss).backward(retain_graph=True)
        s.scale(loss).backward()
        s.step(optimizer)
        s.update()
        return [loss.detach()]

    return Training([model], [optimizer], step, s)


def optimizer_inside_backward() -> Training:
    """Each parameter has its own optimizer, which steps as soon as its gradient is there."""
    model = mlp()
    optimizers = {param: torch.optim.SGD([param], lr=0.01) for param in model.parameters()}

    def update(param: torch.Tensor) -> None:
        optimizers[param].step()  # type: ignore[index]
        optimizers[param].zero_grad()  # type: ignore[index]

    for param in model.parameters():
        param.register_post_accumulate_grad_hook(update)

    def step(i: int) -> list[torch.Tensor]:
        loss = regression()(model, i)
        loss.backward()
        return [loss.detach()]

    return Training([model], list(optimizers.values()), step, num_updates=4)


def parametrized_weights() -> Training:
    model = nn.Sequential(
        nn.utils.parametrizations.spectral_norm(nn.Linear(WIDTH, WIDTH)),
        nn.utils.parametrizations.weight_norm(nn.Linear(WIDTH, WIDTH)),
    )
    return supervised(model, loss=regression(), scaler=scaler())


def per_sample_gradients() -> Training:
    """torch.func: modules are called with batched tensors that must not escape."""
    model = mlp()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def loss_of_one(params: dict[str, torch.Tensor], x: torch.Tensor) -> torch.Tensor:
        value: torch.Tensor = torch.func.functional_call(model, params, (x[None],)).square().mean()
        return value

    def step(i: int) -> list[torch.Tensor]:
        params = dict(model.named_parameters())
        inputs = batch(i, 4, WIDTH)
        grads = torch.func.vmap(torch.func.grad(loss_of_one), in_dims=(None, 0))(params, inputs)
        _, tangent = torch.func.jvp(model, (inputs,), (inputs,))
        for name, param in params.items():
            param.grad = grads[name].mean(0).detach()
        optimizer.step()
        return [tangent.detach()]

    return Training([model], [optimizer], step)


def module_made_in_forward() -> Training:
    class Inline(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(WIDTH, WIDTH)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            out: torch.Tensor = nn.ReLU()(self.linear(x)) + nn.Dropout(0.5)(x)
            return out

    return supervised(Inline(), loss=lambda m, i: nn.MSELoss()(m(batch(i, 8, WIDTH)).float(), batch(i, 8, WIDTH)))


def loss_module_and_scheduler() -> Training:
    model, criterion, s = nn.Sequential(mlp(), nn.Linear(WIDTH, 4)), nn.CrossEntropyLoss(), scaler()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 30)

    def step(i: int) -> list[torch.Tensor]:
        optimizer.zero_grad(set_to_none=False)
        with half():
            loss = criterion(model(batch(i, 8, WIDTH)), torch.arange(8) % 4)
        s.scale(loss).backward()
        s.step(optimizer)
        s.update()
        schedule.step()
        return [loss.detach(), torch.tensor(schedule.get_last_lr())]

    return Training([model], [optimizer], step, s)


def gradient_of_the_input() -> Training:
    """An attack on the input needs a leaf that belongs to no module and is a new one every time."""
    model, s = mlp(), scaler()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)

    def step(i: int) -> list[torch.Tensor]:
        x = batch(i, 8, WIDTH).requires_grad_()
        model(x).square().mean().backward()
        assert x.grad is not None
        optimizer.zero_grad()
        with half():
            loss = model((x + 0.1 * x.grad.sign()).detach()).float().square().mean()
        s.scale(loss).backward()
        s.step(optimizer)
        s.update()
        return [loss.detach()]

    return Training([model], [optimizer], step, s)


def compiled(*, whole_step: bool = False) -> Training:
    model = nn.Sequential(mlp(), nn.BatchNorm1d(WIDTH), nn.Linear(WIDTH, 2))
    fast = torch.compile(model, backend="aot_eager")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, foreach=False)
    training = supervised(fast, loss=regression(), optimizer=optimizer, scaler=scaler())  # type: ignore[arg-type]
    training.modules = [model]
    return training


def compiled_in_place() -> Training:
    model = nn.Sequential(mlp(), nn.Linear(WIDTH, 2))
    model[0].compile(backend="aot_eager")
    return supervised(model, loss=regression(), scaler=scaler())


def scripted() -> Training:
    return supervised(torch.jit.script(mlp()), loss=regression(), autocast=None, scaler=scaler())


def traced_while_training() -> Training:
    training = supervised(mlp(), loss=regression(), scaler=scaler())
    plain = training.step

    def step(i: int) -> list[torch.Tensor]:
        losses = plain(i)
        if i % 10 == 0:
            trace = torch.jit.trace(training.modules[0], batch(i, 2, WIDTH))
            losses.append(torch.tensor(float(len(list(trace.inlined_graph.nodes())))))
        return losses

    training.step = step
    return training


def forward_that_raises() -> Training:
    class Fussy(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.body = mlp()

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            if x.isnan().any():
                raise ValueError("no NaN, please")
            out: torch.Tensor = self.body(x)
            return out

    training = supervised(nn.Sequential(Fussy()), loss=regression(), scaler=scaler())
    plain = training.step

    def step(i: int) -> list[torch.Tensor]:
        try:
            training.modules[0](torch.full((1, WIDTH), torch.nan))
        except ValueError as error:
            assert str(error) == "no NaN, please"
        return plain(i)

    training.step = step
    return training


def evaluation_between_steps() -> Training:
    """With and without gradients switched off, and in inference mode."""
    training = supervised(nn.Sequential(mlp(), nn.BatchNorm1d(WIDTH)), loss=regression(), scaler=scaler())
    plain, model = training.step, training.modules[0]

    def step(i: int) -> list[torch.Tensor]:
        losses = plain(i)
        model.eval()
        losses.append(regression()(model, i).detach())
        with torch.no_grad():
            losses.append(regression()(model, i))
        with torch.inference_mode():
            losses.append(regression()(model, i).clone())
        model.train()
        return losses

    training.step = step
    return training


RECIPES: dict[str, Recipe] = {
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
    "custom autograd functions": custom_functions,
    "gradient penalty": gradient_penalty,
    "backward with create_graph": backward_that_builds_a_graph,
    "attention with dropout": attention,
    "torch's own encoder layer": encoder_layer,
    "accumulation with clipping": accumulation_with_clipping,
    "fused Adam": fused_adam,
    "no scaler": lambda: supervised(mlp(), loss=regression()),
    "disabled scaler": lambda: supervised(mlp(), loss=regression(), scaler=scaler(enabled=False)),
    "BF16": lambda: supervised(mlp(), loss=regression(), autocast=torch.bfloat16),
    "FP32": lambda: supervised(mlp(), loss=regression(), autocast=None, clip=0.5),
    "FP16 parameters": half_parameters,
    "graph used twice": retained_graph,
    "optimizer inside backward": optimizer_inside_backward,
    "parametrized weights": parametrized_weights,
    "per-sample gradients": per_sample_gradients,
    "modules made in forward": module_made_in_forward,
    "loss module and scheduler": loss_module_and_scheduler,
    "gradient of the input": gradient_of_the_input,
    "compiled": compiled,
    "compiled in place": compiled_in_place,
    "scripted": scripted,
    "traced while training": traced_while_training,
    "forward that raises": forward_that_raises,
    "evaluation between steps": evaluation_between_steps,
}
