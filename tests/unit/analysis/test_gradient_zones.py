"""Corners of the zone checks that a real run seldom reaches; what real runs give is in tests/findings."""

from __future__ import annotations

from pathlib import Path

import pytest

from gradaudit.analysis.audit import audit
from gradaudit.analysis.report import AuditReport
from tests import factory
from tests.unit.analysis.runs import HIDDEN, LOSS, WEIGHT, run_of, samples, scaled_steps, steps, tensors


def result_of(report: AuditReport, name: str) -> str:
    (result,) = [check for check in report.checks if check.id == name]
    return f"{result.status}: {result.reason}" if result.reason else result.status


@pytest.mark.parametrize(("num_zero", "found"), [(500, True), (5, False)])
def test_zeros_that_a_larger_scale_fills_are_underflow_if_they_can_hide_enough(
    num_zero: int, found: bool, tmp_path: Path
) -> None:
    """Ten values of 1.5 * 2^-19 keep 40 dB by themselves; each zero beside them may hide up to 2^-25."""
    small = [row for i in range(6) for row in samples(i, {-19: 5, -18: 5}, scale=1.0, num_zero=num_zero)]
    large = [row for i in range(6, 12) for row in samples(i, {-3: 5, -2: 5, -9: num_zero}, scale=65536.0)]
    rows = [factory.step(i, scale=1.0 if i < 6 else 65536.0, param_amax=[1.0]) for i in range(12)]
    report = audit(run_of(tmp_path, rows, [*small, *large]))

    assert ("gradient-underflow" in {finding.id for finding in report.findings}) is found
    if found:
        finding = report.findings[0]
        assert (finding.severity, finding.confidence) == ("warning", "medium")
        assert "zeros that a larger scale turns into values" in finding.summary


def test_where_no_sampled_step_was_clean_underflow_cannot_be_told(tmp_path: Path) -> None:
    rows = [factory.sample(0, LOSS, {20: 4}), factory.sample(0, HIDDEN, {15: 4}, num_inf=3)]
    report = audit(run_of(tmp_path, scaled_steps([65536.0], {0}), rows))

    assert result_of(report, "gradient-underflow") == "skipped: no sampled step was applied with finite gradients"


def test_a_handful_of_steps_says_nothing_of_layers_without_a_gradient(tmp_path: Path) -> None:
    report = audit(run_of(tmp_path, steps(4, param_amax=[0.0])))

    assert result_of(report, "layer-without-gradient") == "skipped: fewer than 5 steps"


@pytest.mark.parametrize("amax", [0.0, None])
def test_a_layer_of_zeros_or_nothing_is_named(amax: float | None, tmp_path: Path) -> None:
    report = audit(run_of(tmp_path, steps(5, param_amax=[amax])))

    (finding,) = report.findings
    assert (finding.id, [place.name for place in finding.where]) == ("layer-without-gradient", ["hidden"])


def test_a_layer_that_is_flushed_is_underflow_and_not_without_gradient(tmp_path: Path) -> None:
    rows = [
        row
        for i in range(6)
        for row in (
            factory.sample(i, LOSS, {-22: 4}, scale=1.0),
            factory.sample(i, HIDDEN, {}, num_zero=64, scale=1.0),
            factory.sample(i, WEIGHT, {}, num_zero=64, scale=1.0),
        )
    ]
    report = audit(run_of(tmp_path, steps(6, scale=1.0, param_amax=[0.0]), rows))

    alarming = {finding.id: finding.severity for finding in report.findings}
    assert alarming["gradient-underflow"] == "error"
    assert "layer-without-gradient" not in alarming


def test_frozen_and_empty_parameters_have_no_gradient_to_miss(tmp_path: Path) -> None:
    frozen, empty = tensors(), tensors()
    frozen[WEIGHT]["trainable"] = False
    empty[WEIGHT]["shape"] = [0, 4]

    for table in (frozen, empty):
        folder = tmp_path / str(table is frozen)
        assert audit(run_of(folder, steps(9, param_amax=[None]), table=table)).findings == ()
