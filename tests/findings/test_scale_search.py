"""Normal courses of the loss scale: it comes down from its start, and probes for more now and then."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import nn

from gradaudit.analysis.report import AuditReport
from tests.findings.conftest import Script
from tests.findings.training import (
    WIDTH,
    assert_healthy,
    convnet,
    copying,
    dynamic,
    encoder,
    evidence,
    first_token,
    fit,
    informing,
    mlp,
    numbers,
    picture_classification,
    recurrent,
    the,
)

Audited = Callable[[Script], AuditReport]


# calibration


def start_at_2_to_the_32(path: Path) -> AuditReport:
    return fit(path, mlp(), scaler=dynamic(init_scale=2.0**32), every=10)


def convolutions_start_at_2_to_the_40(path: Path) -> AuditReport:
    return fit(path, convnet(), picture_classification, scaler=dynamic(init_scale=2.0**40), every=10)


def recurrent_net_starts_far_too_high_with_a_gentle_backoff(path: Path) -> AuditReport:
    scaler = dynamic(init_scale=2.0**28, backoff_factor=0.7)
    return fit(path, recurrent(), first_token, scaler=scaler, every=10, steps=80)


@pytest.mark.parametrize(
    "script",
    [
        start_at_2_to_the_32,
        convolutions_start_at_2_to_the_40,
        recurrent_net_starts_far_too_high_with_a_gentle_backoff,
    ],
)
def test_a_scale_that_comes_down_from_far_too_high_is_normal(script: Script, audited: Audited) -> None:
    report = audited(script)

    assert_healthy(report)
    assert "scale-calibration" in informing(report) <= {"scale-calibration", "gradient-headroom-low"}
    finding = the(report, "scale-calibration")
    num_overflows = evidence(finding)["num_overflows"]
    assert 10 <= num_overflows <= report.run.num_skipped <= num_overflows + 2
    assert evidence(finding)["scale_before"] == report.run.scale_first
    assert report.run.scale_last is not None
    assert report.run.scale_last <= evidence(finding)["scale_after"] <= 4 * report.run.scale_last
    assert finding.steps[0] == 0


def test_a_run_that_ends_while_the_scale_still_comes_down_is_no_collapse(tmp_path: Path) -> None:
    report = fit(tmp_path / "run", mlp(), scaler=dynamic(init_scale=2.0**60), steps=12, every=1)

    assert report.run.num_skipped == 12
    assert_healthy(report)
    assert informing(report) == {"scale-calibration"}


# hunting


def growth_interval_of_20(path: Path) -> AuditReport:
    return fit(path, mlp(), scaler=dynamic(growth_interval=20), steps=300, every=20)


def attention_with_a_growth_interval_of_10(path: Path) -> AuditReport:
    return fit(path, encoder(), copying, scaler=dynamic(growth_interval=10), steps=200, every=20)


def summed_loss_hunts_below_one(path: Path) -> AuditReport:
    model = mlp(1, out=4)

    def loss(model: nn.Module, step: int) -> torch.Tensor:
        x = numbers(step, 512, WIDTH)
        return (model(x).float() - 1000 * (1 + x[:, :4])).square().sum()

    optimizer = torch.optim.SGD(model.parameters(), lr=1e-12)
    return fit(path, model, loss, scaler=dynamic(growth_interval=20), optimizer=optimizer, steps=200, every=20)


@pytest.mark.parametrize(
    "script", [growth_interval_of_20, attention_with_a_growth_interval_of_10, summed_loss_hunts_below_one]
)
def test_probing_for_a_larger_scale_now_and_then_is_normal(script: Script, audited: Audited) -> None:
    report = audited(script)

    assert_healthy(report)
    assert informing(report) <= {"scale-hunting", "gradient-headroom-low"}
    numbers = evidence(the(report, "scale-hunting"))
    assert 0 < numbers["skip_rate"] < 0.12
    assert numbers["num_growths"] >= 3


def test_a_scale_may_hunt_below_one(audited: Audited) -> None:
    report = audited(summed_loss_hunts_below_one)

    assert max(scale for step, scale in report.history.scale_points if step > 100) < 1.0
