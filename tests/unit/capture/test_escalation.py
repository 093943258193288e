"""When the forward is traced: never in a healthy run, after a fault until it is caught, then more and more rarely."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import gradaudit
from gradaudit.capture.host_copy import HostCopy
from gradaudit.capture.recorder import Packet
from gradaudit.capture.trace import escalation
from gradaudit.capture.trace.escalation import Escalation, Judge
from tests.factory import step as row_of
from tests.unit.capture.trainings import batch, net, record, scaler, step


def packet(i: int, *, on_host: bool = True, armed: bool = False, **row: Any) -> Packet:
    """A step as the recorder gets it; its only values are scale, found_inf and loss."""
    finished = row_of(i, **row)
    values = [finished["scale"], float(finished["found_inf"]), 1.0 if finished["loss_finite"] else torch.nan]
    copy = HostCopy(torch.tensor(values, dtype=torch.float64))
    copy.on_host = on_host
    return Packet(i, finished["scaler"], [copy], slice(1, 2), lambda _: finished, None, ops=None, armed=armed)


def armed_steps(steps: list[dict[str, Any]], *, num_optimizers: int = 1, init_scale: float = 65536.0) -> list[int]:
    """Which steps are traced. A step with `seen` shows its fault only where it is traced."""
    decides = Escalation(always=False, initial=lambda _: (init_scale, 0.5))
    found = []
    for i, row in enumerate(steps):
        if decides.armed:
            found.append(i)
        decides.closed(
            packet(i, armed=decides.armed, **row), held_back=False, saw_fault=False, num_optimizers=num_optimizers
        )
    return found


CLEAN: dict[str, Any] = {}
BAD_LOSS: dict[str, Any] = {"loss_finite": False, "found_inf": True, "skipped": True}


def skipped(scale: float) -> dict[str, Any]:
    return {"scale": scale, "found_inf": True, "skipped": True}


def test_a_healthy_run_is_not_traced() -> None:
    assert armed_steps([CLEAN] * 100) == []


def test_a_scale_that_comes_down_from_its_initial_value_is_not_a_fault() -> None:
    coming_down = [skipped(2.0**k) for k in range(24, 9, -1)]
    assert armed_steps([*coming_down, *[{"scale": 512.0}] * 10]) == []


def test_a_scale_that_comes_down_too_far_is_one() -> None:
    assert armed_steps([skipped(2.0**k) for k in range(10, 5, -1)])[:1] == [3]


def test_overflows_of_a_scale_that_grew_too_far_are_not_faults() -> None:
    hunting = [*[{"scale": 1024.0}] * 5, skipped(2048.0)] * 4
    assert armed_steps(hunting) == []
    late = [*[{"scale": 1024.0}] * 5, *[{"scale": 2048.0}] * 3, skipped(2048.0), *[{"scale": 1024.0}] * 5]
    assert armed_steps(late) == []


def test_an_overflow_at_a_scale_that_had_been_fine_for_long_is_one() -> None:
    course = [*[{"scale": 512.0}] * 5, *[{"scale": 1024.0}] * 5, skipped(1024.0), *[skipped(512.0)], *[CLEAN] * 3]
    assert armed_steps(course)[:1] == [12]


@pytest.mark.parametrize(
    "fault",
    [
        BAD_LOSS,
        {"input_finite": False},
        {"scaled_loss_finite": False, "found_inf": True, "skipped": True},
        {"nonfinite": [3], "param_amax": [np.inf], "scaler": None},
        {"loss_finite": False, "scaler": None},
    ],
)
def test_every_other_fault_is_traced_for_three_steps_even_the_first(fault: dict[str, Any]) -> None:
    if "loss_finite" not in fault:  # the host looks closer only where a value is not finite
        fault = {**fault, "found_inf": True}
    assert armed_steps([fault, *[CLEAN] * 6]) == [1, 2, 3]
    assert armed_steps([*[CLEAN] * 4, fault, *[CLEAN] * 6], num_optimizers=2) == [5, 6, 7, 8, 9, 10]


def test_tracing_ends_when_a_traced_step_shows_the_fault() -> None:
    assert armed_steps([BAD_LOSS] * 10) == [1]


def test_a_fault_that_came_twice_uncaught_is_waited_for() -> None:
    course = [BAD_LOSS, *[CLEAN] * 9, BAD_LOSS, *[CLEAN] * 30, BAD_LOSS, *[CLEAN] * 5]
    assert armed_steps(course) == [1, 2, 3, *range(11, 42)]


def test_the_wait_has_an_end() -> None:
    course = [BAD_LOSS, *[CLEAN] * 9, BAD_LOSS, *[CLEAN] * 1000]
    assert len(armed_steps(course)) == escalation.MAX_TRACED


def test_what_was_caught_is_traced_again_more_and_more_rarely_and_eight_times_at_most() -> None:
    traced = armed_steps([BAD_LOSS] * 5000)
    assert traced[:4] == [1, 12, 33, 74]
    assert len(traced) == escalation.MAX_CATCHES


def test_numbers_that_arrive_late_from_a_device_count_as_well() -> None:
    decides = Escalation(always=False, initial=lambda _: (65536.0, 0.5))
    late = packet(0, on_host=False, **BAD_LOSS)
    assert not decides.closed(late, held_back=False, saw_fault=False, num_optimizers=1)
    decides.finished(late, late.row())  # in the writer thread
    assert decides.closed(packet(1, on_host=False), held_back=False, saw_fault=False, num_optimizers=1)


def test_a_step_that_the_scaler_held_back_twice_in_a_row_is_a_fault_before_its_numbers_arrive() -> None:
    decides = Escalation(always=False, initial=lambda _: (1024.0, 0.5))

    def closed(i: int, *, held_back: bool) -> bool:
        return decides.closed(packet(i, on_host=False), held_back=held_back, saw_fault=False, num_optimizers=1)

    assert not any(closed(i, held_back=True) for i in range(2))  # 1024, 512: the start
    assert not closed(2, held_back=False)
    assert not closed(3, held_back=True)
    assert not closed(4, held_back=False)
    assert not closed(5, held_back=True)
    assert closed(6, held_back=True)


def test_a_judge_forgets_what_was_proven_once_it_no_longer_holds() -> None:
    judge = Judge()
    for scale in (256.0, 256.0, 512.0, 512.0):
        judge.was_clean(0, scale)
    assert judge.is_fault(row_of(4, **skipped(256.0)))
    judge.was_clean(0, 128.0)
    judge.was_clean(0, 256.0)
    assert not judge.is_fault(row_of(7, **skipped(256.0)))


# whole trainings


@pytest.mark.filterwarnings("error")
def test_infinities_of_both_signs_are_looked_at_without_a_warning(tmp_path: Path) -> None:
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)

    def train() -> None:
        for sign in (1.0, -1.0):
            model(batch()).mul(sign * torch.inf).mean().backward()
        optimizer.step()

    run = record(tmp_path / "run", train, model=model)
    assert run.steps.loss_finite.tolist() == [0]


def test_a_run_whose_loss_breaks_is_traced_from_the_next_step_on(tmp_path: Path) -> None:
    model, s = net(), scaler()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def train() -> None:
        for i in range(8):
            if i == 3:
                with torch.no_grad():
                    model[2].weight.fill_(6e4)  # type: ignore[union-attr]
            step(model, optimizer, s, i=i)

    run = record(tmp_path / "run", train, model=model, every=100)
    assert run.steps.traced.tolist() == [0, 0, 0, 0, 1, 0, 0, 0]
    assert {op.step for op in run.ops()} == {0, 4}


def test_an_output_that_is_not_finite_is_traced_though_the_loss_is(tmp_path: Path) -> None:
    class Hides(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.last = nn.Linear(8, 8), nn.Linear(8, 2)
            self.factor = 1.0

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.last(1.0 / (2.0 + (self.first(x) * self.factor).detach().square()))  # type: ignore[no-any-return]

    model = Hides()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def train() -> None:
        for i in range(8):
            model.factor = 1.0 if i < 3 else 1e5
            step(model, optimizer, i=i)

    run = record(tmp_path / "run", train, model=model, every=4)
    assert run.steps.loss_finite.tolist() == [1] * 8
    assert run.steps.traced.tolist() == [0] * 8  # the bad value is inside the module, and no output of one
    model.register_module("passes", nn.Identity())
    model.forward = lambda x: model.last(1 / (2 + model.passes(model.first(x) * model.factor).detach().square()))  # type: ignore[method-assign]
    run = record(tmp_path / "again", train, model=model, every=4)
    assert run.steps.traced.tolist() == [0, 0, 0, 0, 0, 1, 0, 0]


def test_under_a_compiled_model_module_outputs_are_all_there_is(tmp_path: Path) -> None:
    model = nn.Sequential(nn.Linear(8, 8), torch.compile(nn.Linear(8, 2), backend="eager"))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def train() -> None:
        for i in range(4):
            if i == 1:
                with torch.no_grad():
                    model[0].weight.fill_(torch.nan)  # type: ignore[union-attr]
            step(model, optimizer, i=i)

    run = record(tmp_path / "run", train, model=model, every=100)
    assert run.steps.traced.tolist() == [0] * 4
    assert run.ops() == ()
    assert run.steps.sampled.tolist() == [1, 0, 1, 0]


def test_always_traces_every_step(tmp_path: Path) -> None:
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with gradaudit.attach(model, optimizer, out=tmp_path / "run", origin="always", every=100):
        for i in range(4):
            optimizer.zero_grad()
            for _ in range(2):
                model(batch(i)).square().mean().backward()
            optimizer.step()
    run = gradaudit.open_run(tmp_path / "run")
    assert run.steps.traced.tolist() == [1] * 4
    assert run.steps.sampled.tolist() == [1] * 4
    assert {(op.step, op.micro_step) for op in run.ops()} == {(i, k) for i in range(4) for k in (0, 1)}
