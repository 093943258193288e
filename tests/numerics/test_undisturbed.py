"""A training is bit for bit the same with gradaudit attached and without, and sees no other warning."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
import torch

import gradaudit
from gradaudit.capture import recorder
from tests.numerics.trainings import Recipe, Training, mlp, regression, supervised
from tests.numerics.zoo_corners import CORNERS
from tests.numerics.zoo_loops import LOOPS, compiled
from tests.numerics.zoo_models import MODELS

RECIPES = MODELS | LOOPS | CORNERS

NUM_STEPS = 50

HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")

BACKEND_STEPS = {"compiled": 6, "compiled in place": 6}
"""Compiling costs seconds."""


UNTRACED = {"compiled", "compiled in place"}
"""Under a dispatch mode compiled code would run other kernels."""


@pytest.fixture(autouse=True)
def nothing_dropped(monkeypatch: pytest.MonkeyPatch) -> None:
    """However slow this machine, what is recorded here is recorded whole."""
    monkeypatch.setattr(recorder, "MAX_WAITING_SAMPLES", 10_000)


def train(
    recipe: Recipe, *, num_steps: int, attach: Any = None, attach_at: int = 0
) -> tuple[dict[str, Any], list[str]]:
    """Run a recipe, attached from step `attach_at` on; returns everything it left behind, and its warnings."""
    torch.manual_seed(0)
    losses: list[torch.Tensor] = []
    with warnings.catch_warnings(record=True) as caught, ExitStack() as stack:
        warnings.simplefilter("always")
        training = recipe()
        for i in range(num_steps):
            if attach is not None and i == attach_at:
                stack.enter_context(attach(training))
            losses += training.step(i)
    return {**state(training), "losses": losses}, [f"{entry.category.__name__}: {entry.message}" for entry in caught]


def state(training: Training) -> dict[str, Any]:
    modules = [module for root in training.modules for module in root.modules()]
    return {
        "attributes": [sorted(vars(module)) for module in modules],
        "hooks": [len(getattr(module, name)) for module in modules for name in HOOKS],
        "modules": [copy.deepcopy(dict(root.state_dict())) for root in training.modules],
        "gradients": [
            None if param.grad is None else param.grad.detach().clone()
            for root in training.modules
            for param in root.parameters()
        ],
        "optimizers": [copy.deepcopy(optimizer.state_dict()) for optimizer in training.optimizers],
        "scaler": None if training.scaler is None else training.scaler.state_dict(),
        "generator": torch.get_rng_state(),
    }


def differences(a: Any, b: Any, where: str = "") -> Iterator[str]:
    """Where two nested structures differ by a single bit."""
    if isinstance(a, torch.Tensor):
        same = isinstance(b, torch.Tensor) and a.dtype == b.dtype and a.shape == b.shape and a.layout == b.layout
        if not same or not torch.equal(bits(a), bits(b)):
            yield where
    elif isinstance(a, dict):
        assert a.keys() == b.keys(), where
        for key in a:
            yield from differences(a[key], b[key], f"{where}.{key}")
    elif isinstance(a, (list, tuple)):
        assert len(a) == len(b), where
        for i, (x, y) in enumerate(zip(a, b, strict=True)):
            yield from differences(x, y, f"{where}[{i}]")
    elif a != b:
        yield where


def bits(x: torch.Tensor) -> torch.Tensor:
    dense = x.to_dense().contiguous()
    return dense.view(torch.uint8) if dense.dim() else dense.reshape(1).view(torch.uint8)


def check(
    recipe: Recipe, folder: Path, *, every: int, num_steps: int, attach_at: int = 0, origin: str = "auto"
) -> gradaudit.Run:
    train(recipe, num_steps=1)  # some of torch's own warnings come once a process
    plain, plain_warnings = train(recipe, num_steps=num_steps)

    def attach(training: Training) -> gradaudit.Audit:
        optimizer = training.optimizers[0] if training.optimizers else None
        return gradaudit.attach(training.modules[0], optimizer, training.scaler, out=folder, every=every, origin=origin)

    watched, watched_warnings = train(recipe, num_steps=num_steps, attach=attach, attach_at=attach_at)
    assert list(differences(plain, watched)) == []
    assert sorted(watched_warnings) == sorted(plain_warnings)

    run = gradaudit.open_run(folder)
    assert run.ended == "ok"
    assert run.meta["errors"] == []
    assert run.meta["drops"] == {"sampled_steps": 0}
    return run


@pytest.mark.parametrize("every", [1, 7])
@pytest.mark.parametrize("name", RECIPES)
def test_a_training_is_bit_identical_and_recorded_whole(name: str, every: int, tmp_path: Path) -> None:
    recipe = RECIPES[name]
    num_steps = BACKEND_STEPS.get(name, NUM_STEPS)
    run = check(recipe, tmp_path / "run", every=every, num_steps=num_steps)

    assert len(run.steps) == num_steps * recipe().num_updates
    assert run.steps.sampled[0]
    if every == 1:
        assert run.steps.sampled.mean() > 0.4  # optimizers that share a backward share its samples
    names = {tensor.fqn for tensor in run.tensors() if tensor.kind == "param_grad"}
    assert not any(name.startswith(("parameter ", "SGD.", "Adam")) for name in names)


NUM_TRACED_STEPS = 12
"""Enough for a scale that comes down and grows again; a traced step takes several times as long."""


@pytest.mark.parametrize("name", RECIPES)
def test_tracing_every_step_changes_nothing_either(name: str, tmp_path: Path) -> None:
    num_steps = BACKEND_STEPS.get(name, NUM_TRACED_STEPS)
    run = check(RECIPES[name], tmp_path / "run", every=100, num_steps=num_steps, origin="always")
    assert len(run.steps) == num_steps * RECIPES[name]().num_updates
    assert bool(run.ops()) == (name not in UNTRACED)


@pytest.mark.parametrize("attach_at", [0, 3])
def test_a_model_compiled_before_gradaudit_came_is_left_alone_too(attach_at: int, tmp_path: Path) -> None:
    run = check(compiled, tmp_path / "run", every=1, num_steps=8, attach_at=attach_at)
    assert len(run.steps) == 8 - attach_at


def test_determinism_demanded_of_torch_is_not_violated(tmp_path: Path) -> None:
    torch.use_deterministic_algorithms(True)
    try:
        check(RECIPES["convnet, in-place ReLU, BatchNorm, clipping"], tmp_path / "run", every=1, num_steps=3)
    finally:
        torch.use_deterministic_algorithms(False)


@pytest.mark.parametrize("default", ["device", "dtype"])
def test_a_default_device_or_dtype_of_the_users_changes_nothing(default: str, tmp_path: Path) -> None:
    torch.set_default_dtype(torch.float64) if default == "dtype" else torch.set_default_device("cpu")
    try:
        check(lambda: supervised(mlp(), loss=regression(), autocast=None), tmp_path / "run", every=1, num_steps=3)
    finally:
        torch.set_default_dtype(torch.float32)
        torch.set_default_device(None)


def test_the_exception_of_a_training_is_the_one_it_would_have_seen(tmp_path: Path) -> None:
    def explode(i: int) -> list[torch.Tensor]:
        raise ZeroDivisionError("the user's own")

    training = Training([mlp()], [], explode)
    with pytest.raises(ZeroDivisionError, match=r"^the user's own$"):
        train(lambda: training, num_steps=1, attach=lambda t: gradaudit.attach(t.modules[0], out=tmp_path / "run"))
    run = gradaudit.open_run(tmp_path / "run")
    assert run.ended == "exception"
    assert run.meta["exception"]["type"] == "ZeroDivisionError"
    assert run.meta["exception"]["message"] == "the user's own"


def test_warnings_as_errors_stay_the_users_affair(tmp_path: Path) -> None:
    """Set after attaching, as a script under `gradaudit run` does: not one of gradaudit's making may surface."""
    with gradaudit.attach(torch.nn.Linear(1, 1), out=tmp_path / "run", every=1), warnings.catch_warnings():
        warnings.simplefilter("error")
        for recipe in (compiled, RECIPES["checkpointing"], RECIPES["forward that raises"]):
            training = recipe()
            training.step(0)


def test_a_difference_of_one_bit_would_be_found() -> None:
    a, b = torch.tensor([1.0, -0.0, torch.nan]), torch.tensor([1.0, 0.0, torch.nan])
    assert list(differences({"x": [a]}, {"x": [a.clone()]})) == []
    assert list(differences({"x": [a]}, {"x": [b]})) == [".x[0]"]
    assert list(differences([torch.ones(2)], [torch.ones(2, dtype=torch.float64)])) == ["[0]"]
