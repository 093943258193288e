"""Scales that fall for nothing: collapse, pinned at the floor, down to zero; and look-alikes that are none."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from gradaudit.analysis.report import AuditReport
from tests.findings.conftest import Script
from tests.findings.training import (
    NUM_CLASSES,
    WIDTH,
    alarming,
    assert_healthy,
    assert_sound,
    classes,
    classification,
    copying,
    dynamic,
    encoder,
    evidence,
    fit,
    informing,
    mlp,
    the,
)

Audited = Callable[[Script], AuditReport]


# collapse


class Gated(nn.Module):
    """The product of two branches: in FP16 it overflows once the branches have grown."""

    def __init__(self) -> None:
        super().__init__()
        self.gate, self.value = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.head = nn.Linear(WIDTH, NUM_CLASSES)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        logits: torch.Tensor = self.head(self.gate(x) * self.value(x))
        return logits


def product_overflows_from_step_40_on(path: Path) -> AuditReport:
    torch.manual_seed(0)

    def loss(model: nn.Module, step: int) -> torch.Tensor:
        x, y = classes(step)
        return F.cross_entropy(model(x * (500 if step >= 40 else 1)), y)

    return fit(path, Gated(), loss, scaler=dynamic(), steps=80)


def logits_overflow_from_the_start(path: Path) -> AuditReport:
    def loss(model: nn.Module, step: int) -> torch.Tensor:
        x, y = classes(step)
        return F.cross_entropy(torch.exp(15 + torch.tanh(model(x))), y)

    return fit(path, mlp(), loss, scaler=dynamic(growth_interval=50), steps=60)


def every_third_row_is_masked_entirely(path: Path) -> AuditReport:
    def loss(model: nn.Module, step: int) -> torch.Tensor:
        x, y = classes(step)
        scores = model(x)
        if step % 3 == 0:
            scores = scores + torch.where(torch.arange(len(x))[:, None] < 2, float("-inf"), 0.0)
        return F.nll_loss(torch.log(torch.softmax(scores, dim=1) + 1e-3), y)

    return fit(path, mlp(), loss, scaler=dynamic(), steps=90)


def square_root_of_zero(path: Path) -> AuditReport:
    """The loss is finite and its gradient is inf times zero, at every scale."""

    def loss(model: nn.Module, step: int) -> torch.Tensor:
        x, y = classes(step)
        out = model(x)
        distance = (out - out.detach()).square().sum(1).sqrt() if step >= 20 else out.new_zeros(())
        return F.cross_entropy(out, y) + distance.float().mean()

    return fit(path, mlp(), loss, scaler=dynamic(), steps=80)


def square_root_of_zero_from_the_start(path: Path) -> AuditReport:
    def loss(model: nn.Module, step: int) -> torch.Tensor:
        x, _ = classes(step)
        hidden = model(x)
        return (hidden - hidden.detach()).square().sum(1).sqrt().float().mean()

    return fit(path, mlp(3, seed=3), loss, scaler=dynamic(), steps=50)


def collapse_with_a_gentle_backoff(path: Path) -> AuditReport:
    torch.manual_seed(0)

    def loss(model: nn.Module, step: int) -> torch.Tensor:
        x, y = classes(step)
        return F.cross_entropy(model(x * (500 if step >= 20 else 1)), y)

    return fit(path, Gated(), loss, scaler=dynamic(backoff_factor=0.9), steps=60)


@pytest.mark.parametrize(
    ("script", "cause"),
    [
        (product_overflows_from_step_40_on, "forward-overflow"),
        (logits_overflow_from_the_start, "forward-overflow"),
        (every_third_row_is_masked_entirely, "masked-row"),
        (collapse_with_a_gentle_backoff, "forward-overflow"),
        (square_root_of_zero, "nonfinite-backward"),
        (square_root_of_zero_from_the_start, "nonfinite-backward"),
    ],
)
def test_halvings_that_no_scale_can_stop_are_a_collapse(script: Script, cause: str, audited: Audited) -> None:
    report = audited(script)

    assert_sound(report)
    assert set(alarming(report)) - {"never-applied"} == {"scale-collapse", cause}
    assert report.findings[0].id == cause
    finding = the(report, "scale-collapse")
    assert finding.consequence_of == cause
    assert finding.scale_can_fix == "no"
    numbers = evidence(finding)
    assert numbers["num_unexplained_overflows"] >= 25
    assert numbers["scale_after"] < numbers["scale_before"]
    born_in_forward = numbers["num_nonfinite_losses"] == numbers["num_unexplained_overflows"]
    assert born_in_forward is (cause != "nonfinite-backward")
    assert report.recommendation is not None
    assert report.recommendation.change_needed
    assert report.recommendation.precision != "fp16"


def test_the_collapse_begins_where_the_first_bad_step_was(audited: Audited) -> None:
    assert the(audited(product_overflows_from_step_40_on), "scale-collapse").steps == (40, 79)
    assert the(audited(square_root_of_zero), "scale-collapse").steps == (20, 79)


def test_a_burst_of_bad_batches_that_ended_is_no_collapse(tmp_path: Path) -> None:
    def loss(model: nn.Module, step: int) -> torch.Tensor:
        return classification(model, step) * (float("nan") if 50 <= step < 56 else 1.0)

    report = fit(tmp_path / "run", mlp(), loss, scaler=dynamic(), steps=150)

    assert report.run.num_skipped == 6
    assert_sound(report)
    assert set(alarming(report)) == {"forward-overflow"}
    assert "the constant nan" in the(report, "forward-overflow").summary


# at the floor


def forward_overflows_above_a_floor_of_one(path: Path) -> AuditReport:
    torch.manual_seed(0)
    scaler = dynamic()

    def loss(model: nn.Module, step: int) -> torch.Tensor:
        x, y = classes(step)
        return F.cross_entropy(model(x * (500 if step >= 15 else 1)), y)

    def after(step: int) -> None:
        if scaler.get_scale() < 1.0:
            scaler.update(1.0)

    return fit(path, Gated(), loss, scaler=scaler, steps=80, after=after)


def backward_is_nan_above_a_floor_of_128(path: Path) -> AuditReport:
    scaler = dynamic()

    def loss(model: nn.Module, step: int) -> torch.Tensor:
        tokens = torch.arange(48).view(8, 6) % 20
        logits = model(tokens)
        return copying(model, step) + (logits - logits.detach()).square().sum(-1).sqrt().float().mean()

    def after(step: int) -> None:
        scaler.update(max(scaler.get_scale(), 128.0))

    return fit(path, encoder(), loss, scaler=scaler, steps=60, after=after)


@pytest.mark.parametrize(
    ("script", "cause"),
    [
        (forward_overflows_above_a_floor_of_one, "forward-overflow"),
        (backward_is_nan_above_a_floor_of_128, "nonfinite-backward"),
    ],
)
def test_overflowing_without_end_at_the_floor_is_told_as_such(script: Script, cause: str, audited: Audited) -> None:
    report = audited(script)

    assert_sound(report)
    assert set(alarming(report)) - {"never-applied"} == {"scale-at-floor", cause}
    finding = the(report, "scale-at-floor")
    assert finding.consequence_of == cause
    assert finding.scale_can_fix == "no"
    assert evidence(finding)["scale"] == report.run.scale_last
    assert evidence(finding)["num_overflows"] >= 30
    assert report.recommendation is not None
    assert report.recommendation.precision != "fp16"


def static_without_overflow(path: Path) -> AuditReport:
    return fit(path, mlp(), scaler=dynamic(init_scale=1024.0, growth_interval=10**9), steps=80)


def held_by_hand_without_overflow(path: Path) -> AuditReport:
    scaler = dynamic(init_scale=2.0**12)
    return fit(path, encoder(), copying, scaler=scaler, steps=80, update=lambda: scaler.update(2.0**12))


@pytest.mark.parametrize("script", [static_without_overflow, held_by_hand_without_overflow])
def test_a_static_scale_without_overflow_is_fine(script: Script, audited: Audited) -> None:
    report = audited(script)

    assert report.run.num_skipped == 0
    assert_healthy(report)
    assert informing(report) == set()


# zero


def nan_until_the_scale_is_zero(path: Path) -> AuditReport:
    def loss(model: nn.Module, step: int) -> torch.Tensor:
        return classification(model, step) * (float("nan") if step >= 10 else 1.0)

    return fit(path, mlp(1), loss, scaler=dynamic(), steps=190, every=20)


def nan_until_the_scale_is_nothing_then_clean(path: Path) -> AuditReport:
    def loss(model: nn.Module, step: int) -> torch.Tensor:
        return classification(model, step) * (float("nan") if 10 <= step < 60 else 1.0)

    return fit(path, mlp(1), loss, scaler=dynamic(backoff_factor=0.1), steps=80, every=20)


@pytest.mark.parametrize("backoff", [1.0, 1.5])
def test_factors_that_only_the_setter_takes_do_not_stop_the_audit(backoff: float, tmp_path: Path) -> None:
    scaler = dynamic()
    scaler.set_backoff_factor(backoff)

    def loss(model: nn.Module, step: int) -> torch.Tensor:
        return classification(model, step) * (float("nan") if step % 7 == 6 else 1.0)

    assert_sound(fit(tmp_path / "run", mlp(1), loss, scaler=scaler))


@pytest.mark.parametrize("script", [nan_until_the_scale_is_zero, nan_until_the_scale_is_nothing_then_clean])
def test_a_scale_of_nothing_is_told_before_anything_else(script: Script, audited: Audited) -> None:
    report = audited(script)

    assert_sound(report)
    assert alarming(report)["scale-zero"] == "error"
    assert set(alarming(report)) <= {"scale-zero", "gradient-underflow", "forward-overflow"}
    finding = the(report, "scale-zero")
    assert finding.scale_can_fix == "no"
    assert evidence(finding)["scale"] <= 2.0**-128
    assert report.recommendation is not None
    assert report.recommendation.precision != "fp16"
