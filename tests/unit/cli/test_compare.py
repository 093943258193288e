from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from click.testing import Result

from tests.unit.cli.conftest import Audit
from tests.unit.reporters import reports

Invoke = Callable[..., Result]


@pytest.fixture
def before_and_after(audited: Audit) -> Audit:
    """An under-scaled run and the same one after the cure, one finding new, one layer renamed."""
    before = reports.underflow()
    after = replace(
        before,
        run=replace(before.run, name="tuned", num_skipped=1, loss_last=0.31),
        verdict=reports.healthy().verdict,
        findings=(before.findings[0], reports.finding(id="call-order", severity="warning", title="Clipped too early")),
        layers=(replace(before.layers[3], sqnr_db=47.0), reports.layer("renamed", 50.0, tensor=9)),
    )
    audited.reports = [before, after, before, after]
    return audited


def test_what_changed_is_shown_side_by_side(gradaudit: Invoke, before_and_after: Audit, run_dir: Path) -> None:
    result = gradaudit("compare", run_dir, run_dir)
    shown = " ".join(result.stdout.split())

    assert result.exit_code == 0, result.output
    for words in (
        "run digits tuned",
        "verdict FAILING HEALTHY",
        "skipped steps 4 of 400 1 of 400",
        "skip rate 1.00 % of attempted 0.250 % of attempted",
        "scale range 2^2 (4) to 2^6 (64)",
        "lowest SQNR 12.3 dB 47.0 dB",
        "last loss 0.4213 0.31",
        "new call-order: Clipped too early",
        "fixed gradient-underflow: ",
        "same healthy-overflow: ",
        "+34.7 dB blocks.3.mlp.fc1 (output_grad): 12.3 dB -> 47.0 dB",
        "4 tensors only in A, 1 only in B",
    ):
        assert words in shown


def test_json_holds_the_same(gradaudit: Invoke, before_and_after: Audit, run_dir: Path) -> None:
    body = json.loads(gradaudit("compare", run_dir, run_dir, "--format", "json").stdout)

    assert (body["format"], body["version"]) == ("gradaudit-comparison", 1)
    assert body["a"]["level"] == "failing"
    assert body["b"]["num_skipped"] == 1
    assert [finding["status"] for finding in body["findings"]] == ["new", "fixed", "same"]


def test_a_run_against_itself_has_no_change(gradaudit: Invoke, audited: Audit, run_dir: Path) -> None:
    audited.reports = [reports.healthy()]
    result = gradaudit("compare", run_dir, run_dir)

    assert "Findings: none in either run" in result.stdout
    assert "Largest" not in result.stdout
    assert "only in" not in result.stdout


@pytest.mark.parametrize("name", reports.REPORTS)
def test_any_run_can_be_compared(gradaudit: Invoke, audited: Audit, run_dir: Path, name: str) -> None:
    audited.reports = [reports.REPORTS[name], reports.underflow()] * 2

    assert gradaudit("compare", run_dir, run_dir).exit_code == 0
    assert json.loads(gradaudit("compare", run_dir, run_dir, "--format", "json").stdout)


def test_a_missing_run_is_named(gradaudit: Invoke, audited: Audit, run_dir: Path, tmp_path: Path) -> None:
    result = gradaudit("compare", run_dir, tmp_path / "other")

    assert result.exit_code == 2
    assert str(tmp_path / "other") in result.stderr
