"""Clipping before unscale_, by torch's functions or by hand, and clipping in its place."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.utils import clip_grad_norm_ as clip_imported_early

from tests.findings.loops import Body, line, loss_of, train
from tests.findings.training import (
    alarming,
    assert_healthy,
    assert_sound,
    evidence,
    the,
)

# clip-before-unscale


def clipped_too_early(model: nn.Module, optimizer: Any, scaler: Any, step: int) -> None:
    scaler.scale(loss_of(model, step)).backward()
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    scaler.unscale_(optimizer)
    scaler.step(optimizer)
    scaler.update()


def clipped_early_by_an_early_import(model: nn.Module, optimizer: Any, scaler: Any, step: int) -> None:
    scaler.scale(loss_of(model, step)).backward()
    clip_imported_early(model.parameters(), 1.0)
    scaler.step(optimizer)
    scaler.update()


def clipped_by_hand(model: nn.Module, optimizer: Any, scaler: Any, step: int) -> None:
    scaler.scale(loss_of(model, step)).backward()
    norm = torch.stack([p.grad.norm() for p in model.parameters() if p.grad is not None]).norm()
    for p in model.parameters():
        p.grad.mul_(min(1.0, 1.0 / float(norm)))
    scaler.step(optimizer)
    scaler.update()


def values_clipped_too_early(model: nn.Module, optimizer: Any, scaler: Any, step: int) -> None:
    scaler.scale(loss_of(model, step)).backward()
    nn.utils.clip_grad_value_(model.parameters(), 0.5)
    scaler.step(optimizer)
    scaler.update()


def clipped_in_time(model: nn.Module, optimizer: Any, scaler: Any, step: int) -> None:
    scaler.scale(loss_of(model, step)).backward()
    scaler.unscale_(optimizer)
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    scaler.step(optimizer)
    scaler.update()


def clipped_at_a_scaled_limit(model: nn.Module, optimizer: Any, scaler: Any, step: int) -> None:
    scaler.scale(loss_of(model, step)).backward()
    nn.utils.clip_grad_norm_(model.parameters(), 0.5 * scaler.get_scale())
    scaler.step(optimizer)
    scaler.update()


def averaged_over_micro_batches(model: nn.Module, optimizer: Any, scaler: Any, step: int) -> None:
    for micro in range(4):
        scaler.scale(loss_of(model, 4 * step + micro)).backward()
    for p in model.parameters():
        p.grad.mul_(0.25)
    scaler.step(optimizer)
    scaler.update()


@pytest.mark.usefixtures("untraced")
@pytest.mark.parametrize(
    ("body", "call"),
    [
        (clipped_too_early, "clip_grad_norm_"),
        (clipped_early_by_an_early_import, "p.grad changed"),
        (clipped_by_hand, "p.grad changed"),
        (values_clipped_too_early, "clip_grad_value_"),
    ],
)
def test_clipping_scaled_gradients_is_found_with_its_factor(tmp_path: Path, body: Body, call: str) -> None:
    report = train(tmp_path / "run", body)
    assert_sound(report)
    assert set(alarming(report)) == {"clip-before-unscale"}
    numbers_of = evidence(the(report, "clip-before-unscale"))
    assert numbers_of["factor_off"] == pytest.approx(65536)
    assert numbers_of["limit"] == pytest.approx(0.5 if call == "clip_grad_value_" else 1.0, rel=0.01)
    assert "clip" in line(report, "clip-before-unscale", call) or "mul_" in line(report, "clip-before-unscale", call)


def test_the_late_unscale_is_named_too(tmp_path: Path) -> None:
    report = train(tmp_path / "run", clipped_too_early)
    assert line(report, "clip-before-unscale", "scaler.unscale_") == "scaler.unscale_(optimizer)"


def test_clipping_values_hides_an_overflow(tmp_path: Path) -> None:
    report = train(tmp_path / "run", values_clipped_too_early, init_scale=2.0**30)
    assert_sound(report)
    assert evidence(the(report, "clip-before-unscale"))["num_hidden"] > 0


@pytest.mark.parametrize("body", [clipped_in_time, clipped_at_a_scaled_limit, averaged_over_micro_batches])
@pytest.mark.parametrize("interval", [2000, 5])
def test_right_clipping_is_healthy(tmp_path: Path, body: Body, interval: int) -> None:
    assert_healthy(train(tmp_path / "run", body, growth_interval=interval))
