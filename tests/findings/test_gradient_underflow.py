"""Gradients that vanish in FP16, and zeros that are zero at every scale."""

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
    bias_before_a_norm,
    classes,
    classification,
    convnet,
    copying,
    dynamic,
    encoder,
    evidence,
    first_token,
    fit,
    frozen_layers,
    informing,
    labels,
    mlp,
    picture_classification,
    places,
    recurrent,
    the,
    times,
)

Audited = Callable[[Script], AuditReport]


def loss_divided_by_the_size_of_the_data(path: Path) -> AuditReport:
    return fit(path, mlp(5), times(classification, 1 / 1800), scaler=dynamic(init_scale=1.0, growth_interval=60))


def attention_with_a_tiny_auxiliary_weight(path: Path) -> AuditReport:
    return fit(path, encoder(layers=2), times(copying, 1e-5), scaler=dynamic(init_scale=16.0, growth_interval=59))


def recurrent_net_with_a_tiny_loss(path: Path) -> AuditReport:
    return fit(path, recurrent(), times(first_token, 1e-6), scaler=dynamic(init_scale=256.0, growth_interval=59))


def pictures_with_a_tiny_loss(path: Path) -> AuditReport:
    return fit(
        path, convnet(), times(picture_classification, 1e-4), scaler=dynamic(init_scale=64.0, growth_interval=59)
    )


@pytest.mark.parametrize(
    "script",
    [
        loss_divided_by_the_size_of_the_data,
        attention_with_a_tiny_auxiliary_weight,
        recurrent_net_with_a_tiny_loss,
        pictures_with_a_tiny_loss,
    ],
)
def test_gradients_that_vanish_at_the_scale_in_force_are_underflow(script: Script, audited: Audited) -> None:
    report = audited(script)

    assert_sound(report)
    assert set(alarming(report)) == {"gradient-underflow"}
    finding = the(report, "gradient-underflow")
    assert finding.scale_can_fix == "yes"
    assert finding.confidence == "high"
    assert finding.where
    numbers = evidence(finding)
    assert numbers["sqnr_db"] < 40
    assert numbers["num_tensors_below_target"] >= 1
    low = [row for row in report.layers if row.own_sqnr_db is not None and row.own_sqnr_db < 40]
    assert len(low) >= 1
    assert report.recommendation is not None
    assert report.recommendation.init_scale > numbers["scale"]
    # what a histogram recorded at too small a scale tells of a larger one is a lower bound
    assert report.recommendation.predicted.min_sqnr_db > 35 > report.recommendation.current.min_sqnr_db + 10


def one_head_of_two_has_a_tiny_weight(path: Path) -> AuditReport:
    torch.manual_seed(0)

    def loss(model: nn.Module, step: int) -> torch.Tensor:
        x, y = classes(step)
        large, small = model(x)
        return F.cross_entropy(large, y) + 3e-8 * F.cross_entropy(small, (y + 1) % NUM_CLASSES)

    return fit(path, TwoHeads(), loss, scaler=dynamic(init_scale=2.0**12))


def test_only_the_branch_that_vanishes_is_named(audited: Audited) -> None:
    report = audited(one_head_of_two_has_a_tiny_weight)

    assert_sound(report)
    assert "gradient-underflow" in alarming(report)
    assert {name.split(".")[0].split(" ")[0] for name in places(the(report, "gradient-underflow"))} <= {"small"}
    healthy = [row for row in report.layers if row.fqn.startswith(("trunk", "large")) and row.own_sqnr_db is not None]
    assert all(row.own_sqnr_db > 40 for row in healthy)


def everything_below_the_head_is_lost(path: Path) -> AuditReport:
    return fit(path, mlp(3), times(classification, 3e-8), scaler=dynamic(init_scale=1.0, growth_interval=59))


def test_layers_that_are_flushed_entirely_are_an_error(audited: Audited) -> None:
    report = audited(everything_below_the_head_is_lost)

    assert_sound(report)
    assert alarming(report)["gradient-underflow"] == "error"
    assert "layer-without-gradient" not in alarming(report), "they have one, FP16 cannot hold it"
    assert the(report, "gradient-underflow").scale_can_fix == "yes"


def mostly_dead_relus(path: Path) -> AuditReport:
    model = mlp(2)
    nn.init.constant_(model[0].bias, -0.5)
    nn.init.constant_(model[2].bias, -0.1)
    return fit(path, model, scaler=dynamic())


def heavy_dropout(path: Path) -> AuditReport:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.ReLU(), nn.Dropout(0.9), nn.Linear(WIDTH, NUM_CLASSES))
    return fit(path, model, scaler=dynamic())


def padded_tokens(path: Path) -> AuditReport:
    def loss(model: nn.Module, step: int) -> torch.Tensor:
        tokens = labels(step, 8, 10, num_classes=20)
        padding = torch.arange(10)[None, :] >= 2 + labels(step + 1, 8, 1, num_classes=4)
        logits = model(tokens, padding)
        return F.cross_entropy(logits.flatten(0, 1), tokens.masked_fill(padding, -100).flatten())

    return fit(path, encoder(), loss, scaler=dynamic())


def unused_embedding_rows(path: Path) -> AuditReport:
    return fit(path, encoder(vocabulary=2000), copying, scaler=dynamic(), steps=40)


@pytest.mark.parametrize(
    "script",
    [mostly_dead_relus, heavy_dropout, padded_tokens, unused_embedding_rows, frozen_layers, bias_before_a_norm],
)
def test_zeros_that_are_zero_at_every_scale_are_no_underflow(script: Script, audited: Audited) -> None:
    report = audited(script)

    assert_healthy(report)
    assert informing(report) <= {"scale-calibration", "gradient-headroom-low"}


@pytest.mark.parametrize("script", [mostly_dead_relus, heavy_dropout, padded_tokens, unused_embedding_rows])
def test_those_look_alikes_do_have_zeros(script: Script, audited: Audited) -> None:
    assert max(row.zones["zero"] for row in audited(script).layers) > 0.6
