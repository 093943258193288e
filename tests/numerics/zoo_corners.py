"""Trainings that use the less common corners of torch; see `zoo_models` and `zoo_loops`."""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

from tests.numerics.trainings import WIDTH, Recipe, Training, batch, half, mlp, regression, scaler, supervised


def complex_weights() -> Training:
    class Spectral(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.randn(WIDTH // 2 + 1, dtype=torch.complex64))
            self.out = nn.Linear(WIDTH, 2)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            out: torch.Tensor = self.out(torch.fft.irfft(torch.fft.rfft(x) * self.weight, n=WIDTH))
            return out

    return supervised(nn.Sequential(Spectral()), loss=regression(), autocast=None)


def nested_inputs() -> Training:
    def loss(model: nn.Module, i: int) -> torch.Tensor:
        x = torch.nested.nested_tensor([batch(i, 2, WIDTH), batch(i + 1, 5, WIDTH)], layout=torch.jagged)
        out: torch.Tensor = model(x).values()
        return out.square().mean()

    return supervised(mlp(), loss=loss, autocast=None, scaler=scaler())


def sparse_inputs() -> Training:
    class FirstSparse(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.randn(WIDTH, 4))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return torch.sparse.mm(x, self.weight)

    return supervised(
        FirstSparse(), loss=lambda m, i: m(batch(i, 8, WIDTH).relu().to_sparse()).square().mean(), autocast=None
    )


def parameters_swapped() -> Training:
    """torch may swap parameters in place, and refuses to while anything refers to them weakly."""
    training = supervised(mlp(), loss=lambda m, i: m(batch(i, 8, WIDTH).to(m[0].weight)).square().mean(), autocast=None)  # type: ignore[index]
    plain, model = training.step, training.modules[0]

    def step(i: int) -> list[torch.Tensor]:
        losses = plain(i)
        training.optimizers[0].zero_grad()
        torch.__future__.set_swap_module_params_on_conversion(True)
        try:
            model.double().float()
        finally:
            torch.__future__.set_swap_module_params_on_conversion(False)
        return losses

    training.step = step
    return training


def tensors_saved_elsewhere() -> Training:
    def loss(model: nn.Module, i: int) -> torch.Tensor:
        with torch.autograd.graph.save_on_cpu():
            return regression()(model, i)

    return supervised(mlp(), loss=loss, scaler=scaler())


def anomaly_mode() -> Training:
    def loss(model: nn.Module, i: int) -> torch.Tensor:
        return regression()(model, i)

    training = supervised(mlp(), loss=loss, scaler=scaler(init_scale=256.0))
    plain = training.step

    def step(i: int) -> list[torch.Tensor]:
        with torch.autograd.set_detect_anomaly(True):
            return plain(i)

    training.step = step
    return training


def averaged_weights() -> Training:
    training = supervised(nn.Sequential(mlp(), nn.BatchNorm1d(WIDTH)), loss=regression(), scaler=scaler())
    averaged = torch.optim.swa_utils.AveragedModel(training.modules[0])
    plain = training.step

    def step(i: int) -> list[torch.Tensor]:
        losses = plain(i)
        averaged.update_parameters(training.modules[0])
        teacher = copy.deepcopy(training.modules[0]).requires_grad_(False)
        return [*losses, regression()(averaged, i).detach(), regression()(teacher, i)]

    training.modules.append(averaged)
    training.step = step
    return training


def hooks_of_the_users() -> Training:
    model = mlp()
    model[0].register_forward_hook(lambda module, args, output: output * 2)
    model[2].register_full_backward_hook(lambda module, grads, out: (None if grads[0] is None else grads[0] * 0.5,))
    model[0].weight.register_hook(lambda grad: grad.clamp(-1, 1))
    return supervised(model, loss=regression(), scaler=scaler())


def functional_updates() -> Training:
    """One inner step by hand, differentiated through, with the modules called on weights that are not theirs."""
    model, s = mlp(), scaler(init_scale=256.0)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)

    def step(i: int) -> list[torch.Tensor]:
        optimizer.zero_grad()
        params = dict(model.named_parameters())
        inner = torch.func.functional_call(model, params, (batch(i, 4, WIDTH),)).square().mean()
        grads = torch.autograd.grad(inner, list(params.values()), create_graph=True)
        fast = {name: param - 0.1 * grad for (name, param), grad in zip(params.items(), grads, strict=True)}
        outer = torch.func.functional_call(model, fast, (batch(i + 1, 4, WIDTH),)).square().mean()
        s.scale(outer).backward()
        s.step(optimizer)
        s.update()
        return [outer.detach()]

    return Training([model], [optimizer], step, s)


def parameters_added_later() -> Training:
    model = nn.Sequential(mlp(), mlp())
    optimizer = torch.optim.SGD(model[1].parameters(), lr=0.01, momentum=0.9)
    training = supervised(model, loss=regression(), optimizer=optimizer, scaler=scaler())
    plain = training.step

    def step(i: int) -> list[torch.Tensor]:
        if i == 3:
            optimizer.add_param_group({"params": list(model[0].parameters()), "lr": 0.001})
        return plain(i)

    training.step = step
    return training


def layers_built_by_the_first_call() -> Training:
    class Growing(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.body, self.lazy, self.late = mlp(), nn.LazyLinear(WIDTH), nn.ModuleList()

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            if not len(self.late):
                torch.manual_seed(5)
                self.late.append(nn.Linear(WIDTH, 2))
            out: torch.Tensor = self.late[0](self.lazy(self.body(x)))
            return out

    model = nn.Sequential(Growing())
    optimizers: list[torch.optim.Optimizer] = []

    def step(i: int) -> list[torch.Tensor]:
        loss = regression()(model, i)
        if not optimizers:
            optimizers.append(torch.optim.SGD(model.parameters(), lr=0.01))
        optimizers[0].zero_grad()
        loss.backward()
        optimizers[0].step()
        return [loss.detach()]

    return Training([model], optimizers, step)


def several_losses_scaled_apart() -> Training:
    trunk, heads, s = mlp(), nn.ModuleList(nn.Linear(WIDTH, 1) for _ in range(12)), scaler()
    model = nn.ModuleList([trunk, heads])
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)

    def step(i: int) -> list[torch.Tensor]:
        optimizer.zero_grad()
        with half():
            hidden = trunk(batch(i, 4, WIDTH))
            losses = [head(hidden).float().square().mean() for head in heads]
        scaled = s.scale(losses)
        assert isinstance(scaled, list)
        sum(scaled).backward()  # type: ignore[union-attr]
        s.step(optimizer)
        s.update()
        return [loss.detach() for loss in losses]

    return Training([model], [optimizer], step, s)


def step_given_up_by_the_script() -> Training:
    model, s = mlp(), scaler(init_scale=2.0**26)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)

    def step(i: int) -> list[torch.Tensor]:
        optimizer.zero_grad()
        with half():
            loss = regression()(model, i)
        s.scale(loss).backward()
        s.unscale_(optimizer)
        norm = nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        if torch.isfinite(norm):
            s.step(optimizer)
        s.update()
        return [loss.detach(), norm]

    return Training([model], [optimizer], step, s)


def a_thread_that_evaluates() -> Training:
    import threading

    training = supervised(mlp(), loss=regression(), scaler=scaler())
    plain, other = training.step, mlp()

    def step(i: int) -> list[torch.Tensor]:
        found: list[Any] = []
        thread = threading.Thread(target=lambda: found.append(regression()(other, i).detach()))
        thread.start()
        losses = plain(i)
        thread.join()
        return [*losses, *found]

    training.step = step
    return training


def forward_mode() -> Training:
    from torch.autograd import forward_ad

    training = supervised(mlp(), loss=regression(), scaler=scaler())
    plain, model = training.step, training.modules[0]

    def step(i: int) -> list[torch.Tensor]:
        with forward_ad.dual_level():
            out = model(forward_ad.make_dual(batch(i, 4, WIDTH), batch(i + 1, 4, WIDTH)))
            tangent = forward_ad.unpack_dual(out).tangent
        assert tangent is not None
        return [*plain(i), tangent.detach()]

    training.step = step
    return training


def custom_attention_inside_autocast_regions() -> Training:
    class Mixed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.last = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            with half():
                hidden = self.first(x)
                with torch.autocast("cpu", enabled=False):
                    hidden = F.layer_norm(hidden.float(), (WIDTH,))
            out: torch.Tensor = self.last(hidden)
            return out

    return supervised(Mixed(), loss=regression(), scaler=scaler(), autocast=None)


CORNERS: dict[str, Recipe] = {
    "complex weights": complex_weights,
    "nested inputs": nested_inputs,
    "sparse inputs": sparse_inputs,
    "parameters swapped": parameters_swapped,
    "tensors saved elsewhere": tensors_saved_elsewhere,
    "anomaly mode": anomaly_mode,
    "averaged weights": averaged_weights,
    "hooks of the user's": hooks_of_the_users,
    "functional updates": functional_updates,
    "parameters added later": parameters_added_later,
    "layers built by the first call": layers_built_by_the_first_call,
    "several losses scaled apart": several_losses_scaled_apart,
    "step given up by the script": step_given_up_by_the_script,
    "a thread that evaluates": a_thread_that_evaluates,
    "forward-mode derivatives": forward_mode,
    "nested autocast regions": custom_attention_inside_autocast_regions,
}
