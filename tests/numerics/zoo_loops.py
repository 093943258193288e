"""Trainings by many kinds of loops."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from tests.numerics.trainings import WIDTH, Recipe, Training, batch, half, mlp, regression, scaler, supervised


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


def compiled() -> Training:
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
        with pytest.raises(ValueError, match="no NaN, please"):
            training.modules[0](torch.full((1, WIDTH), torch.nan))
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


def gradients_changed_by_hand() -> Training:
    """Before they are unscaled, in every way there is: who did it, and by how much, is looked into."""
    model, s = mlp(), scaler()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)

    def step(i: int) -> list[torch.Tensor]:
        optimizer.zero_grad(set_to_none=i % 2 == 0)
        with half():
            loss = regression()(model, i)
        s.scale(loss).backward()
        for k, param in enumerate(model.parameters()):
            if param.grad is None:
                continue
            if (i + k) % 3 == 0:
                param.grad *= 0.5
            elif (i + k) % 3 == 1:
                param.grad = param.grad * 0.5
            else:
                param.grad.data.clamp_(-1.0, 1.0)
        s.step(optimizer)
        s.update()
        return [loss.detach()]

    return Training([model], [optimizer], step, s)


LOOPS: dict[str, Recipe] = {
    "gradients changed by hand": gradients_changed_by_hand,
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
