"""Scales that skip too often or drift down, and what only looks like it."""

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
    NUM_CLASSES,
    WIDTH,
    alarming,
    assert_healthy,
    assert_sound,
    classification,
    convnet,
    copying,
    dynamic,
    encoder,
    evidence,
    fit,
    mlp,
    numbers,
    picture_classification,
    the,
)

Audited = Callable[[Script], AuditReport]


# thrashing


def scale_put_back_every_epoch(path: Path) -> AuditReport:
    scaler = dynamic()

    def after(step: int) -> None:
        if step % 25 == 24:
            scaler.update(2.0**28)

    return fit(path, convnet(), picture_classification, scaler=scaler, steps=200, every=10, after=after)


def scale_doubled_by_hand(path: Path) -> AuditReport:
    scaler = dynamic()

    def after(step: int) -> None:
        if step % 4 == 3:
            scaler.update(2 * scaler.get_scale())

    return fit(path, encoder(), copying, scaler=scaler, steps=200, every=10, after=after)


def interval_shortened_behind_the_scalers_back(path: Path) -> AuditReport:
    scaler = dynamic()

    def after(step: int) -> None:
        if step == 0:
            scaler.set_growth_interval(2)

    return fit(path, mlp(), scaler=scaler, steps=200, every=10, after=after)


def new_scaler_every_epoch(path: Path) -> AuditReport:
    model = mlp()
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
    with gradaudit.attach(model, optimizer, out=path, every=10) as audit:
        for epoch in range(8):
            scaler = dynamic(init_scale=2.0**28)
            for step in range(25):
                optimizer.zero_grad()
                with torch.autocast("cpu", dtype=torch.float16):
                    loss = classification(model, 25 * epoch + step)
                scaler.scale(loss).backward()
                scaler.step(optimizer)
                scaler.update()
    return audit.report()


def floor_above_what_many_batches_bear(path: Path) -> AuditReport:
    """Batches differ by 2^10 in the size of their gradients, and the floor suits the small ones."""
    scaler = dynamic()

    def loss(model: nn.Module, step: int) -> torch.Tensor:
        return classification(model, step) * 2.0 ** (-10 * (step % 3 > 0))

    def after(step: int) -> None:
        if scaler.get_scale() < 2.0**21:
            scaler.update(2.0**21)

    return fit(path, mlp(), loss, scaler=scaler, steps=150, every=10, after=after)


@pytest.mark.parametrize(
    "script",
    [
        scale_put_back_every_epoch,
        scale_doubled_by_hand,
        interval_shortened_behind_the_scalers_back,
        new_scaler_every_epoch,
        floor_above_what_many_batches_bear,
    ],
)
def test_skipping_far_more_often_than_the_interval_implies_is_thrashing(script: Script, audited: Audited) -> None:
    report = audited(script)

    assert_sound(report)
    assert alarming(report).pop("scale-thrashing") == "warning"
    assert set(alarming(report)) <= {"scale-thrashing", "gradient-overflow", "scaler-recreated"}
    finding = the(report, "scale-thrashing")
    assert finding.consequence_of == ("scaler-recreated" if script is new_scaler_every_epoch else None)
    assert finding.scale_can_fix == "yes"
    assert evidence(finding)["num_overflows"] >= 10
    assert evidence(finding)["skip_rate"] > 10 * 1 / 2001
    assert evidence(finding)["num_bursts"] >= 5
    assert report.recommendation is not None
    assert report.recommendation.change_needed
    assert report.recommendation.precision == "fp16"
    assert report.recommendation.predicted.num_skipped < report.run.num_skipped / 2


# decay


def loss_weight_grows(path: Path) -> AuditReport:
    def loss(model: nn.Module, step: int) -> torch.Tensor:
        return classification(model, step) * 1.12**step

    return fit(path, mlp(), loss, scaler=dynamic(), steps=200, every=5)


class Residual(nn.Module):
    def __init__(self, blocks: int) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(blocks))
        self.head = nn.Linear(WIDTH, NUM_CLASSES)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = x + block(x)
        logits: torch.Tensor = self.head(x)
        return logits


def residual(blocks: int = 6) -> Residual:
    torch.manual_seed(0)
    return Residual(blocks)


def weights_of_a_residual_net_grow(path: Path) -> AuditReport:
    """As with a learning rate too high and no decay: every block multiplies the gradient a little more each step."""
    model = residual()

    def after(step: int) -> None:
        with torch.no_grad():
            for block in model.blocks:
                block.weight.mul_(1.012)

    def loss(model: nn.Module, step: int) -> torch.Tensor:
        # the size of the logits does not grow along, as behind a norm
        return (model(numbers(step, 32, WIDTH)).float() * numbers(step + 1, 32, NUM_CLASSES)).mean()

    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    return fit(path, model, loss, scaler=dynamic(), optimizer=optimizer, steps=150, every=5, after=after)


@pytest.mark.parametrize("script", [loss_weight_grows, weights_of_a_residual_net_grow])
def test_a_scale_that_drifts_down_while_gradients_grow_is_decay(script: Script, audited: Audited) -> None:
    report = audited(script)

    assert_sound(report)
    assert alarming(report).pop("scale-decay") == "warning"
    assert set(alarming(report)) <= {"scale-decay", "gradient-overflow"}
    finding = the(report, "scale-decay")
    assert finding.scale_can_fix == "partly"
    numbers = evidence(finding)
    assert numbers["num_drops"] >= 3
    assert numbers["gradient_growth"] > 3
    assert numbers["scale_before"] >= 8 * numbers["scale_after"]


def loss_grows_once(path: Path) -> AuditReport:
    def loss(model: nn.Module, step: int) -> torch.Tensor:
        return classification(model, step) * (1000.0 if step >= 60 else 1.0)

    return fit(path, mlp(), loss, scaler=dynamic(), steps=180)


def single_batches_are_much_larger(path: Path) -> AuditReport:
    """Their gradients are finite at a smaller scale, however far they lie above their neighbours'."""

    def loss(model: nn.Module, step: int) -> torch.Tensor:
        return classification(model, step) * (2.0**14 if step % 25 == 24 else 1.0)

    return fit(path, mlp(), loss, scaler=dynamic(), steps=250, every=10)


def test_one_drop_is_no_decay(audited: Audited) -> None:
    report = audited(loss_grows_once)

    assert report.run.num_skipped >= 3
    assert_healthy(report)


def test_a_few_batches_much_larger_than_the_rest_are_no_collapse(audited: Audited) -> None:
    report = audited(single_batches_are_much_larger)

    assert_sound(report)
    assert report.run.num_skipped >= 6
    assert "scale-collapse" not in alarming(report)
    assert report.verdict.level != "failing"
    assert all(finding.scale_can_fix != "no" for finding in report.findings)
