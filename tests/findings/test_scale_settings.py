"""Scales that grow for nothing, cannot grow, are held, or were forgotten at a checkpoint."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import nn

import gradaudit
from gradaudit.analysis.report import AuditReport
from tests.findings.conftest import Script
from tests.findings.training import (
    alarming,
    assert_healthy,
    assert_sound,
    classification,
    convnet,
    copying,
    dynamic,
    encoder,
    evidence,
    first_token,
    fit,
    informing,
    mlp,
    picture_classification,
    places,
    recurrent,
    the,
    times,
)

Audited = Callable[[Script], AuditReport]


# runaway


def loss_is_multiplied_by_zero(path: Path) -> AuditReport:
    def loss(model: nn.Module, step: int) -> torch.Tensor:
        return classification(model, step) * 0.0

    return fit(path, mlp(), loss, scaler=dynamic(growth_interval=5), steps=60)


def all_units_are_dead(path: Path) -> AuditReport:
    """A constant through a dead ReLU: the graph is whole and every gradient is exactly zero."""
    model = nn.Sequential(mlp(1), nn.ReLU())
    with torch.no_grad():
        model[0][-1].bias.fill_(-1e3)
    return fit(path, model, lambda m, step: m(torch.ones(8, 32)).float().mean(), scaler=dynamic(growth_interval=1))


def the_gradient_stops_half_way_through_the_run(path: Path) -> AuditReport:
    return fit(path, encoder(), lambda m, step: copying(m, step) * float(step < 30), scaler=dynamic(growth_interval=4))


@pytest.mark.parametrize(
    "script", [loss_is_multiplied_by_zero, all_units_are_dead, the_gradient_stops_half_way_through_the_run]
)
def test_a_scale_that_grows_because_all_gradients_are_zero_runs_away(script: Script, audited: Audited) -> None:
    report = audited(script)

    assert_sound(report)
    assert alarming(report).pop("scale-runaway") == "warning"
    assert set(alarming(report)) <= {"scale-runaway", "layer-without-gradient"}
    finding = the(report, "scale-runaway")
    assert finding.scale_can_fix == "partly"
    assert evidence(finding)["num_growths"] >= 3
    assert evidence(finding)["zero_gradient_frac"] > 0.9
    assert evidence(finding)["scale"] > 2.0**16


def long_climb_from_2_to_the_8(path: Path) -> AuditReport:
    return fit(path, mlp(), scaler=dynamic(init_scale=256.0, growth_interval=8), steps=120, every=4)


def long_climb_of_a_recurrent_net(path: Path) -> AuditReport:
    return fit(path, recurrent(), first_token, scaler=dynamic(init_scale=2.0**10, growth_interval=10), steps=120)


@pytest.mark.parametrize("script", [long_climb_from_2_to_the_8, long_climb_of_a_recurrent_net])
def test_a_long_climb_with_live_gradients_is_healthy(script: Script, audited: Audited) -> None:
    report = audited(script)

    assert report.run.scale_last is not None
    assert report.run.scale_first is not None
    assert report.run.scale_last >= 128 * report.run.scale_first
    assert_healthy(report)
    assert informing(report) == {"scale-hunting"}, "only the scale has brought them near the limit"


# never grew


def starts_at_one_and_the_run_is_short(path: Path) -> AuditReport:
    optimizer = torch.optim.SGD((model := mlp(5)).parameters(), lr=100.0)
    return fit(
        path, model, times(classification, 1 / 2000), scaler=dynamic(init_scale=1.0), optimizer=optimizer, steps=80
    )


def fell_in_a_burst_and_cannot_come_back(path: Path) -> AuditReport:
    def loss(model: nn.Module, step: int) -> torch.Tensor:
        return classification(model, step) * (1e-4 if step > 12 else float("nan"))

    return fit(path, mlp(3), loss, scaler=dynamic(init_scale=2.0**14), steps=120)


def convolutions_start_at_four_with_an_interval_of_500(path: Path) -> AuditReport:
    def loss(model: nn.Module, step: int) -> torch.Tensor:
        return picture_classification(model, step) * 1e-3

    return fit(path, convnet(), loss, scaler=dynamic(init_scale=4.0, growth_interval=500), steps=70)


@pytest.mark.parametrize(
    "script",
    [
        starts_at_one_and_the_run_is_short,
        fell_in_a_burst_and_cannot_come_back,
        convolutions_start_at_four_with_an_interval_of_500,
    ],
)
def test_an_interval_longer_than_the_run_is_told_where_a_larger_scale_is_needed(
    script: Script, audited: Audited
) -> None:
    report = audited(script)

    assert_sound(report)
    found = alarming(report)
    if script is fell_in_a_burst_and_cannot_come_back:
        assert found.pop("forward-overflow") == "error", "the NaN that is born in the loss"
    assert found == {"gradient-underflow": "warning", "scale-never-grew": "warning"}
    finding = the(report, "scale-never-grew")
    assert finding.scale_can_fix == "yes"
    numbers = evidence(finding)
    assert numbers["scale"] == report.run.scale_last
    assert 50 <= numbers["num_clean_updates"] <= report.run.num_applied
    (scale,) = [item for item in finding.evidence if item.name == "scale"]
    assert scale.threshold is not None
    assert scale.threshold > scale.value
    assert report.recommendation is not None
    assert report.recommendation.change_needed
    assert report.recommendation.init_scale >= scale.threshold
    assert report.recommendation.growth_interval < 500
    assert report.recommendation.predicted.min_sqnr_db >= 40 > report.recommendation.current.min_sqnr_db


def test_a_short_run_whose_scale_is_large_enough_need_not_grow(tmp_path: Path) -> None:
    report = fit(tmp_path / "run", mlp(), scaler=dynamic(), steps=60)

    assert_healthy(report)
    assert informing(report) <= {"gradient-headroom-low"}


# static


def held_too_high_by_hand(path: Path) -> AuditReport:
    scaler = dynamic(init_scale=2.0**22)
    return fit(path, encoder(), copying, scaler=scaler, steps=60, update=lambda: scaler.update(2.0**22))


def factors_of_one(path: Path) -> AuditReport:
    """The constructor refuses them, the setters do not."""
    scaler = dynamic(init_scale=2.0**24)
    scaler.set_growth_factor(1.0)
    scaler.set_backoff_factor(1.0)
    return fit(path, mlp(), scaler=scaler, steps=60)


def floor_above_everything(path: Path) -> AuditReport:
    scaler = dynamic(init_scale=2.0**26)

    def after(step: int) -> None:
        scaler.update(max(scaler.get_scale(), 2.0**23))

    return fit(path, convnet(), picture_classification, scaler=scaler, steps=60, after=after)


@pytest.mark.parametrize("script", [held_too_high_by_hand, factors_of_one, floor_above_everything])
def test_a_held_scale_that_overflows_is_unsafe(script: Script, audited: Audited) -> None:
    report = audited(script)

    assert_sound(report)
    found = alarming(report)
    assert found.pop("never-applied", "error") == "error", "where no step at all gets through"
    assert found == {"static-scale-unsafe": "warning", "gradient-overflow": "warning"}
    finding = the(report, "static-scale-unsafe")
    assert finding.scale_can_fix == "yes"
    assert evidence(finding)["scale"] == report.run.scale_last
    assert evidence(finding)["num_overflows"] >= 10
    assert report.recommendation is not None
    assert report.recommendation.change_needed
    assert report.recommendation.init_scale < evidence(finding)["scale"]
    assert report.recommendation.precision == "fp16"


def held_too_low_by_an_endless_interval(path: Path) -> AuditReport:
    optimizer = torch.optim.SGD((model := mlp(5)).parameters(), lr=100.0)
    scaler = dynamic(init_scale=4.0, growth_interval=2**31 - 1)
    return fit(path, model, times(classification, 1 / 2000), scaler=scaler, optimizer=optimizer, steps=60)


def held_too_low_by_hand(path: Path) -> AuditReport:
    scaler = dynamic(init_scale=2.0)

    def loss(model: nn.Module, step: int) -> torch.Tensor:
        return first_token(model, step) * 1e-4

    return fit(path, recurrent(), loss, scaler=scaler, steps=60, update=lambda: scaler.update(2.0))


@pytest.mark.parametrize("script", [held_too_low_by_an_endless_interval, held_too_low_by_hand])
def test_a_held_scale_under_which_gradients_vanish_is_unsafe(script: Script, audited: Audited) -> None:
    report = audited(script)

    assert_sound(report)
    assert alarming(report) == {"static-scale-unsafe": "warning", "gradient-underflow": "warning"}
    assert evidence(the(report, "static-scale-unsafe"))["num_overflows"] == 0
    assert report.recommendation is not None
    assert report.recommendation.init_scale > 4.0


# resume


def checkpoint(scaler: torch.amp.GradScaler, steps: int = 15) -> dict[str, object]:
    """A short run, not recorded, and what a script saves of it."""
    model = mlp()
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
    for step in range(steps):
        optimizer.zero_grad()
        with torch.autocast("cpu", dtype=torch.float16):
            loss = classification(model, step)
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
    return {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "scaler": scaler.state_dict()}


def resumed(path: Path, *, with_scaler: bool, init_scale: float = 2.0**24) -> AuditReport:
    saved = checkpoint(dynamic(init_scale=init_scale))
    model, scaler = mlp(seed=1), dynamic(init_scale=init_scale)
    model.load_state_dict(saved["model"])
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
    optimizer.load_state_dict(saved["optimizer"])
    if with_scaler:
        scaler.load_state_dict(saved["scaler"])
    return fit(path, model, scaler=scaler, optimizer=optimizer, steps=40)


def test_resuming_the_optimizer_without_the_scaler_is_told(tmp_path: Path) -> None:
    report = resumed(tmp_path / "run", with_scaler=False)

    assert_sound(report)
    assert alarming(report) == {"resume-reset-scale": "warning"}
    finding = the(report, "resume-reset-scale")
    assert finding.scale_can_fix == "partly"
    assert places(finding) == {"AdamW"}
    assert evidence(finding)["scale"] == 2.0**24
    assert 3 <= evidence(finding)["num_overflows"] <= report.run.num_skipped
    assert "load_state_dict" in finding.remedy


def test_it_is_told_even_where_no_step_was_lost(tmp_path: Path) -> None:
    report = resumed(tmp_path / "run", with_scaler=False, init_scale=2.0**12)

    assert alarming(report) == {"resume-reset-scale": "warning"}
    assert evidence(the(report, "resume-reset-scale"))["num_overflows"] == 0


@pytest.mark.parametrize("init_scale", [2.0**24, 2.0**12])
def test_resuming_both_is_fine(init_scale: float, tmp_path: Path) -> None:
    assert_healthy(resumed(tmp_path / "run", with_scaler=True, init_scale=init_scale))


def test_a_scaler_that_is_loaded_while_recording_is_fine(tmp_path: Path) -> None:
    saved = checkpoint(dynamic(init_scale=2.0**20))
    model = mlp(seed=1)
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
    optimizer.load_state_dict(saved["optimizer"])
    scaler = dynamic(init_scale=2.0**20)
    with gradaudit.attach(model, optimizer, scaler, out=tmp_path / "run", every=5) as audit:
        model.load_state_dict(saved["model"])
        scaler.load_state_dict(saved["scaler"])
        for step in range(30):
            optimizer.zero_grad()
            with torch.autocast("cpu", dtype=torch.float16):
                loss = classification(model, step)
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()

    assert_healthy(audit.report())


def test_recording_from_the_middle_of_a_run_on_is_fine(tmp_path: Path) -> None:
    model, scaler = mlp(), dynamic()
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
    fit(tmp_path / "first", model, scaler=scaler, optimizer=optimizer, steps=10)

    assert_healthy(fit(tmp_path / "then", model, scaler=scaler, optimizer=optimizer, steps=30))


def test_a_fresh_run_that_starts_at_init_scale_is_fine(tmp_path: Path) -> None:
    report = fit(tmp_path / "run", mlp(), scaler=dynamic(init_scale=2.0**24), steps=40)

    assert_healthy(report)
    assert "scale-calibration" in informing(report)
