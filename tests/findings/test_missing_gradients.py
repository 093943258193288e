"""Layers that the loss does not reach, and FP16 without loss scaling."""

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
    bias_before_a_norm,
    classes,
    classification,
    copying,
    dynamic,
    encoder,
    evidence,
    fit,
    frozen_layers,
    half,
    labels,
    mlp,
    numbers,
    places,
    the,
    times,
)

Audited = Callable[[Script], AuditReport]


# layers without gradient


class Detached(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = mlp(1, out=WIDTH)
        self.head = nn.Linear(WIDTH, NUM_CLASSES)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        logits: torch.Tensor = self.head(self.body(x).detach())
        return logits


def body_is_detached(path: Path) -> AuditReport:
    torch.manual_seed(0)
    return fit(path, Detached(), scaler=dynamic())


class Spare(nn.Module):
    def __init__(self, *, zero: bool) -> None:
        super().__init__()
        self.zero = zero
        self.body = mlp(1)
        self.spare = nn.Linear(WIDTH, NUM_CLASSES)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        logits: torch.Tensor = self.body(x)
        return logits + 0.0 * self.spare(x) if self.zero else logits


def branch_is_never_used(path: Path) -> AuditReport:
    torch.manual_seed(0)
    return fit(path, Spare(zero=False), scaler=dynamic())


def branch_is_multiplied_by_zero(path: Path) -> AuditReport:
    torch.manual_seed(0)
    return fit(path, Spare(zero=True), scaler=dynamic())


def encoder_runs_without_gradients(path: Path) -> AuditReport:
    model = encoder()

    def loss(model: nn.Module, step: int) -> torch.Tensor:
        tokens = labels(step, 8, 6, num_classes=20)
        with torch.no_grad():
            hidden = model.encoder(model.embed(tokens))
        return F.cross_entropy(model.head(hidden).flatten(0, 1), tokens.flatten())

    return fit(path, model, loss, scaler=dynamic())


@pytest.mark.parametrize(
    ("script", "dead", "alive"),
    [
        (body_is_detached, "body", "head"),
        (branch_is_never_used, "spare", "body"),
        (branch_is_multiplied_by_zero, "spare", "body"),
        (encoder_runs_without_gradients, "encoder", "head"),
    ],
)
def test_layers_the_loss_does_not_reach_are_named(script: Script, dead: str, alive: str, audited: Audited) -> None:
    report = audited(script)

    assert_sound(report)
    assert alarming(report) == {"layer-without-gradient": "warning"}
    finding = the(report, "layer-without-gradient")
    assert finding.scale_can_fix == "no"
    assert any(name.startswith(dead) for name in places(finding))
    assert not any(name.startswith(alive) for name in places(finding))
    assert evidence(finding)["num_parameters"] >= 2
    assert report.recommendation is not None
    assert not report.recommendation.change_needed


def borrowed_weight(path: Path) -> AuditReport:
    """The module is never called: its weight goes through a functional call, its bias nowhere."""
    torch.manual_seed(0)

    class Borrowing(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = nn.Linear(WIDTH, WIDTH)
            self.outer = nn.Linear(WIDTH, NUM_CLASSES)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            logits: torch.Tensor = self.outer(torch.relu(F.linear(x, self.inner.weight)))
            return logits

    return fit(path, Borrowing(), scaler=dynamic())


def functional_call(path: Path) -> AuditReport:
    def loss(model: nn.Module, step: int) -> torch.Tensor:
        x, y = classes(step)
        params = {name: 1.0 * param for name, param in model.named_parameters()}
        return F.cross_entropy(torch.func.functional_call(model, params, (x,)), y)

    return fit(path, mlp(), loss, scaler=dynamic())


def adapter_that_starts_at_zero(path: Path) -> AuditReport:
    """Its first matrix has no gradient until its second has moved."""
    torch.manual_seed(0)

    class Adapted(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.base = nn.Linear(WIDTH, WIDTH)
            self.down, self.up = nn.Linear(WIDTH, 4, bias=False), nn.Linear(4, WIDTH, bias=False)
            self.head = nn.Linear(WIDTH, NUM_CLASSES)
            nn.init.zeros_(self.up.weight)
            self.base.requires_grad_(False)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            logits: torch.Tensor = self.head(torch.relu(self.base(x) + self.up(self.down(x))))
            return logits

    return fit(path, Adapted(), scaler=dynamic())


def layers_unfrozen_on_the_way(path: Path) -> AuditReport:
    model = mlp(3)
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
    model[0].requires_grad_(False)

    def after(step: int) -> None:
        if step == 30:
            model[0].requires_grad_(True)

    return fit(path, model, scaler=dynamic(), optimizer=optimizer, after=after)


@pytest.mark.parametrize(
    "script",
    [
        frozen_layers, bias_before_a_norm, borrowed_weight, functional_call, adapter_that_starts_at_zero,
        layers_unfrozen_on_the_way,
    ],
)  # fmt: skip
def test_layers_without_a_gradient_for_a_reason_are_not_named(script: Script, audited: Audited) -> None:
    assert_healthy(audited(script))


# no loss scaling


def no_scaler_at_all(path: Path) -> AuditReport:
    return fit(path, encoder(), copying)


def scaler_switched_off(path: Path) -> AuditReport:
    return fit(path, mlp(), scaler=torch.amp.GradScaler("cpu", enabled=False))


def no_scaler_and_a_tiny_loss(path: Path) -> AuditReport:
    return fit(path, mlp(4), times(classification, 1e-4))


@pytest.mark.parametrize(
    ("script", "more"),
    [
        (no_scaler_at_all, set()),
        (scaler_switched_off, set()),
        (no_scaler_and_a_tiny_loss, {"gradient-underflow"}),
    ],
)
def test_fp16_without_loss_scaling_is_told(script: Script, more: set[str], audited: Audited) -> None:
    report = audited(script)

    assert_sound(report)
    assert alarming(report)["missing-loss-scaling"] == "warning"
    assert set(alarming(report)) == {"missing-loss-scaling", *more}
    finding = the(report, "missing-loss-scaling")
    assert finding.scale_can_fix == "yes"
    assert evidence(finding)["num_steps"] == 60
    assert {place.type for place in finding.where} == {"call_site"}
    assert {place.file is not None and place.file.endswith("training.py") for place in finding.where} == {True}
    assert ("disabled" in finding.summary) is (script is scaler_switched_off)
    assert report.recommendation is not None
    assert report.recommendation.change_needed
    assert report.recommendation.current_settings is None


@pytest.mark.parametrize("dtype", [torch.bfloat16, None])
def test_without_fp16_no_scaling_is_needed(dtype: torch.dtype | None, tmp_path: Path) -> None:
    report = fit(tmp_path / "run", mlp(), dtype=dtype)

    assert_healthy(report)
    assert report.findings == ()
    assert report.recommendation is None


def test_evaluating_in_fp16_needs_no_scaling(tmp_path: Path) -> None:
    def loss(model: nn.Module, step: int) -> torch.Tensor:
        with torch.no_grad(), half():
            model(numbers(step, 8, WIDTH))
        return classification(model, step)

    report = fit(tmp_path / "run", mlp(), loss, dtype=None)

    assert_healthy(report)
