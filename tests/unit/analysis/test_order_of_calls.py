"""Findings about the order of calls, on runs written by hand: numbers, limits of what is said, places."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from gradaudit.analysis.calls import NO_GRADIENTS, NO_SCALE
from gradaudit.analysis.checks.base import Skipped
from tests import factory
from tests.unit.analysis.logs import (
    BACKWARD,
    CYCLE,
    DIRECT,
    LOOKS,
    SCALE,
    STEP,
    UNSCALE,
    UPDATE,
    ZERO,
    Call,
    changed,
    clip,
    found,
    lines,
    log,
    looked,
    numbers,
    steps_at,
)

# step-bypasses-scaler


def test_direct_steps_on_scaled_gradients(tmp_path: Path) -> None:
    rows = steps_at(*[1.0] * 4, scaler=None, found_inf=None)
    rows[2]["nonfinite"] = [2]
    finding = found(tmp_path, "step-bypasses-scaler", log(*[(SCALE, BACKWARD, DIRECT)] * 4), steps=rows)
    assert lines(finding) == [("optimizer.step", 2), ("backward", 1)]
    assert numbers(finding) == {"num_direct_steps": 4, "num_nonfinite_applied": 1}


def test_gradients_divided_by_the_script_itself_are_not_scaled(tmp_path: Path) -> None:
    divided = changed(factor_min=2.0**-16, factor_max=2.0**-16)
    events = log(*[(SCALE, BACKWARD, divided, DIRECT)] * 3, (ZERO, BACKWARD, DIRECT))
    assert looked(tmp_path, "step-bypasses-scaler", events) == []


def test_only_some_of_them_divided_is_a_fault(tmp_path: Path) -> None:
    divided = changed(factor_min=2.0**-16, factor_max=1.0)
    rows = steps_at(*[1.0] * 3, scaler=None, found_inf=None, update=None)
    finding = found(tmp_path, "step-bypasses-scaler", log(*[(SCALE, BACKWARD, divided, DIRECT)] * 3), steps=rows)
    assert "2^16" in finding.summary


def test_clipping_past_the_scaler_is_a_fault_of_its_own(tmp_path: Path) -> None:
    rows = steps_at(*[1.0] * 3, scaler=None, found_inf=None, update=None)
    events = log(*[(SCALE, BACKWARD, clip(1.0), DIRECT)] * 3)
    assert found(tmp_path / "step", "step-bypasses-scaler", events, steps=rows).steps == (0, 2)
    assert numbers(found(tmp_path, "clip-before-unscale", events, steps=rows))["scale"] == 65536


def test_a_direct_step_after_unscale_is_a_fault_where_it_applies_inf(tmp_path: Path) -> None:
    events = log(*[(ZERO, BACKWARD, UNSCALE, DIRECT, UPDATE)] * 3)
    fine = steps_at(*[2.0**16] * 3, found_inf=None)
    assert looked(tmp_path / "fine", "step-bypasses-scaler", events, steps=fine) == []
    fine[1]["nonfinite"] = [2]
    finding = found(tmp_path, "step-bypasses-scaler", events, steps=fine)
    assert finding.steps == (1, 1)


def scaled_by_hand(factor: float, divided: float) -> list[dict[str, Any]]:
    loss: Call = ("backward", {"scaled": False, "scaler": None, "detail": {"factor": factor}})
    change: Call = (
        "gradients.changed",
        {"scaled": False, "scaler": None, **changed(factor_min=divided, factor_max=divided)[1]},
    )
    return log(*[(ZERO, loss, change, ("optimizer.step", {"scaler": None, "scaled": False}))] * 3)


def test_a_scale_by_hand_with_nobody_looking_for_inf(tmp_path: Path) -> None:
    rows = steps_at(*[1.0] * 3, scaler=None, found_inf=None, update=None)
    by_hand = scaled_by_hand(4096.0, 1 / 4096)
    assert isinstance(looked(tmp_path / "fine", "step-bypasses-scaler", by_hand, steps=rows, scalers=[]), Skipped)
    rows[1]["nonfinite"] = [2]
    finding = found(tmp_path, "step-bypasses-scaler", by_hand, steps=rows, scalers=[])
    assert (finding.steps, finding.title) == ((1, 1), "Non-finite gradients are applied: nobody looks for inf")
    a_weight = scaled_by_hand(100.0, 0.5)
    assert isinstance(looked(tmp_path / "other", "step-bypasses-scaler", a_weight, steps=rows, scalers=[]), Skipped)


def test_a_second_step(tmp_path: Path) -> None:
    finding = found(tmp_path, "step-bypasses-scaler", log(*[(ZERO, BACKWARD, STEP, DIRECT, UPDATE)] * 3))
    assert "Remove optimizer.step()" in finding.remedy


# unscaled-backward


PLAIN: Call = ("backward", {"scaled": False, "scaler": None})


def test_a_plain_backward(tmp_path: Path) -> None:
    finding = found(tmp_path, "unscaled-backward", log(*[(ZERO, SCALE, PLAIN, STEP, UPDATE)] * 3))
    assert lines(finding) == [("backward", 2), ("scaler.scale", 1), ("scaler.step", 3)]
    assert "did not run on its result" in finding.summary


def test_a_scaler_that_never_scaled(tmp_path: Path) -> None:
    refused: Call = ("scaler.step", {"raised": f"AssertionError: Attempted step but {NO_SCALE}."})
    finding = found(tmp_path, "unscaled-backward", log((ZERO, PLAIN, refused)))
    assert NO_SCALE in finding.summary


def test_a_loss_scaled_by_hand(tmp_path: Path) -> None:
    by_the_scale: Call = ("backward", {"scaled": False, "scaler": None, "detail": {"factor": 65536.0}})
    assert looked(tmp_path, "unscaled-backward", log(*[(ZERO, by_the_scale, STEP, UPDATE)] * 3)) == []
    by_another: Call = ("backward", {"scaled": False, "scaler": None, "detail": {"factor": 1024.0}})
    found(tmp_path / "other", "unscaled-backward", log(*[(ZERO, by_another, STEP, UPDATE)] * 3))


# update-inside-accumulation, hysteresis-growth-bug


def two_losses(num: int) -> list[dict[str, Any]]:
    one, other = {"optimizer": 0, "optimizers": [0]}, {"optimizer": 1, "optimizers": [1]}
    rows = log(*[(("optimizer.zero_grad", one), ("optimizer.zero_grad", other), ("backward", one), ("backward", other),
                  ("scaler.step", one), UPDATE, ("scaler.step", other), UPDATE)] * num)  # fmt: skip
    for row in rows:  # two steps per iteration
        row["step"] = 2 * row["step"] + (row["line"] > 4)
    return rows


def test_an_update_between_two_steps_that_share_a_backward(tmp_path: Path) -> None:
    same = steps_at(*[2.0**16] * 8)
    harmless = found(tmp_path / "same", "update-inside-accumulation", two_losses(4), steps=same)
    assert (harmless.confidence, harmless.severity) == ("medium", "error")
    moved = steps_at(*[2.0**16] * 3, *[2.0**17] * 5)
    for row in (*same, *moved):
        row["optimizer"] = row["step"] % 2
    finding = found(tmp_path, "update-inside-accumulation", two_losses(4), steps=moved)
    assert finding.confidence == "high"
    assert "scaled by 2^16, they are divided by 2^17" in finding.summary
    assert lines(finding) == [("scaler.update", 5), ("scaler.step", 6)]


def test_unscale_inside_accumulation(tmp_path: Path) -> None:
    events = log(*[(ZERO, BACKWARD, UNSCALE, BACKWARD, STEP, UPDATE)] * 3)
    finding = found(tmp_path, "update-inside-accumulation", events)
    assert lines(finding) == [("backward", 3), ("scaler.unscale_", 2)]


def test_an_update_before_every_division(tmp_path: Path) -> None:
    events = log(*[(ZERO, BACKWARD, UPDATE, STEP)] * 4)
    grown = steps_at(2.0**16, 2.0**16, 2.0**17, 2.0**17)
    assert looked(tmp_path / "held", "hysteresis-growth-bug", events, steps=steps_at(*[2.0**16] * 4)) == []
    finding = found(tmp_path, "hysteresis-growth-bug", events, steps=grown)
    assert (finding.severity, numbers(finding)) == ("info", {"num_steps": 1, "scale_ratio": 2.0})
    assert looked(tmp_path / "other", "update-inside-accumulation", events, steps=grown) == []


def test_a_scaler_of_the_scripts_own_that_divides_by_the_next_scale(tmp_path: Path) -> None:
    scales = [256.0, 256.0, 512.0, 512.0]

    def events(divided: Sequence[float]) -> list[dict[str, Any]]:
        iterations = []
        for scale, by in zip(scales, divided, strict=True):
            loss: Call = ("backward", {"scaled": False, "scaler": None, "detail": {"factor": scale}})
            iterations.append((ZERO, loss, changed(factor_min=1 / by, factor_max=1 / by), DIRECT))
        return log(*iterations)

    assert looked(tmp_path / "right", "hysteresis-growth-bug", events(scales)) == []
    finding = found(tmp_path, "hysteresis-growth-bug", events([256.0, 512.0, 512.0, 512.0]))
    assert finding.steps == (1, 1)


# scalers


def made(scaler: int, step: int) -> Call:
    return "GradScaler", {"scaler": scaler, "step": step, "optimizer": None}


def with_scaler(scaler: int) -> tuple[Call, ...]:
    return tuple((name, {**more, "scaler": scaler}) for name, more in CYCLE)


def test_a_scaler_for_every_epoch(tmp_path: Path) -> None:
    events = log(
        (made(0, 0), *with_scaler(0)), with_scaler(0), (made(1, 2), *with_scaler(1)), (made(2, 3), *with_scaler(2))
    )
    rows = steps_at(*[2.0**16] * 4)
    for row, scaler in zip(rows, (0, 0, 1, 2), strict=True):
        row |= {"scaler": scaler, "found_inf": scaler > 0, "skipped": scaler > 0}
    meta = {"scalers": [factory.scaler(id=i) for i in range(3)]}
    finding = found(tmp_path, "scaler-recreated", events, steps=rows, **meta)
    assert numbers(finding) == {"num_scalers": 3, "num_overflows": 2}
    assert [place.name for place in finding.where if place.type == "call_site"] == ["GradScaler"]
    assert looked(tmp_path / "other", "several-scalers", events, steps=rows, **meta) == []


def test_scalers_made_before_or_loaded_are_no_new_ones(tmp_path: Path) -> None:
    before = log((made(0, 0), made(1, 0), *with_scaler(0)), with_scaler(1))
    assert looked(tmp_path, "scaler-recreated", before) == []
    load: Call = ("scaler.load_state_dict", {"scaler": 1})
    loaded = log((made(0, 0), *with_scaler(0)), (made(1, 1), load, *with_scaler(1)))
    assert looked(tmp_path / "loaded", "scaler-recreated", loaded) == []


def test_scalers_that_take_turns(tmp_path: Path) -> None:
    events = log(*[with_scaler(i % 2) for i in range(6)])
    finding = found(tmp_path, "several-scalers", events)
    assert "take turns" in finding.summary
    assert finding.severity == "warning"


def test_a_loss_scaled_by_another_scaler(tmp_path: Path) -> None:
    other: Call = ("scaler.step", {"scaler": 1})
    finding = found(tmp_path, "several-scalers", log(*[(ZERO, BACKWARD, other, UPDATE)] * 3))
    assert lines(finding) == [("scaler.step", 2), ("backward", 1)]


# optimizer-without-gradients


@pytest.mark.parametrize(
    ("said", "words"),
    [
        ({"num_params": 2, "num_frozen": 2, "num_unowned": 0, "modules_run": 1, "modules_not_run": []}, "frozen"),
        ({"num_params": 2, "num_frozen": 0, "num_unowned": 2, "modules_run": 0, "modules_not_run": []}, "copied"),
        ({"num_params": 2, "num_frozen": 0, "num_unowned": 0, "modules_run": 0, "modules_not_run": ["g"]}, "never ran"),
        ({"num_params": 2, "num_frozen": 0, "num_unowned": 0, "modules_run": 1, "modules_not_run": []}, "detach"),
    ],
)
def test_why_there_is_no_gradient(tmp_path: Path, said: dict[str, Any], words: str) -> None:
    refused: Call = ("scaler.step", {"raised": f"AssertionError: {NO_GRADIENTS}.", "detail": said})
    finding = found(tmp_path, "optimizer-without-gradients", log((ZERO, ("backward", {"optimizers": []}), refused)))
    assert words in finding.summary
    assert "hidden.weight" in finding.summary
    assert lines(finding) == [("scaler.step", 2), ("backward", 1)]


def test_other_reasons_for_no_gradient(tmp_path: Path) -> None:
    refused: Call = ("scaler.step", {"raised": f"AssertionError: {NO_GRADIENTS}."})
    cleared = found(tmp_path / "a", "optimizer-without-gradients", log((BACKWARD, ZERO, refused)))
    assert "zero_grad was called between" in cleared.summary
    constant: Call = ("backward", {"optimizers": [], "detail": {"no_grad_fn": True}})
    assert "no graph" in found(tmp_path / "b", "optimizer-without-gradients", log((ZERO, constant, refused))).summary
    assert "no backward" in found(tmp_path / "c", "optimizer-without-gradients", log((refused,))).summary


# never-applied, scheduler-ahead, scaled-gradient-penalty


def skipping(scales: Sequence[float]) -> list[dict[str, Any]]:
    return [factory.step(i, scale=s, found_inf=True, skipped=True, param_amax=[float("inf")], nonfinite=[2])
            for i, s in enumerate(scales)]  # fmt: skip


def test_an_optimizer_that_never_steps(tmp_path: Path) -> None:
    finding = found(tmp_path, "never-applied", log(CYCLE), steps=skipping([2.0 ** (16 - i) for i in range(25)]))
    assert finding.steps == (0, 24)
    assert "hidden.weight" in finding.summary


def test_a_scale_that_hardly_falls_searches_for_nothing(tmp_path: Path) -> None:
    found(tmp_path, "never-applied", log(CYCLE), steps=skipping([2.0**24 - i for i in range(25)]))


@pytest.mark.parametrize(
    "rows",
    [
        skipping([2.0 ** (16 - i) for i in range(19)]),
        skipping([2.0 ** (40 - i) for i in range(30)]),
        [*skipping([2.0 ** (16 - i) for i in range(25)]), factory.step(25, param_amax=[1.0])],
    ],
    ids=["too few", "still searching", "one was applied"],
)
def test_starts_are_no_failure(tmp_path: Path, rows: list[dict[str, Any]]) -> None:
    assert looked(tmp_path, "never-applied", log(CYCLE), steps=rows) == []


SCHEDULE: Call = ("lr_scheduler.step", {})


def scheduled(num_skipped: int, num: int = 40) -> dict[str, Any]:
    rows = steps_at(*[2.0**16] * num)
    for row in rows[:num_skipped]:
        row |= {"found_inf": True, "skipped": True}
    return {"steps": rows}


def after_each_step(num: int = 40) -> list[dict[str, Any]]:
    rows = log(*[(*CYCLE, SCHEDULE)] * num)
    for row in rows:
        row["step"] += row["name"] in ("scaler.update", "lr_scheduler.step")
    return rows


def test_a_schedule_on_skipped_steps(tmp_path: Path) -> None:
    finding = found(tmp_path, "scheduler-ahead", after_each_step(), **scheduled(8))
    assert numbers(finding) == {"num_ahead": 8, "ahead_share": 0.2}
    assert finding.steps == (0, 7)


@pytest.mark.parametrize(("num_skipped", "num"), [(4, 40), (5, 60)])
def test_a_few_skipped_steps_do_not_matter(tmp_path: Path, num_skipped: int, num: int) -> None:
    assert looked(tmp_path, "scheduler-ahead", after_each_step(num), **scheduled(num_skipped, num)) == []


def test_a_schedule_per_epoch_hardly_notices(tmp_path: Path) -> None:
    epochs = [(*CYCLE, *([SCHEDULE] if i % 5 == 4 else [])) for i in range(40)]
    assert looked(tmp_path, "scheduler-ahead", log(*epochs), **scheduled(4)) == []


@pytest.mark.parametrize(("unscaled", "scale", "count"), [(False, 2.0**16, 1), (True, 2.0**16, 0), (False, 1.0, 0)])
def test_a_penalty_of_scaled_gradients(tmp_path: Path, unscaled: bool, scale: float, count: int) -> None:
    grad: Call = ("autograd.grad", {"detail": {"create_graph": True}})
    penalty: Call = ("penalty", {"detail": {"unscaled": unscaled}})
    events = log(*[(ZERO, grad, penalty, BACKWARD, STEP, UPDATE)] * 3)
    outcome = looked(tmp_path, "scaled-gradient-penalty", events, steps=steps_at(*[scale] * 3))
    assert not isinstance(outcome, Skipped)
    assert [lines(finding) for finding in outcome] == [[("autograd.grad", 1), ("penalty", 2)]] * count


@pytest.mark.parametrize("name", sorted(LOOKS))
def test_without_a_scaler_there_is_nothing_to_look_at(tmp_path: Path, name: str) -> None:
    plain = (ZERO, ("backward", {"scaled": False, "scaler": None}), DIRECT)
    steps = steps_at(*[1.0] * 3, scaler=None, found_inf=None, update=None)
    assert isinstance(looked(tmp_path, name, log(*[plain] * 3), steps=steps, scalers=[]), Skipped)


def test_a_log_that_refers_to_steps_not_on_record(tmp_path: Path) -> None:
    refused: Call = ("scaler.step", {"raised": f"AssertionError: {NO_GRADIENTS}.", "file": None})
    assert found(
        tmp_path, "optimizer-without-gradients", log(CYCLE, CYCLE, (ZERO, refused)), steps=steps_at(1.0)
    ).steps == (0, 0)
