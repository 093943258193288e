"""Gradients that overflow, are about to, or leave no scale that fits."""

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
    TwoHeads,
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
    numbers,
    places,
    the,
    times,
)

Audited = Callable[[Script], AuditReport]


# overflow


def residual_net_held_at_2_to_the_20(path: Path) -> AuditReport:
    torch.manual_seed(0)

    class Residual(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner, self.outer = nn.Linear(WIDTH, 64), nn.Linear(64, WIDTH)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x + self.outer(torch.relu(self.inner(x)))

    model = nn.Sequential(*[Residual() for _ in range(3)], nn.Linear(WIDTH, NUM_CLASSES))
    scaler = dynamic(init_scale=2.0**20)
    return fit(path, model, scaler=scaler, update=lambda: scaler.update(2.0**20))


def scale_raised_every_ten_steps(path: Path) -> AuditReport:
    scaler = dynamic()

    def after(step: int) -> None:
        if step % 10 == 9:
            scaler.update(2.0**25)

    return fit(path, encoder(), copying, scaler=scaler, steps=80, every=5, after=after)


@pytest.mark.parametrize("script", [residual_net_held_at_2_to_the_20, scale_raised_every_ten_steps])
def test_a_backward_that_overflows_names_the_first_tensor_and_the_largest_safe_scale(
    script: Script, audited: Audited
) -> None:
    report = audited(script)

    assert_sound(report)
    assert alarming(report).pop("gradient-overflow") == "warning"
    assert set(alarming(report)) <= {"gradient-overflow", "static-scale-unsafe", "scale-thrashing", "never-applied"}
    finding = the(report, "gradient-overflow")
    assert finding.scale_can_fix == "yes"
    assert finding.confidence == "high"
    (scale,) = [item for item in finding.evidence if item.name == "scale"]
    assert scale.threshold is not None
    assert 2.0**10 <= scale.threshold < scale.value
    assert places(finding) & {"3", "3.weight", "3.bias", "head", "head.weight", "head.bias"}, "next to the loss"
    assert report.recommendation is not None
    assert report.recommendation.init_scale <= scale.threshold


def large_loss_and_no_scaler(path: Path) -> AuditReport:
    optimizer = torch.optim.SGD((model := mlp()).parameters(), lr=1e-9)
    return fit(path, model, times(classification, 1e7), optimizer=optimizer, every=1, steps=20)


def test_without_a_scaler_an_overflow_reaches_the_weights_and_is_told(audited: Audited) -> None:
    report = audited(large_loss_and_no_scaler)

    assert_sound(report)
    assert alarming(report) == {
        "gradient-overflow": "warning", "missing-loss-scaling": "warning", "nonfinite-weight": "error",
    }  # fmt: skip
    assert the(report, "nonfinite-weight").consequence_of is not None
    assert "stepped on inf" in the(report, "gradient-overflow").remedy


# headroom


def gradients_grow_under_a_held_scale(path: Path) -> AuditReport:
    def loss(model: nn.Module, step: int) -> torch.Tensor:
        return classification(model, step) * (1 + step / 5)

    optimizer = torch.optim.SGD((model := mlp()).parameters(), lr=0.0)
    scaler = dynamic(init_scale=2.0**14, growth_interval=10**9)
    return fit(path, model, loss, scaler=scaler, optimizer=optimizer, steps=60, every=3)


def test_a_gradient_near_the_limit_that_grows_is_worth_knowing(audited: Audited) -> None:
    report = audited(gradients_grow_under_a_held_scale)

    assert_healthy(report)
    assert informing(report) == {"gradient-headroom-low"}
    numbers = evidence(the(report, "gradient-headroom-low"))
    assert 0 < numbers["headroom"] <= 2
    assert 1 < numbers["growth"] < 5


def grows_out_of_a_narrow_window(path: Path) -> AuditReport:
    """The small head needs the scale that the large one, growing, will soon not bear."""
    torch.manual_seed(0)

    def loss(model: nn.Module, step: int) -> torch.Tensor:
        x, y = classes(step)
        large, small = model(x)
        grown = 2.0 ** (step / 10)
        return grown * F.cross_entropy(large, y) + 3e-7 * F.cross_entropy(small, (y + 1) % NUM_CLASSES)

    optimizer = torch.optim.SGD((model := TwoHeads()).parameters(), lr=0.0)
    scaler = dynamic(init_scale=2.0**13, growth_interval=10**9)
    return fit(path, model, loss, scaler=scaler, optimizer=optimizer, steps=50, every=2)


def test_it_is_a_warning_where_the_window_is_about_to_close(audited: Audited) -> None:
    report = audited(grows_out_of_a_narrow_window)

    assert_sound(report)
    assert alarming(report)["gradient-headroom-low"] == "warning"
    assert places(the(report, "gradient-headroom-low")) <= {"large.2.weight", "large.2.bias", "large.2", "trunk.weight"}


def only_the_scale_grows(path: Path) -> AuditReport:
    optimizer = torch.optim.SGD((model := mlp()).parameters(), lr=0.0)
    scaler = dynamic(init_scale=2.0**8, growth_interval=6)
    return fit(path, model, scaler=scaler, optimizer=optimizer, steps=120, every=3)


def test_a_growing_scale_is_no_headroom_trend(audited: Audited) -> None:
    report = audited(only_the_scale_grows)

    assert report.run.scale_last is not None
    assert report.run.scale_last >= 2.0**16
    assert_healthy(report)
    assert informing(report) == {"scale-hunting"}


# empty window


def ten_decades_between_two_losses(path: Path) -> AuditReport:
    torch.manual_seed(0)

    def loss(model: nn.Module, step: int) -> torch.Tensor:
        x, y = classes(step)
        large, small = model(x)
        return 3e3 * large.float().square().sum() + 1e-7 * F.cross_entropy(small, y)

    optimizer = torch.optim.SGD((model := TwoHeads()).parameters(), lr=1e-12)
    return fit(path, model, loss, scaler=dynamic(), optimizer=optimizer)


class Pictures(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.segment = nn.Sequential(nn.Conv2d(3, 8, 3, padding=1), nn.ReLU(), nn.Conv2d(8, 1, 3, padding=1))
        self.classify = nn.Sequential(
            nn.Conv2d(3, 8, 3), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, 3)
        )

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return self.segment(x), self.classify(x)


def summed_pixels_beside_an_averaged_class(path: Path) -> AuditReport:
    torch.manual_seed(0)

    def loss(model: nn.Module, step: int) -> torch.Tensor:
        x = numbers(step, 16, 3, 8, 8)
        pixels, logits = model(x)
        reconstruction = (pixels.float() - 300 * x.mean(1, keepdim=True)).square().sum()
        return reconstruction + 1e-8 * F.cross_entropy(logits, x.mean((2, 3)).argmax(1))

    optimizer = torch.optim.SGD((model := Pictures()).parameters(), lr=1e-12)
    return fit(path, model, loss, scaler=dynamic(init_scale=4.0), optimizer=optimizer)


@pytest.mark.parametrize(
    ("script", "small", "large"),
    [
        (ten_decades_between_two_losses, "small", "large"),
        (summed_pixels_beside_an_averaged_class, "classify", "segment"),
    ],
)
def test_two_losses_that_no_single_scale_fits_are_an_error_and_both_are_named(
    script: Script, small: str, large: str, audited: Audited
) -> None:
    report = audited(script)

    assert_sound(report)
    assert alarming(report).pop("scale-window-empty") == "error"
    assert set(alarming(report)) <= {"scale-window-empty", "gradient-underflow"}
    finding = the(report, "scale-window-empty")
    assert finding.scale_can_fix == "no"
    assert [place.name.split(".")[0].split(" ")[0] for place in finding.where] == [small, large]
    numbers = evidence(finding)
    assert numbers["window_low_log2"] > numbers["window_high_log2"]
    assert numbers["empty_frac"] > 0.5
    assert report.recommendation is not None
    assert report.recommendation.precision != "fp16"
    assert report.recommendation.change_needed


def test_two_losses_of_like_size_share_a_wide_window(tmp_path: Path) -> None:
    torch.manual_seed(0)

    def loss(model: nn.Module, step: int) -> torch.Tensor:
        x, y = classes(step)
        large, small = model(x)
        return F.cross_entropy(large, y) + 0.01 * F.cross_entropy(small, (y + 1) % NUM_CLASSES)

    report = fit(tmp_path / "run", TwoHeads(), loss, scaler=dynamic())

    assert_healthy(report)
    assert report.recommendation is not None
    assert report.recommendation.window.high_log2 - report.recommendation.window.low_log2 >= 10
