"""One batch at several scales: what it says, and that the training does not notice."""

from __future__ import annotations

import copy
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import gradaudit
from tests.unit.capture.trainings import WIDTH, batch, net, scaler, step

DEVICE = "cpu"

NAMES = ("plain", "probed")


class Gain(nn.Module):
    """Multiplies by a constant in the forward, by another in the backward."""

    def __init__(self, forward: float = 1.0, backward: float = 1.0) -> None:
        super().__init__()
        self.forward_gain, self.backward_gain = forward, backward

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return _Gain.apply(x, self.forward_gain, self.backward_gain)  # type: ignore[no-any-return,no-untyped-call]


class _Gain(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, forward: float, backward: float) -> torch.Tensor:
        ctx.backward_gain = backward
        return x * forward

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[Any, ...]:
        return grad * ctx.backward_gain, None, None


def model_with(gain: nn.Module) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(WIDTH, WIDTH), gain, nn.Linear(WIDTH, 2))


def loss_of(model: nn.Module, x: torch.Tensor | None = None) -> Callable[[], torch.Tensor]:
    def closure() -> torch.Tensor:
        with torch.autocast(DEVICE, dtype=torch.float16):
            return model(batch() if x is None else x).float().square().mean()

    return closure


def probe(folder: Path, model: nn.Module, closure: Callable[[], torch.Tensor], **more: Any) -> gradaudit.ProbeResult:
    with gradaudit.attach(model, out=folder) as audit:
        return audit.probe(closure, **more)


def test_a_healthy_batch_is_safe_up_to_its_edge(tmp_path: Path) -> None:
    model = net()
    result = probe(tmp_path / "run", model, loss_of(model))
    assert result.forward_finite
    assert result.largest_safe_scale is not None
    assert result.largest_safe_scale >= 2.0**14
    safe = [row for row in result.rows if row.gradients_finite]
    assert [row.num_gradients for row in safe] == [4] * len(safe)
    # the same gradient at every scale, but for rounding
    assert np.ptp([row.amax for row in safe]) < 1e-2 * safe[0].amax
    assert result.scale_in_force is None


def test_a_backward_that_overflows_gives_the_largest_safe_scale(tmp_path: Path) -> None:
    model = model_with(Gain(backward=2.0**12))
    result = probe(tmp_path / "run", model, loss_of(model))
    edge = result.largest_safe_scale
    assert edge is not None
    assert result.forward_finite
    assert not result.gradients_finite
    assert result.verdict == (
        f"The forward is finite and the backward overflows above 2^{int(np.log2(edge))}, first in the gradient of "
        "0.weight: a smaller scale is the cure."
    )
    # the next binade was tried and is not safe, and the training confirms it
    assert [row.gradients_finite for row in result.rows if row.scale in (edge, edge * 2)] == [True, False]
    for scale, finite in ((edge, True), (edge * 2, False)):
        model.zero_grad()
        (loss_of(model)() * scale).backward()
        assert all(bool(p.grad.isfinite().all()) for p in model.parameters()) is finite


def test_where_only_a_scale_below_one_is_safe_it_is_found(tmp_path: Path) -> None:
    model = model_with(Gain(backward=2.0**20))
    result = probe(tmp_path / "run", model, loss_of(model))
    assert result.largest_safe_scale is not None
    assert result.largest_safe_scale < 1
    assert "only a scale below 1 is safe" in result.verdict


def test_a_forward_that_is_not_finite_is_run_once_and_no_scale_is_advised(tmp_path: Path) -> None:
    model = model_with(Gain(forward=2.0**20))
    result = probe(tmp_path / "run", model, loss_of(model))
    assert (result.forward_finite, result.largest_safe_scale, len(result.rows)) == (False, None, 1)
    assert result.first_bad is not None
    assert result.first_bad.startswith("a multiplication by a number in 1 (Gain), ")
    assert result.verdict == f"The forward is not finite: no scale can help; first bad value: {result.first_bad}."


def test_a_batch_of_nan_is_a_forward_that_is_not_finite(tmp_path: Path) -> None:
    model = net()
    result = probe(tmp_path / "run", model, loss_of(model, batch() * torch.nan))
    assert result.verdict == (
        "The forward is not finite: no scale can help; first bad value: the batch holds NaN itself."
    )


def test_a_gradient_that_is_nan_at_every_scale_is_not_the_scale_s(tmp_path: Path) -> None:
    model = net()

    def closure() -> torch.Tensor:
        return (model(batch()) * 0).square().sum(dim=1).sqrt().mean()

    result = probe(tmp_path / "run", model, closure)
    assert result.forward_finite
    assert result.largest_safe_scale is None
    assert result.smallest_scale == 2.0**-24
    assert result.verdict.startswith("The forward is finite and the gradient is NaN at every scale tried")
    assert result.verdict.endswith("backward meets it first at 2.bias.")


def test_the_scales_asked_for_are_those_tried(tmp_path: Path) -> None:
    model = net()
    result = probe(tmp_path / "run", model, loss_of(model), scales=[1024.0, 4.0])
    assert [row.scale for row in result.rows] == [4.0, 1024.0]
    assert result.largest_safe_scale == 1024.0


@pytest.mark.parametrize("scale", [0.0, -1.0, float("nan"), float("inf")])
def test_a_scale_that_is_none_is_refused(tmp_path: Path, scale: float) -> None:
    model = net()
    with pytest.raises(ValueError, match="each must be a finite number above 0"):
        probe(tmp_path / "run", model, loss_of(model), scales=[scale])


def test_a_scale_in_force_that_is_safe_is_said_to_be(tmp_path: Path) -> None:
    model = model_with(Gain(backward=2.0**12))
    s = scaler(init_scale=4.0)
    with gradaudit.attach(model, None, s, out=tmp_path / "run") as audit:
        result = audit.probe(loss_of(model))
    assert result.scale_in_force == 4.0
    assert result.verdict.endswith("; the scale in force, 2^2, is safe for this batch.")


class Restless(nn.Module):
    """Dropout, running statistics, a buffer that is replaced and one that is written."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.Sequential(
            nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(WIDTH), nn.ReLU(), nn.Dropout(0.5), nn.Linear(WIDTH, 2)
        )
        self.register_buffer("replaced", torch.zeros(3))
        self.register_buffer("written", torch.zeros(3, dtype=torch.long))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.replaced = self.replaced + random.random() + np.random.rand()
        self.written += 1
        y = self.layers(x)
        return y + self.replaced.sum() * torch.rand(()) + self.written.sum()  # type: ignore[no-any-return]


def snapshot(model: nn.Module, s: Any) -> list[Any]:
    grads = [param.grad for param in model.parameters()]
    return copy.deepcopy(
        [
            *model.state_dict().values(),
            *grads,
            s.state_dict(),
            torch.get_rng_state(),
            torch.tensor(random.getstate()[1]),
            torch.tensor(np.random.get_state()[1].astype(np.int64)),  # type: ignore[union-attr]
            [module.training for module in model.modules()],
        ]
    )


def same(a: list[Any], b: list[Any]) -> bool:
    return all(torch.equal(x, y) if isinstance(x, torch.Tensor) else x == y for x, y in zip(a, b, strict=True))


def train(folder: Path, probed: Callable[[Any, nn.Module, int], None], *, origin: str) -> list[Any]:
    """Six steps with two micro-batches each; `probed` is called after the first backward of every step."""
    random.seed(1)
    np.random.seed(1)
    model = Restless()
    optimizer, s = torch.optim.AdamW(model.parameters()), scaler(growth_interval=2)
    losses = []
    with gradaudit.attach(model, optimizer, s, out=folder, every=2, origin=origin) as audit:
        for i in range(6):
            optimizer.zero_grad(set_to_none=i % 2 == 0)
            for k in range(2):
                with torch.autocast(DEVICE, dtype=torch.float16):
                    loss = model(batch(2 * i + k)).float().square().mean()
                probed(audit, model, k)
                s.scale(loss).backward()
                losses.append(loss.detach())
                probed(audit, model, 2)
            s.step(optimizer)
            s.update()
    return [*snapshot(model, s), *losses]


@pytest.mark.parametrize("origin", ["auto", "always"])
def test_training_with_probes_between_is_bit_identical(tmp_path: Path, origin: str) -> None:
    places, good = [], batch()
    bad = good * torch.nan

    def probed(audit: Any, model: nn.Module, place: int) -> None:
        places.append(place)
        # a forward that fails is traced on top
        assert audit.probe(loss_of(model, bad if place == 1 else good)).forward_finite is (place != 1)

    plain = train(tmp_path / "plain", lambda *_: None, origin=origin)
    assert same(plain, train(tmp_path / "probed", probed, origin=origin))
    assert len(places) == 24
    rows = [gradaudit.open_run(tmp_path / name).steps for name in NAMES]
    assert [len(steps) for steps in rows] == [6, 6]
    for column in ("loss", "scale", "num_micro_steps", "growth_tracker", "sampled", "traced"):
        assert np.array_equal(getattr(rows[0], column), getattr(rows[1], column)), column
    events = [[e["name"] for e in gradaudit.open_run(tmp_path / name).events()] for name in NAMES]
    assert events[0] == events[1]
    ops = [[(row.op, row.module, row.amax) for row in gradaudit.open_run(tmp_path / name).ops()] for name in NAMES]
    assert ops[0] == ops[1]


def test_gradients_are_the_same_objects_afterwards(tmp_path: Path) -> None:
    model = net()
    with gradaudit.attach(model, out=tmp_path / "run") as audit:
        loss_of(model)().backward()
        before = [(param.grad, param.grad.clone(), param.grad._version) for param in model.parameters()]
        audit.probe(loss_of(model))
        for param, (grad, value, version) in zip(model.parameters(), before, strict=True):
            assert param.grad is grad
            assert torch.equal(grad, value)
            assert grad._version == version


def test_in_a_region_of_autocast_the_weights_cached_there_stay(tmp_path: Path) -> None:
    def gradients(probed: bool) -> list[torch.Tensor]:
        model = net()
        with gradaudit.attach(model, out=tmp_path / str(probed)) as audit:
            with torch.autocast(DEVICE, dtype=torch.float16):
                loss = model(batch(0)).float().square().mean()
                if probed:
                    audit.probe(loss_of(model))
                loss = loss + model(batch(1)).float().square().mean()
            loss.backward()
            assert torch.is_autocast_cache_enabled()
        return [param.grad for param in model.parameters() if param.grad is not None]

    assert all(torch.equal(a, b) for a, b in zip(gradients(False), gradients(True), strict=True))


@pytest.mark.parametrize("what", ["optimizer.step", "scaler.step", "scaler.update"])
@pytest.mark.parametrize("swallow", [False, True])
def test_a_step_inside_the_closure_is_refused_and_everything_put_back(tmp_path: Path, what: str, swallow: bool) -> None:
    model = Restless()
    optimizer, s = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9), scaler()
    with gradaudit.attach(model, optimizer, s, out=tmp_path / "run") as audit:
        step(model, optimizer, s)
        before = snapshot(model, s)
        calls = {
            "optimizer.step": optimizer.step,
            "scaler.step": lambda: s.step(optimizer),
            "scaler.update": lambda: s.update(),
        }

        def closure() -> torch.Tensor:
            loss = loss_of(model)()
            s.scale(loss).backward(retain_graph=True)
            model.eval()
            try:
                calls[what]()
            except RuntimeError:
                if not swallow:
                    raise
            return loss

        with pytest.raises(RuntimeError, match=rf"The closure called {what}\(\); it must only run the forward"):
            audit.probe(closure)
        assert same(before, snapshot(model, s))
        step(model, optimizer, s)
    assert len(gradaudit.open_run(tmp_path / "run").steps) == 2


def test_what_the_closure_raises_reaches_the_user_after_everything_is_put_back(tmp_path: Path) -> None:
    model, s = Restless(), scaler()
    with gradaudit.attach(model, None, s, out=tmp_path / "run") as audit:
        step(model, torch.optim.SGD(model.parameters(), lr=0.1), s)
        before = snapshot(model, s)

        def closure() -> torch.Tensor:
            model.eval()
            s.scale(loss_of(model)())
            raise KeyError("no such batch")

        with pytest.raises(KeyError, match="no such batch"):
            audit.probe(closure)
        assert same(before, snapshot(model, s))


@pytest.mark.parametrize("returned", [None, 1.0, torch.ones(())])
def test_what_is_no_loss_is_refused(tmp_path: Path, returned: Any) -> None:
    with pytest.raises(ValueError, match="return the unscaled loss, before any"):
        probe(tmp_path / "run", net(), lambda: returned)


def test_after_the_recording_is_closed_a_probe_still_works(tmp_path: Path) -> None:
    model = net()
    with gradaudit.attach(model, out=tmp_path / "run") as audit:
        pass
    assert audit.probe(loss_of(model)).forward_finite


def test_a_second_model_s_parameters_are_put_back_too(tmp_path: Path) -> None:
    model, other = net(), nn.BatchNorm1d(2)
    with gradaudit.attach(model, out=tmp_path / "run") as audit:
        other(model(batch())).sum().backward()
        before = copy.deepcopy(list(other.state_dict().values()))
        audit.probe(lambda: other(model(batch())).square().mean())
        assert same(before, list(other.state_dict().values()))
