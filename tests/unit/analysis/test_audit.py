from __future__ import annotations

import json
import os
import time
from pathlib import Path
from typing import Any

import pytest

from gradaudit.analysis import audit as audit_module
from gradaudit.analysis.audit import CHECK_IDS, audit
from gradaudit.analysis.checks import Check, Facts
from gradaudit.analysis.checks.base import percent, power
from gradaudit.analysis.context import MAX_STEPS
from gradaudit.analysis.report import AuditReport, Finding
from gradaudit.store.host import host_id
from gradaudit.store.reader import Run
from tests import factory
from tests.unit.analysis.runs import HIDDEN, LOSS, WEIGHT, analysis_of, run_of, samples, scaled_steps, steps, tensors


def sound(report: AuditReport) -> AuditReport:
    """No check failed, and the report can be written."""
    assert [check for check in report.checks if check.status == "errored"] == []
    assert tuple(check.id for check in report.checks) == CHECK_IDS
    json.dumps(report.to_dict(), allow_nan=False)
    return report


def underflowing(path: Path) -> Run:
    """Two findings: gradients that vanish at scale 1, and an interval too long to grow."""
    rows = [row for i in range(12) for row in samples(i, {-20: 50, -22: 50}, scale=1.0)]
    return run_of(path, steps(12, scale=1.0, exponent=-20), rows)


# runs with little or nothing in them


def test_an_empty_run_gets_a_report(tmp_path: Path) -> None:
    report = sound(audit(run_of(tmp_path, [], [], table=[])))

    assert report.verdict.level == "healthy"
    assert "Nothing to judge" in report.verdict.summary
    assert (report.run.num_steps, report.run.loss_first, report.run.scale_first) == (0, None, None)
    assert report.recommendation is None
    assert report.layers == ()


def test_a_run_of_one_step_gets_a_report(tmp_path: Path) -> None:
    report = sound(audit(run_of(tmp_path, steps(1), samples(0, {0: 50, -2: 50}))))

    assert report.verdict.level == "healthy"
    assert report.run.num_steps == report.run.num_sampled == 1
    assert [row.fqn for row in report.layers] == ["hidden", "hidden.weight"]


def test_steps_that_were_never_sampled_get_a_report(tmp_path: Path) -> None:
    report = sound(audit(run_of(tmp_path, steps(30, sampled=False))))

    assert report.verdict.level == "healthy"
    assert report.recommendation is not None
    assert report.recommendation.current.min_sqnr_db is None


def test_a_run_without_a_scaler_says_so(tmp_path: Path) -> None:
    rows = steps(20, scale=1.0, scaler=None, update=None, growth_tracker=None, found_inf=None, scaled=False)
    report = sound(audit(run_of(tmp_path, rows, samples(0, {0: 50}, scale=1.0, scaled=False), scalers=[])))

    skipped = {check.id: check.reason for check in report.checks if check.status == "skipped"}
    assert skipped["scale-hunting"] == "no enabled GradScaler was used"
    assert [finding.id for finding in report.findings] == ["missing-loss-scaling"]
    assert report.run.scale_first is None


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_a_run_without_fp16_is_healthy_and_its_checks_say_why_they_did_not_look(dtype: str, tmp_path: Path) -> None:
    table = [{**row, "dtype": dtype} for row in tensors()]
    report = sound(audit(run_of(tmp_path, steps(20), samples(0, {-30: 50}), table=table)))

    assert report.verdict.level == "healthy"
    assert "No FP16" in report.verdict.summary
    assert all(row.sqnr_db is None for row in report.layers)
    skipped = {check.id: check.reason for check in report.checks if check.status == "skipped"}
    assert skipped["gradient-underflow"] == "nothing ran in FP16"


def test_a_run_of_nothing_but_nan_gets_a_report(tmp_path: Path) -> None:
    rows = scaled_steps([2.0 ** (16 - i) for i in range(40)], set(range(40)), loss=float("nan"), loss_finite=False)
    for row in rows:
        row["param_amax"] = [float("nan")]
        row["nonfinite"] = [WEIGHT]
    sampled = [
        factory.sample(i, t, {}, num_nan=64, scale=2.0 ** (16 - i)) for i in range(0, 40, 5) for t in (LOSS, HIDDEN)
    ]
    report = sound(audit(run_of(tmp_path, rows, sampled)))

    assert report.verdict.level == "failing"
    assert [finding.id for finding in report.findings] == [
        "unlocated-nonfinite",
        "scale-collapse",
        "never-applied",
    ]
    assert [row.zones["nan"] for row in report.layers] == [1.0]
    assert report.layers[0].amax_log2 is None


def test_a_tensor_without_elements_is_no_trouble(tmp_path: Path) -> None:
    table = [*tensors(), factory.tensor(3, "empty", shape=[0, 8]), factory.tensor(4, "empty.weight", "param_grad")]
    table[4]["shape"] = [0]
    rows = [*samples(0, {0: 50, -2: 50}), factory.sample(0, 3, {}), factory.sample(0, 4, {})]
    report = sound(audit(run_of(tmp_path, steps(6, param_amax=[0.5, 0.0]), rows, table=table)))

    assert report.verdict.level == "healthy"
    (empty,) = [row for row in report.layers if row.fqn == "empty"]
    assert set(empty.zones.values()) == {0.0}
    assert empty.sqnr_db is None


def test_names_in_any_script_come_through(tmp_path: Path) -> None:
    table = tensors()
    table[HIDDEN]["fqn"] = "\u0441\u043b\u043e\u0439.\u5c42.\N{SNOWMAN}[0]"
    rows = [row for i in range(12) for row in samples(i, {-20: 50, -22: 50}, scale=1.0)]
    report = sound(audit(run_of(tmp_path, steps(12, scale=1.0, exponent=-20), rows, table=table)))

    (finding,) = [finding for finding in report.findings if finding.id == "gradient-underflow"]
    assert finding.where[0].name == "\u0441\u043b\u043e\u0439.\u5c42.\N{SNOWMAN}[0]"
    assert "\N{SNOWMAN}" in finding.summary


# live runs


def test_samples_of_tensors_that_the_table_does_not_have_yet_are_left_out(tmp_path: Path) -> None:
    """run.json is written now and then, parts more often: for a moment it lags."""
    rows = [*samples(0, {0: 50, -2: 50}), factory.sample(0, 3, {0: 5}), factory.sample(0, 9, {0: 5})]
    table = tensors()
    table[HIDDEN]["parents"] = [LOSS, 7]
    report = sound(audit(run_of(tmp_path, steps(10), rows, table=table)))

    assert [row.tensor for row in report.layers] == [HIDDEN, WEIGHT]
    assert report.verdict.level == "healthy"


def test_a_run_under_way_is_judged_and_called_incomplete(tmp_path: Path) -> None:
    meta = {"ended": None, "pid": os.getpid(), "host": host_id(), "heartbeat_at": time.time()}
    report = sound(audit(run_of(tmp_path, steps(10), samples(0, {0: 50, -2: 50}), **meta)))

    assert report.run.ended == "running"
    assert not report.run.complete
    assert report.run.incomplete_because == ("the run is still being recorded",)


def test_what_recording_lost_is_said(tmp_path: Path) -> None:
    meta = {"errors": ["capture stopped at step 3: ValueError: x"], "drops": {"sampled_steps": 4}}
    exception = {"type": "RuntimeError", "message": "boom", "file": "train.py", "line": 3}
    report = sound(audit(run_of(tmp_path, steps(4), **meta, ended="exception", exception=exception)))

    assert not report.run.complete
    assert report.run.incomplete_because[0] == "capture stopped at step 3: ValueError: x"
    assert "4 sampled steps were dropped" in report.run.incomplete_because[1]
    assert report.run.exception == "RuntimeError: boom"


# checks


def test_a_check_that_fails_costs_its_own_result_only(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(facts: Facts) -> list[Finding]:
        raise ZeroDivisionError("division by zero")

    checks = tuple(Check(c.id, broken) if c.id == "scale-never-grew" else c for c in audit_module.CHECKS)
    monkeypatch.setattr(audit_module, "CHECKS", checks)
    report = audit(underflowing(tmp_path))

    (errored,) = [check for check in report.checks if check.status == "errored"]
    assert (errored.id, errored.reason) == ("scale-never-grew", "ZeroDivisionError: division by zero")
    assert [finding.id for finding in report.findings] == ["gradient-underflow"]
    assert len(report.checks) == len(CHECK_IDS)


def test_findings_are_sorted_by_how_bad_and_how_sure(tmp_path: Path) -> None:
    report = sound(audit(underflowing(tmp_path)))

    assert [finding.id for finding in report.findings] == ["gradient-underflow", "scale-never-grew"]
    assert report.verdict.level == "attention"
    assert report.verdict.summary.startswith("Gradients are too small")
    assert report.verdict.summary.endswith("1 more finding below.")


@pytest.mark.parametrize(
    ("ignore", "left"),
    [
        (["gradient-underflow"], ["scale-never-grew"]),
        (["gradient-underflow", "scale-never-grew"], []),
        (["gradient-underflow:hid*"], ["scale-never-grew"]),
        (["gradient-underflow:other*"], ["gradient-underflow", "scale-never-grew"]),
        (["gradient*"], ["gradient-underflow", "scale-never-grew"]),
        (["scale-hunting"], ["gradient-underflow", "scale-never-grew"]),
    ],
)
def test_ignored_findings_are_gone_before_the_verdict(ignore: list[str], left: list[str], tmp_path: Path) -> None:
    report = sound(audit(underflowing(tmp_path), ignore=ignore))

    assert [finding.id for finding in report.findings] == left
    assert report.verdict.level == ("attention" if left else "healthy")
    assert report.recommendation is not None
    assert report.recommendation.change_needed is bool(left)
    assert {check.status for check in report.checks if check.id == "gradient-underflow"} == {"found"}


def test_a_long_run_is_judged_on_some_of_its_samples_spread_over_it(tmp_path: Path) -> None:
    rows = [row for i in range(300) for row in samples(i, {0: 50, -2: 50})]
    analysis = analysis_of(tmp_path, steps(300), rows)

    chosen = sorted(set(analysis.samples.step[analysis.at_all_scales.rows].tolist()))
    assert len(chosen) == MAX_STEPS
    assert (chosen[0], chosen[-1]) == (0, 299)


def test_skipped_steps_count_neither_for_zones_nor_for_noise(tmp_path: Path) -> None:
    rows = scaled_steps([2.0**17, 2.0**16, 2.0**16], {0})
    sampled = [
        factory.sample(0, HIDDEN, {15: 10}, num_inf=90, scale=2.0**17),
        *samples(1, {0: 50, -2: 50}),
        *samples(2, {0: 50, -2: 50}),
    ]
    report = sound(audit(run_of(tmp_path, rows, sampled)))

    (hidden,) = [row for row in report.layers if row.tensor == HIDDEN]
    assert hidden.zones["overflow"] == 0.0
    assert hidden.num_samples == 2
    assert hidden.sqnr_db is not None
    assert hidden.sqnr_db > 60


@pytest.mark.parametrize(("scale", "text"), [(65536.0, "2^16"), (0.5, "2^-1"), (45875.19921875, "45875.2"), (0.0, "0")])
def test_scales_are_written_as_powers_where_they_are_some(scale: float, text: str) -> None:
    assert power(scale) == text


@pytest.mark.parametrize(("share", "text"), [(0.29234, "29.2 %"), (1.0, "100 %"), (0.0005, "0.05 %"), (0.0, "0 %")])
def test_shares_are_written_with_three_digits(share: float, text: str) -> None:
    assert percent(share) == text


def test_an_analysis_at_hand_is_not_made_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = underflowing(tmp_path)
    made = analysis_of(tmp_path / "again", steps(3), samples(0, {0: 9}))

    def never(*args: Any) -> None:
        raise AssertionError

    monkeypatch.setattr(audit_module, "analyse", never)
    assert audit(run, analysis=made).run.num_steps == 3
