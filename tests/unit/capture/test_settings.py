"""How often histograms are taken, and of what."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch

import gradaudit
from gradaudit.capture import auditor
from gradaudit.capture.settings import BURST_STEPS, FREE_BURST_SAMPLES, CaptureSettings, Sampler
from tests.unit.capture.trainings import by_name, net, record, scaler, step


def sampled(sampler: Sampler, overflows: set[int], *, num_steps: int, num_optimizers: int = 1) -> list[int]:
    """Steps that are sampled when the given ones overflow; the first always is."""
    found = [0]
    for i in range(1, num_steps):
        if sampler.next(i, num_optimizers, overflowed=i - 1 in overflows):
            found.append(i)
    return found


def test_every_nth_step_is_sampled_and_so_is_the_first() -> None:
    assert sampled(Sampler(CaptureSettings(every=4)), set(), num_steps=13) == [0, 4, 8, 12]
    assert sampled(Sampler(CaptureSettings(every=1)), set(), num_steps=3) == [0, 1, 2]


def test_the_steps_after_an_overflow_are_sampled_as_well() -> None:
    assert BURST_STEPS == 2
    assert sampled(Sampler(CaptureSettings(every=10)), {3}, num_steps=12) == [0, 4, 5, 10]


def test_a_burst_is_as_long_where_a_regular_sample_falls_into_it() -> None:
    assert sampled(Sampler(CaptureSettings(every=10)), {9}, num_steps=15) == [0, 10, 11]
    assert sampled(Sampler(CaptureSettings(every=10)), {8}, num_steps=15) == [0, 9, 10]


def test_bursts_end_when_they_outnumber_the_regular_samples() -> None:
    overflows = set(range(10_000))
    found = sampled(Sampler(CaptureSettings(every=100)), overflows, num_steps=10_000)
    regular = 100
    assert len(found) <= regular + max(FREE_BURST_SAMPLES, regular) + 1


def test_the_steps_of_optimizers_that_take_turns_are_sampled_together() -> None:
    assert sampled(Sampler(CaptureSettings(every=3)), set(), num_steps=14, num_optimizers=2) == [0, 1, 6, 7, 12, 13]


def test_the_interval_grows_to_keep_the_budget_and_recovers() -> None:
    sampler = Sampler(CaptureSettings(every=2, budget=10.0))
    sampler.measured(0.020, 0.040, sampled=True)  # 20 ms for 20 ms of training: every tenth
    assert sampler.every == 10
    for _ in range(60):
        sampler.measured(0.001, 0.021, sampled=True)
    assert sampler.every == 2
    sampler.measured(0.5, 1.0, sampled=False)  # a step that was not sampled says nothing of the cost of sampling
    assert sampler.every == 2


@pytest.mark.parametrize("num_samples", [1, 50])
def test_the_average_cost_stays_under_the_budget(num_samples: int) -> None:
    sampler = Sampler(CaptureSettings(every=1, budget=5.0))
    for _ in range(num_samples):
        sampler.measured(0.008, 0.018, sampled=True)
    assert 0.008 / (sampler.every * 0.010) <= 0.05


def test_without_a_budget_the_interval_stays() -> None:
    sampler = Sampler(CaptureSettings(every=2))
    sampler.measured(1.0, 1.1, sampled=True)
    assert sampler.every == 2


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"every": 0}, "every is 0; it must be a whole number, 1 or more."),
        ({"every": -3}, "every is -3"),
        ({"every": 2.5}, "every is 2.5"),
        ({"budget": 0.0}, "budget is 0.0; it must be above 0 and at most 100"),
        ({"budget": 101}, "budget is 101"),
        ({"budget": math.nan}, "budget is nan"),
        ({"origin": "never"}, "origin is 'never'; it must be one of auto, always."),
    ],
)
def test_a_setting_out_of_range_is_refused_by_name_and_value(tmp_path: Path, options: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        gradaudit.attach(net(), out=tmp_path / "run", **options)
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({}, {"0", "1", "2", "Sequential", "0.weight", "0.bias", "2.weight", "2.bias", "loss"}),
        ({"include": "2*"}, {"2", "2.weight", "2.bias"}),
        ({"include": ["0", "*.bias"]}, {"0", "0.bias", "2.bias"}),
        ({"exclude": ["*.weight", "loss", "Sequential"]}, {"0", "1", "2", "0.bias", "2.bias"}),
        ({"include": ["2*"], "exclude": ["*.bias"]}, {"2", "2.weight"}),
    ],
)
def test_only_what_is_wanted_gets_histograms(tmp_path: Path, options: Any, expected: set[str]) -> None:
    model, s = net(), scaler()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    run = record(tmp_path / "run", lambda: step(model, optimizer, s), model=model, **options)
    assert {run.tensors()[i].fqn for i in run.samples().tensor} == expected
    # the every-step readings are of all parameters
    assert (run.steps.param_amax[0] > 0).all()
    assert len(by_name(run, "param_grad")) == 4


def test_an_overflow_is_followed_by_sampled_steps(tmp_path: Path) -> None:
    model, s = net(), scaler()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def train() -> None:
        for i in range(12):
            step(model, optimizer, s, poison=(0,) if i == 4 else ())

    run = record(tmp_path / "run", train, model=model, every=100)
    assert [int(i) for i in run.steps.step[run.steps.sampled]] == [0, 5, 6, 7]
    assert sorted(set(run.samples().step.tolist())) == [0, 5, 6, 7]


def test_the_settings_and_the_interval_in_force_are_written_down(tmp_path: Path) -> None:
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def train() -> None:
        for _ in range(4):  # the first, of which more is noted, is not measured
            step(model, optimizer)

    run = record(tmp_path / "run", train, model=model, every=3, budget=0.001, include="*")
    assert run.meta["settings"] == {
        "every": 3, "budget": 0.001, "include": ["*"], "exclude": [], "origin": "auto", "save_batch": False,
    }  # fmt: skip
    assert run.meta["cost"]["every"] > 3
    assert 0 < run.meta["cost"]["recording_s"] < run.meta["cost"]["wall_s"]


@pytest.mark.parametrize("device_tells", [True, False])
def test_an_overflow_that_only_the_device_knows_of_starts_a_burst_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, *, device_tells: bool
) -> None:
    if not device_tells:
        monkeypatch.setattr(auditor, "known_on_host", lambda found: False)
    model, s = net(), scaler()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def train() -> None:
        for i in range(8):
            step(model, optimizer, s, poison=(0,) if i == 2 else ())

    run = record(tmp_path / "run", train, model=model, every=100)
    assert [int(i) for i in run.steps.step[run.steps.sampled]] == [0, 3, 4, 5]
