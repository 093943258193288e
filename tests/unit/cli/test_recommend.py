from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from click.testing import Result

from gradaudit.reporters.snippets import power_of_two, torch_lines
from tests.unit.cli.conftest import Audit
from tests.unit.reporters import reports

Invoke = Callable[..., Result]

SETTINGS = """scaler = torch.amp.GradScaler(
    "cpu",
    init_scale=2.0**14,
    growth_factor=2.0,
    backoff_factor=0.5,
    growth_interval=500,
)
"""


def test_the_settings_come_with_effect_and_reasons_and_can_be_pasted(
    gradaudit: Invoke, audited: Audit, run_dir: Path
) -> None:
    result = gradaudit("recommend", run_dir, "--for", "torch")

    assert result.exit_code == 0
    assert f"\n{SETTINGS}" in result.stdout
    assert "1 (between 0 and 3)" in result.stdout
    assert "47.0 dB" in result.stdout
    assert "at 500 steps between doublings" in result.stdout


def test_the_pasted_lines_make_a_scaler_with_these_settings(gradaudit: Invoke, audited: Audit, run_dir: Path) -> None:
    torch = pytest.importorskip("torch")
    lines = json.loads(gradaudit("recommend", run_dir, "--format", "json").stdout)["lines"]
    names: dict[str, Any] = {"torch": torch}
    exec("\n".join(lines), names)

    assert names["scaler"].get_scale() == 16384.0
    assert names["scaler"].get_growth_interval() == 500


def test_json_holds_the_recommendation_as_the_report_does(gradaudit: Invoke, audited: Audit, run_dir: Path) -> None:
    body = json.loads(gradaudit("recommend", run_dir, "--format", "json").stdout)

    assert body["format"] == "gradaudit-recommendation"
    assert body["for"] == "torch"
    assert body["recommendation"] == reports.underflow().to_dict()["recommendation"]


def test_another_framework_is_a_usage_error_that_lists_what_there_is(
    gradaudit: Invoke, audited: Audit, run_dir: Path
) -> None:
    result = gradaudit("recommend", run_dir, "--for", "fairseq")

    assert result.exit_code == 2
    assert "'fairseq' is not supported, only torch. See gradaudit recommend --help." in result.stderr
    assert len(result.stderr.splitlines()) == 1


def test_settings_that_may_stay_give_no_lines(gradaudit: Invoke, audited: Audit, run_dir: Path) -> None:
    audited.reports = [reports.healthy()]
    result = gradaudit("recommend", run_dir)

    assert "keep the scaler's settings" in result.stdout
    assert "GradScaler(" not in result.stdout


def test_a_run_without_recommendation_says_where_to_look(gradaudit: Invoke, audited: Audit, run_dir: Path) -> None:
    audited.reports = [replace(reports.healthy(), recommendation=None)]
    result = gradaudit("recommend", run_dir)

    assert result.exit_code == 0
    assert f"gradaudit report {run_dir}" in result.stdout
    assert json.loads(gradaudit("recommend", run_dir, "--format", "json").stdout)["recommendation"] is None


@pytest.mark.parametrize("meta", [{}, {"autocast": [], "scalers": []}, {"autocast": [{"device": "cuda"}]}])
def test_lines_are_for_cuda_where_the_run_does_not_say(meta: dict[str, Any]) -> None:
    assert torch_lines(reports.recommendation(), meta)[1] == '    "cuda",'


def test_a_sharded_scaler_stays_one() -> None:
    lines = torch_lines(reports.recommendation(), {"scalers": [{"class": "ShardedGradScaler"}]})

    assert lines[0] == "scaler = ShardedGradScaler("


def test_bf16_needs_no_scaler() -> None:
    lines = torch_lines(reports.recommendation(precision="bf16"), {})

    assert "torch.bfloat16" in lines[0]
    assert not any("init_scale" in line for line in lines)


def test_where_no_scale_will_do_only_leaving_autocast_is_shown() -> None:
    lines = torch_lines(reports.recommendation(precision="fp32-modules"), {})

    assert 'with torch.autocast("cuda", enabled=False):' in lines
    assert not any("init_scale" in line for line in lines)


def test_a_scale_is_written_as_a_power_where_it_is_one() -> None:
    assert power_of_two(65536.0) == "2.0**16"
    assert power_of_two(1.0) == "2.0**0"
    assert power_of_two(0.125) == "2.0**-3"
    assert power_of_two(3000.0) == "3000.0"
