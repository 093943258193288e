from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
from click.testing import Result

from gradaudit.cli.replay import TORCH_DEFAULTS, recorded_settings
from tests.factory import meta, scaler, write_run
from tests.unit.cli.conftest import TorchPolicy

Invoke = Callable[..., Result]

pytestmark = pytest.mark.usefixtures("audited")


def test_prediction_stands_beside_the_record(gradaudit: Invoke, replayed: list[TorchPolicy], run_dir: Path) -> None:
    result = gradaudit("replay", run_dir, "--init-scale", "1024")
    shown = " ".join(result.stdout.split())

    assert result.exit_code == 0, result.output
    assert "init_scale 2^10 (1,024), growth_interval 90 steps, growth_factor 2, backoff_factor 0.5" in shown
    assert "skipped steps 4 3 (between 2 and 5)" in shown
    assert "skip rate 1.00 % 0.750 %" in shown
    assert "lowest SQNR 12.3 dB 44.0 dB" in shown
    assert "lowest scale 2^2 (4) 2^9 (512)" in shown
    assert "highest scale 2^6 (64) 2^10 (1,024)" in shown


def test_settings_not_given_stay_as_recorded(gradaudit: Invoke, replayed: list[TorchPolicy], run_dir: Path) -> None:
    gradaudit("replay", run_dir, "--growth-factor", "4", "--backoff-factor", "0.25", "--growth-interval", "7")
    gradaudit("replay", run_dir)

    assert replayed == [TorchPolicy(64.0, 7, 4.0, 0.25), TorchPolicy(64.0, 90, 2.0, 0.5)]


def test_a_run_without_scaler_is_replayed_with_torchs_defaults() -> None:
    assert recorded_settings({}) == TORCH_DEFAULTS
    assert recorded_settings(meta(scalers=[scaler(enabled=False, init_scale=4.0)])) == TORCH_DEFAULTS


def test_torchs_defaults_are_torchs() -> None:
    torch = pytest.importorskip("torch")
    state = torch.amp.GradScaler("cpu").state_dict()

    assert {
        "init_scale": state["scale"],
        "growth_interval": state["growth_interval"],
        "growth_factor": state["growth_factor"],
        "backoff_factor": state["backoff_factor"],
    } == TORCH_DEFAULTS


def test_json_holds_both_sides_and_every_change_of_scale(
    gradaudit: Invoke, replayed: list[TorchPolicy], run_dir: Path
) -> None:
    body = json.loads(gradaudit("replay", run_dir, "--format", "json").stdout)

    assert body["format"] == "gradaudit-replay"
    assert body["policy"] == {
        "name": "torch", "init_scale": 64.0, "growth_interval": 90, "growth_factor": 2.0, "backoff_factor": 0.5,
    }  # fmt: skip
    assert body["recorded"]["num_skipped"] == 4
    assert body["predicted"]["num_skipped_high"] == 5
    assert body["predicted"]["scale_points"] == [[0, 1024.0], [2, 512.0]]


def test_a_setting_out_of_range_is_a_usage_error(gradaudit: Invoke, replayed: list[TorchPolicy], run_dir: Path) -> None:
    result = gradaudit("replay", run_dir, "--growth-factor", "1")

    assert result.exit_code == 2
    assert result.stderr == "Error: growth_factor must be greater than 1, not 1.0. See gradaudit replay --help.\n"


def test_a_run_without_steps_has_nothing_to_replay(
    gradaudit: Invoke, replayed: list[TorchPolicy], tmp_path: Path
) -> None:
    empty = write_run(tmp_path / "empty")

    assert gradaudit("replay", empty).stdout == "Nothing to replay: the run recorded no step.\n"
    assert json.loads(gradaudit("replay", empty, "--format", "json").stdout)["predicted"]["scale_points"] == []
