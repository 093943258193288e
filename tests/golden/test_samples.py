"""The recorded sample runs give the reports beside them. `--update-golden` writes those anew: read the diff."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest

from gradaudit.analysis.audit import audit
from gradaudit.reporters import json_
from gradaudit.store import open_run

SAMPLES = Path(__file__).resolve().parent.parent.parent / "sample_runs"
RUNS = sorted(path.parent for path in SAMPLES.glob("*/run.json"))

EXPECTED = {
    "healthy": ("healthy", set()),
    "gradient_underflow": ("attention", {"gradient-underflow", "scale-never-grew"}),
    "backward_overflow": ("attention", {"gradient-overflow", "static-scale-unsafe"}),
    "thrashing": ("attention", {"scale-thrashing", "gradient-overflow"}),
    "forward_overflow": ("failing", {"forward-overflow", "scale-collapse"}),
    "empty_window": ("failing", {"scale-window-empty", "gradient-underflow"}),
}
"""What each script was written to show: level, and the findings that alarm."""


def test_every_sample_script_has_a_recorded_run_and_an_expectation() -> None:
    scripts = {path.stem for path in SAMPLES.glob("*.py")}

    assert scripts == {path.name for path in RUNS} == set(EXPECTED)
    assert len(scripts) >= 6


@pytest.mark.parametrize("path", RUNS, ids=lambda path: path.name)
def test_a_sample_run_gives_the_report_beside_it(path: Path, request: pytest.FixtureRequest) -> None:
    beside = path.with_name(f"{path.name}.report.json")
    text = json_.render(audit(open_run(path)))

    if request.config.getoption("--update-golden"):
        beside.write_text(text, encoding="utf-8")

    assert_same(json.loads(text), json.loads(beside.read_text(encoding="utf-8")))


@pytest.mark.parametrize("path", RUNS, ids=lambda path: path.name)
def test_a_sample_run_shows_what_its_script_was_written_to_show(path: Path) -> None:
    level, alarms = EXPECTED[path.name]

    report = audit(open_run(path))

    assert report.verdict.level == level
    assert {finding.id for finding in report.findings if finding.severity != "info"} == alarms
    assert not [check for check in report.checks if check.status == "errored"]


@pytest.mark.parametrize("path", RUNS, ids=lambda path: path.name)
def test_the_numbers_of_a_sample_report_agree_with_each_other(path: Path) -> None:
    report = audit(open_run(path))

    assert report.run.num_applied + report.run.num_skipped == report.run.num_steps > 0
    assert len(report.history.skipped_steps) == report.run.num_skipped
    for layer in report.layers:
        assert math.isclose(sum(layer.zones.values()), 1.0, abs_tol=1e-12)
        assert layer.sqnr_db is None or layer.own_sqnr_db is None or layer.sqnr_db <= layer.own_sqnr_db + 1e-9


@pytest.mark.parametrize("path", RUNS, ids=lambda path: path.name)
def test_a_sample_run_is_small_and_says_nothing_of_the_machine(path: Path) -> None:
    size = sum(file.stat().st_size for file in path.rglob("*") if file.is_file())
    meta = json.loads((path / "run.json").read_text(encoding="utf-8"))

    assert size < 300_000
    assert meta["argv"] == [f"sample_runs/{path.name}.py"]
    assert not [event["file"] for event in open_run(path).events() if (event["file"] or "").startswith("/")]


def assert_same(found: Any, expected: Any, where: str = "report") -> None:
    if isinstance(expected, dict):
        assert found.keys() == expected.keys(), where
        for key in expected:
            assert_same(found[key], expected[key], f"{where}.{key}")
    elif isinstance(expected, list):
        assert len(found) == len(expected), where
        for i, (one, two) in enumerate(zip(found, expected, strict=True)):
            assert_same(one, two, f"{where}[{i}]")
    elif isinstance(expected, float) and isinstance(found, float):
        assert math.isclose(found, expected, rel_tol=1e-9, abs_tol=1e-12), where
    else:
        assert found == expected, where
