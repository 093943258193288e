"""Names of modules and parameters, with and without being told the model."""

from __future__ import annotations

import gc
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from gradaudit.capture.names import LOSS, Name, Names
from gradaudit.store import Run
from tests.unit.capture.trainings import WIDTH, batch, by_name, net, record, scaler, step

PARAMS = ["0.bias", "0.weight", "2.bias", "2.weight"]


def params(run: Run) -> list[str]:
    return sorted(by_name(run, "param_grad"))


def outputs(run: Run) -> list[str]:
    return sorted(by_name(run, "output"))


def sgd(*modules: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD([param for module in modules for param in module.parameters()], lr=0.1)


@pytest.mark.parametrize("told", [True, False])
def test_a_single_root_lends_no_prefix(tmp_path: Path, *, told: bool) -> None:
    model = net()
    optimizer = sgd(model)
    run = record(tmp_path / "run", lambda: step(model, optimizer, scaler()), model=model if told else None)
    assert params(run) == PARAMS
    assert outputs(run) == ["0", "1", "2", "Sequential"]


def test_zero_grad_before_the_first_forward_does_not_spoil_the_names(tmp_path: Path) -> None:
    model = net()
    optimizer = sgd(model)

    def train() -> None:
        optimizer.zero_grad()
        step(model, optimizer)

    assert params(record(tmp_path / "run", train)) == PARAMS


def test_a_loss_function_is_not_a_second_root(tmp_path: Path) -> None:
    model, criterion = net(), nn.MSELoss()
    optimizer = sgd(model)

    def train() -> None:
        for _ in range(3):
            optimizer.zero_grad()
            (criterion(model(batch()), torch.zeros(4, 2)) + nn.L1Loss()(model(batch()), torch.ones(4, 2))).backward()
            optimizer.step()

    run = record(tmp_path / "run", train, every=1)
    assert params(run) == PARAMS
    assert outputs(run) == ["0", "1", "2", "L1Loss", "MSELoss", "Sequential"]


def test_modules_made_afresh_at_every_call_share_a_name(tmp_path: Path) -> None:
    class Inline(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(WIDTH, WIDTH)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            out: torch.Tensor = nn.Dropout(0.1)(nn.ReLU()(self.linear(x)))
            return out

    model = nn.Sequential(Inline())
    optimizer = sgd(model)
    run = record(tmp_path / "run", lambda: [step(model, optimizer) for _ in range(5)], every=1)
    assert outputs(run) == ["0", "0.Dropout", "0.ReLU", "0.linear", "Sequential"]
    assert len(run.tensors()) < 30


def test_several_roots_are_prefixed_with_the_variables_that_hold_them(tmp_path: Path) -> None:
    def train() -> None:
        generator, critic = net(), nn.Linear(2, 1)
        optimizer = sgd(generator, critic)
        critic(generator(batch())).mean().backward()
        optimizer.step()

    run = record(tmp_path / "run", train)
    assert params(run) == ["critic.bias", "critic.weight", *(f"generator.{name}" for name in PARAMS)]
    assert outputs(run) == ["critic", "generator", "generator.0", "generator.1", "generator.2"]


GLOBAL_MODEL = nn.Linear(WIDTH, WIDTH)


def test_a_root_held_by_a_global_variable_is_named_too(tmp_path: Path) -> None:
    other = net()
    optimizer = sgd(GLOBAL_MODEL, other)

    def train() -> None:
        other(GLOBAL_MODEL(batch())).mean().backward()
        optimizer.step()

    assert params(record(tmp_path / "run", train))[:2] == ["GLOBAL_MODEL.bias", "GLOBAL_MODEL.weight"]


def test_roots_of_one_variable_name_are_told_apart(tmp_path: Path) -> None:
    def call(model: nn.Module, x: torch.Tensor) -> Any:
        return model(x)

    models = [nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)]
    optimizer = sgd(*models)

    def train() -> None:
        x = batch()
        for i in range(2):
            x = call(models[i], x)
        x.mean().backward()
        optimizer.step()

    assert params(record(tmp_path / "run", train)) == ["model.bias", "model.weight", "model_.bias", "model_.weight"]


def test_a_model_built_anew_keeps_the_names_of_the_last(tmp_path: Path) -> None:
    def train() -> None:
        for _ in range(3):
            model = net()
            step(model, sgd(model))
            del model
            gc.collect()

    run = record(tmp_path / "run", train)
    assert params(run) == PARAMS
    assert [entry["params"] for entry in run.meta["optimizers"]] == [run.meta["optimizers"][0]["params"]] * 3


@pytest.mark.parametrize("wrapper", ["DataParallel", "DistributedDataParallel", "FullyShardedDataParallel"])
def test_a_parallel_wrapper_is_stripped_from_the_names(tmp_path: Path, wrapper: str) -> None:
    class Wrapper(nn.Module):
        def __init__(self, module: nn.Module) -> None:
            super().__init__()
            self.module = module

        def forward(self, *args: Any) -> Any:
            return self.module(*args)

    model = type(wrapper, (Wrapper,), {})(net())
    optimizer = sgd(model)
    run = record(tmp_path / "run", lambda: step(model, optimizer))
    assert params(run) == PARAMS


def test_a_compiled_model_has_the_names_of_the_one_inside(tmp_path: Path) -> None:
    model = net()
    optimizer = sgd(model)
    fast: Any = torch.compile(model, backend="eager")
    assert params(record(tmp_path / "run", lambda: step(fast, optimizer))) == PARAMS


def test_a_submodule_called_first_takes_the_names_of_the_whole_later(tmp_path: Path) -> None:
    model = nn.ModuleDict({"encoder": net(), "head": nn.Linear(2, 1)})

    class Whole(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.parts = model

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            out: torch.Tensor = self.parts["head"](self.parts["encoder"](x))
            return out

    whole = Whole()
    optimizer = sgd(whole)

    def train() -> None:
        encoder = model["encoder"]
        encoder(batch()).mean().backward()  # a warm-up of its own
        optimizer.zero_grad()
        step(whole, optimizer)

    run = record(tmp_path / "run", train)
    assert params(run) == [*(f"parts.encoder.{name}" for name in PARAMS), "parts.head.bias", "parts.head.weight"]
    assert "parts.encoder" in outputs(run)


def test_a_model_used_through_its_own_methods_is_the_root_all_the_same(tmp_path: Path) -> None:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.encoder, self.head = net(), nn.Linear(2, 1)

        def training_step(self, x: torch.Tensor) -> torch.Tensor:
            loss: torch.Tensor = self.head(self.encoder(x)).square().mean()
            return loss

    model = Model()
    optimizer = sgd(model)

    def train() -> None:
        model.training_step(batch()).backward()
        optimizer.step()

    run = record(tmp_path / "run", train)
    assert params(run) == [*(f"encoder.{name}" for name in PARAMS), "head.bias", "head.weight"]


def test_a_layer_put_in_by_the_first_forward_has_its_place(tmp_path: Path) -> None:
    class Growing(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.rest = nn.Linear(WIDTH, WIDTH), nn.ModuleList()

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            if not len(self.rest):
                self.rest.append(nn.Linear(WIDTH, 2))
                self.act = nn.Tanh()
            out: torch.Tensor = self.act(self.rest[0](self.first(x)))
            return out

    model = nn.Sequential(Growing())

    def train() -> None:
        model(batch()).mean().backward()
        optimizer = sgd(model)
        optimizer.step()

    run = record(tmp_path / "run", train)
    assert params(run) == ["0.first.bias", "0.first.weight", "0.rest.0.bias", "0.rest.0.weight"]
    assert outputs(run) == ["0", "0.act", "0.first", "0.rest.0", "Sequential"]


def test_parameters_of_no_module_are_named_by_their_optimizer(tmp_path: Path) -> None:
    a, b = (torch.ones(3, requires_grad=True) for _ in range(2))
    first, second = torch.optim.SGD([a], lr=0.1), torch.optim.SGD([b], lr=0.1)

    def train() -> None:
        for _ in range(2):
            (a * b).sum().backward()
            first.step()
            second.step()

    run = record(tmp_path / "run", train, every=1)
    assert params(run) == ["SGD.0.0", "SGD_1.0.0"]
    assert by_name(run, "param_grad")["SGD.0.0"].parents  # found in the graph once it is known


def test_leaves_that_nobody_optimizes_are_not_listed(tmp_path: Path) -> None:
    model = net()
    optimizer = sgd(model)

    def train() -> None:
        for i in range(10):
            optimizer.zero_grad()
            x = batch(i).requires_grad_()
            model(x).mean().backward()
            optimizer.step()

    assert params(record(tmp_path / "run", train, model=model, every=1)) == PARAMS


def test_tied_weights_have_one_name(tmp_path: Path) -> None:
    model = nn.Sequential(nn.Linear(WIDTH, WIDTH, bias=False), nn.Linear(WIDTH, WIDTH, bias=False))
    model[1].weight = model[0].weight
    optimizer = sgd(model)
    assert params(record(tmp_path / "run", lambda: step(model, optimizer))) == ["0.weight"]


def test_names_keep_no_module_and_no_parameter_alive() -> None:
    model = net()
    names = Names()
    names.add_root(model)
    param = model[0].weight
    assert names.param(param) == Name(0, "0.weight")
    alive = weakref.ref(model), weakref.ref(param)
    del model, param
    gc.collect()
    assert [ref() for ref in alive] == [None, None]


def test_a_parameter_is_known_only_while_its_module_holds_it() -> None:
    model = net()
    names = Names()
    names.add_root(model)
    old = model[0].weight
    model[0].weight = nn.Parameter(torch.zeros(WIDTH, WIDTH))
    assert names.param(old) is None
    assert names.param(model[0].weight) is None


def test_no_parameter_gets_a_weak_reference() -> None:
    model = net()
    names = Names()
    names.add_root(model)
    assert [weakref.getweakrefcount(param) for param in model.parameters()] == [0] * 4


def test_a_training_functions_variables_live_no_longer_than_they_would(tmp_path: Path) -> None:
    """Looking for the variable that holds the model must not keep the first batch for the length of the training."""
    alive: list[Any] = []

    def train() -> None:
        model = net()
        optimizer = sgd(model)
        for i in range(2):
            x = batch(i)
            alive.append(weakref.ref(x))
            loss = model(x).mean()
            alive.append(weakref.ref(loss))
            loss.backward()
            optimizer.step()
        del x, loss
        gc.collect()
        assert [ref() for ref in alive] == [None] * 4

    record(tmp_path / "run", train, every=1)


def test_a_dict_of_locals_that_the_user_keeps_is_not_emptied(tmp_path: Path) -> None:
    def train() -> None:
        learning_rate = 0.1
        config = locals()
        model = net()
        step(model, torch.optim.SGD(model.parameters(), lr=learning_rate))
        assert config["learning_rate"] == 0.1

    record(tmp_path / "run", train)


def test_the_loss_is_a_place_of_its_own() -> None:
    assert Names().full(LOSS) == "loss"
