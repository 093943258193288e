"""Every script of this folder, run through the command line as a user would run it, against what its header says."""

from __future__ import annotations

import itertools
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from gradaudit.analysis.audit import audit
from gradaudit.analysis.checks import CHECKS
from gradaudit.analysis.report import AuditReport, Finding
from gradaudit.store import open_run
from tests.cases.headers import Case, Demand, is_at, read_case
from tests.cases.server import Server

HERE = Path(__file__).parent

SCRIPTS = sorted(HERE.glob("*/*.py"))

CASES = [read_case(path) for path in SCRIPTS]

FORWARD_VALUES = (
    "forward-overflow", "forward-headroom-low", "attention-logits-overflow", "masked-row", "reduction-overflow",
    "loss-in-half", "epsilon-flushed", "critical-op-in-half", "nonfinite-input", "nonfinite-buffer",
    "nonfinite-weight", "divergence",
)  # fmt: skip

ORDER_OF_CALLS = (
    "clip-before-unscale", "step-bypasses-scaler", "unscaled-backward", "update-inside-accumulation",
    "missing-update", "double-unscale", "scaler-recreated", "several-scalers", "optimizer-without-gradients",
    "never-applied", "scheduler-ahead", "scaled-gradient-penalty", "hysteresis-growth-bug",
)  # fmt: skip

PRECISION_SET_UP = (
    "half-trainable-params", "swallowed-updates", "optimizer-eps-flushed", "gradient-norm-overflow",
    "scaler-without-fp16", "autocast-inactive", "rank-disagreement", "compiled-blind-spot",
)  # fmt: skip

DEMANDED_ELSEWHERE = {"rank-disagreement"}
"""Needs two processes: tests/findings/test_precision.py."""

COMPARED = (
    "adam_eps_in_half", "box_decoder_assert", "clip_value_hides_inf", "gated_mlp_product", "unscale_every_micro_batch",
    "checkpoint_reentrant", "fused_adam", "hunting", "lstm_by_hand", "wgan_gp",
)  # fmt: skip
"""Scripts of every kind that also run under plain python: they must print the same, to the last digit."""


@pytest.fixture(scope="session")
def server() -> Iterator[Server]:
    opened = Server()
    yield opened
    opened.close()


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.path.stem)
def test_case(case: Case, server: Server, tmp_path: Path) -> None:
    done = server.run(tmp_path, *recording(case, tmp_path))

    assert_ended_as_said(case, done)
    if case.path.stem in COMPARED:
        assert run(tmp_path, str(case.path)).stdout == done.stdout
    report = audit(open_run(tmp_path / "run"))
    assert [check for check in report.checks if check.status == "errored"] == []
    problems = list(complaints(case, report))
    assert problems == [], "\n".join([*problems, "found:", *map(describe, report.findings)])


def test_the_cases_cover_the_catalogue() -> None:
    faulty = [case for case in CASES if not case.is_healthy]
    healthy = [case for case in CASES if case.is_healthy]
    assert len(CASES) >= 70
    assert set(COMPARED) <= {case.path.stem for case in CASES}
    assert len(healthy) >= 30
    assert all(case.demands for case in faulty)
    assert {case.path.parent.name for case in healthy} == {"healthy"}
    assert {case.path.parent.name for case in faulty} == {"faulty"}

    catalogue = {*FORWARD_VALUES, *ORDER_OF_CALLS, *PRECISION_SET_UP}
    assert catalogue - frozenset().union(*(case.demanded for case in faulty)) == DEMANDED_ELSEWHERE
    assert catalogue - frozenset().union(*(case.forbidden for case in healthy)) == set()


def test_headers_name_ids_that_exist() -> None:
    known = {check.id for check in CHECKS}

    assert [case.path.name for case in CASES if (case.demanded | case.allowed | case.forbidden) - known] == []


def test_no_script_knows_of_gradaudit() -> None:
    assert [path.name for path in SCRIPTS if "gradaudit" in path.read_text(encoding="utf-8")] == []


def run(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    command = [sys.executable, *arguments]
    return subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, timeout=120)


def recording(case: Case, folder: Path) -> tuple[str, ...]:
    return ("run", "--quiet", "--out", str(folder / "run"), str(case.path))


def assert_ended_as_said(case: Case, done: subprocess.CompletedProcess[str]) -> None:
    """The exit status is the script's own, its exception is shown, and gradaudit says nothing."""
    assert done.returncode == (1 if case.raises else 0), done.stderr
    assert "gradaudit" not in done.stdout
    if case.raises:
        assert any(line.startswith(case.raises) for line in done.stderr.splitlines()), done.stderr
    else:
        assert "gradaudit" not in done.stderr, done.stderr


def complaints(case: Case, report: AuditReport) -> list[str]:
    """What is wrong with a report, by the header of its case, in words."""
    found = {finding.id for finding in report.findings}
    alarms = {f.id for f in report.findings if f.severity != "info" and f.consequence_of is None}
    wrong = [f"found {id}, which must not be" for id in sorted(case.forbidden & found)]
    wrong += [f"{id} alarms unasked" for id in sorted(alarms - case.demanded - case.allowed - case.forbidden)]
    if not are_met(case, report):
        wrong += [f"not found: {demand}" for demand in case.demands if not any(match(case, demand, report))]
        wrong = wrong or ["two demands are met by one finding only"]
    level = report.verdict.level
    if level != ("healthy" if case.is_healthy else case.verdict):
        wrong.append(f"the verdict is {level}")
    return wrong


def are_met(case: Case, report: AuditReport) -> bool:
    """Whether each demand has a finding of its own."""
    candidates = [match(case, demand, report) for demand in case.demands]
    choices = itertools.product(*([index for index, fits in enumerate(row) if fits] for row in candidates))
    return any(len(set(choice)) == len(choice) for choice in choices)


def match(case: Case, demand: Demand, report: AuditReport) -> list[bool]:
    """For each finding in turn, whether it is what is demanded."""
    return [
        finding.id == demand.id
        and (not demand.lead or (index == 0 and finding.consequence_of is None))
        and (demand.place is None or any(is_at(place, demand.place, case.path) for place in finding.where))
        for index, finding in enumerate(report.findings)
    ]


def describe(finding: Finding) -> str:
    """A finding in one line."""
    places = ", ".join(f"{p.name} ({p.file}:{p.line})" if p.file else p.name for p in finding.where)
    after = f", after {finding.consequence_of}" if finding.consequence_of else ""
    return f"{finding.severity} {finding.id}{after}: {finding.title} [{places}]"
