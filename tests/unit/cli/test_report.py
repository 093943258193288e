from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from click.testing import Result

from gradaudit.cli._common import MAX_WIDTH, terminal_options
from gradaudit.reporters import FORMATS, renderer
from tests.unit.cli.conftest import IDS, Audit
from tests.unit.reporters import reports

Invoke = Callable[..., Result]


@pytest.mark.parametrize("name", FORMATS)
def test_the_report_is_printed_in_the_format_asked_for(
    gradaudit: Invoke, audited: Audit, run_dir: Path, name: str
) -> None:
    result = gradaudit("report", run_dir, "--format", name)

    assert result.exit_code == 0, result.output
    assert result.stdout == renderer(name)(reports.underflow())
    assert result.stderr == ""


def test_output_goes_to_the_file_and_not_to_the_terminal(
    gradaudit: Invoke, audited: Audit, run_dir: Path, tmp_path: Path
) -> None:
    result = gradaudit("report", run_dir, "--format", "json", "--output", tmp_path / "report.json")

    assert result.output == ""
    assert json.loads((tmp_path / "report.json").read_text())["format"] == "gradaudit-report"


@pytest.mark.parametrize("target", ["missing/report.txt", "."])
def test_a_file_that_cannot_be_written_is_one_sentence(
    gradaudit: Invoke, audited: Audit, run_dir: Path, tmp_path: Path, target: str
) -> None:
    result = gradaudit("report", run_dir, "--output", tmp_path / target)

    assert result.exit_code == 2
    assert str(tmp_path / target) in result.stderr
    assert "choose another --output" in result.stderr
    assert len(result.stderr.splitlines()) == 1


@pytest.mark.parametrize(
    ("severity", "fail_on", "status"),
    [
        ("error", "error", 1), ("error", "warning", 1), ("error", "never", 0), ("error", None, 0),
        ("warning", "error", 0), ("warning", "warning", 1), ("warning", "never", 0),
        ("info", "error", 0), ("info", "warning", 0),
    ],
)  # fmt: skip
def test_the_exit_status_is_1_when_a_finding_is_as_severe_as_fail_on(
    gradaudit: Invoke, audited: Audit, run_dir: Path, severity: str, fail_on: str | None, status: int
) -> None:
    audited.reports = [reports.healthy(findings=(reports.finding(severity=severity),))]
    options = ["--fail-on", fail_on] if fail_on else []

    assert gradaudit("report", run_dir, *options).exit_code == status


def test_what_to_ignore_reaches_the_audit(gradaudit: Invoke, audited: Audit, run_dir: Path) -> None:
    result = gradaudit("report", run_dir, "--ignore", "call-order", "--ignore", "gradient-underflow:blocks.*:x")

    assert result.exit_code == 0
    assert audited.ignored == ("call-order", "gradient-underflow:blocks.*:x")


def test_an_unknown_check_to_ignore_names_the_close_ones(gradaudit: Invoke, audited: Audit, run_dir: Path) -> None:
    result = gradaudit("report", run_dir, "--ignore", "gradient-undrflow:fc")

    assert result.exit_code == 2
    assert (
        "there is no check 'gradient-undrflow', did you mean gradient-underflow? See gradaudit report" in result.stderr
    )
    assert len(result.stderr.splitlines()) == 1


def test_an_unknown_check_like_no_other_names_all(gradaudit: Invoke, audited: Audit, run_dir: Path) -> None:
    result = gradaudit("report", run_dir, "--ignore", "xyz")

    assert result.exit_code == 2
    assert ", ".join(IDS) in result.stderr


def test_a_damaged_run_is_one_sentence(gradaudit: Invoke, audited: Audit, run_dir: Path) -> None:
    (run_dir / "run.json").write_text("{")
    result = gradaudit("report", run_dir)

    assert result.exit_code == 2
    assert str(run_dir / "run.json") in result.stderr
    assert len(result.stderr.splitlines()) == 1


def test_a_page_without_jinja2_says_what_to_install(
    gradaudit: Invoke, audited: Audit, run_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(__import__("sys").modules, "jinja2", None)
    result = gradaudit("report", run_dir, "--format", "html")

    assert result.exit_code == 2
    assert result.stderr == "Error: The HTML report needs jinja2: pip install 'gradaudit[html]'.\n"


def test_a_name_that_is_no_unicode_still_prints(gradaudit: Invoke, audited: Audit, run_dir: Path) -> None:
    audited.reports = [replace(reports.underflow(), layers=(reports.layer("\udcff", 3.0),))]

    assert gradaudit("report", run_dir).exit_code == 0


class Terminal:
    def isatty(self) -> bool:
        return True


def test_colour_and_width_come_from_the_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.stdout", Terminal())
    monkeypatch.setenv("COLUMNS", "90")
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.delenv("NO_COLOR", raising=False)
    assert terminal_options() == {"width": 90, "colour": True}
    assert terminal_options(to_file=True) == {"width": 80, "colour": False}

    monkeypatch.setenv("COLUMNS", "300")
    assert terminal_options()["width"] == MAX_WIDTH

    monkeypatch.setenv("NO_COLOR", "1")
    assert terminal_options()["colour"] is False

    monkeypatch.delenv("NO_COLOR")
    monkeypatch.setenv("TERM", "dumb")
    assert terminal_options()["colour"] is False
