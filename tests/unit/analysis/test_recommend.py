from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from gradaudit.analysis.audit import audit
from gradaudit.analysis.report import Recommendation
from tests import factory
from tests.unit.analysis.runs import HIDDEN, LOSS, run_of, samples, scaled_steps, steps, tensors


def recommended(path: Path, *args: Any, **more: Any) -> Recommendation:
    found = audit(run_of(path, *args, **more)).recommendation
    assert found is not None
    return found


def every_step(count: int, exponents: dict[int, int], **more: Any) -> list[dict[str, Any]]:
    return [row for i in range(count) for row in samples(i, exponents, **more)]


def test_a_healthy_run_is_told_to_change_nothing(tmp_path: Path) -> None:
    found = recommended(tmp_path, steps(20), every_step(20, {0: 50, -3: 50}))

    assert not found.change_needed
    assert (found.init_scale, found.growth_interval) == (65536.0, 2000)
    assert (found.growth_factor, found.backoff_factor) == (2.0, 0.5)
    assert found.predicted == found.current
    assert "change nothing" in found.reasons[0]


def test_its_own_settings_are_kept_whatever_they_are(tmp_path: Path) -> None:
    scaler = factory.scaler(init_scale=1024.0, growth_interval=7, growth_factor=3.0, backoff_factor=0.3)
    found = recommended(tmp_path, steps(20), every_step(20, {0: 50, -3: 50}), scalers=[scaler])

    assert (found.init_scale, found.growth_interval, found.growth_factor) == (1024.0, 7, 3.0)
    assert found.current_settings is not None
    assert found.current_settings.backoff_factor == 0.3


def test_hunting_often_is_the_settings_choice_and_no_reason_to_change(tmp_path: Path) -> None:
    scales = [2.0**17 if i % 5 == 4 else 2.0**16 for i in range(100)]
    rows = scaled_steps(scales, set(range(4, 100, 5)))
    found = recommended(tmp_path, rows, every_step(4, {0: 50, -3: 50}), scalers=[factory.scaler(growth_interval=4)])

    assert found.current.skip_rate == pytest.approx(0.2)
    assert not found.change_needed


def test_gradients_that_vanish_get_a_scale_in_the_window_one_binade_below_its_top(tmp_path: Path) -> None:
    rows = every_step(40, {-20: 50, -22: 50}, scale=1.0)
    found = recommended(tmp_path, steps(40, scale=1.0, exponent=-20), rows)

    assert found.change_needed
    assert found.precision == "fp16"
    assert found.window.high_log2 == 35
    assert found.init_scale == 2.0**34
    assert found.window.low_log2 is not None
    assert found.min_scale == 2.0**found.window.low_log2 or found.window.low_log2 > 0
    assert found.predicted.min_sqnr_db is not None
    assert found.current.min_sqnr_db is not None
    assert found.predicted.min_sqnr_db > 40 > found.current.min_sqnr_db


@pytest.mark.parametrize(("num_steps", "interval"), [(40, 200), (1200, 300), (5000, 1000)])
def test_the_interval_fits_the_run_and_never_skips_more_than_half_a_percent(
    num_steps: int, interval: int, tmp_path: Path
) -> None:
    rows = every_step(10, {-20: 50, -22: 50}, scale=1.0)
    found = recommended(tmp_path, steps(num_steps, scale=1.0, exponent=-20), rows)

    assert found.growth_interval == interval


def test_a_fault_that_no_scale_cures_keeps_the_settings_and_points_at_precision(tmp_path: Path) -> None:
    scales = [2.0 ** (16 - i) for i in range(30)]
    rows = scaled_steps(scales, set(range(30)), loss=float("nan"), loss_finite=False)
    found = recommended(tmp_path, rows)

    assert found.change_needed
    assert found.precision == "fp32-modules"
    assert found.init_scale == 65536.0
    assert "No scale will do" in found.reasons[0]


def test_an_empty_window_names_both_sides(tmp_path: Path) -> None:
    table = [*tensors(), factory.tensor(3, "other", parents=[LOSS])]
    rows = [
        row
        for i in range(10)
        for row in (
            factory.sample(i, LOSS, {0: 4}),
            factory.sample(i, HIDDEN, {-24: 50, -25: 50}),
            factory.sample(i, 3, {14: 50, 13: 50}),
        )
    ]
    found = recommended(tmp_path, steps(10), rows, table=table)

    assert found.precision == "fp32-modules"
    assert found.window.is_empty
    assert "hidden" in found.reasons[0]
    assert "other" in found.reasons[0]


def test_where_every_step_overflowed_the_start_is_lowered_and_its_limit_owned_up_to(tmp_path: Path) -> None:
    rows = scaled_steps([2.0**24] * 20, set(range(20)))
    sampled = [
        row
        for i in range(0, 20, 5)
        for row in (
            factory.sample(i, LOSS, {20: 4}, scale=2.0**24),
            factory.sample(i, HIDDEN, {15: 40}, num_inf=10, scale=2.0**24),
        )
    ]
    found = recommended(tmp_path, rows, sampled)

    assert found.change_needed
    assert found.init_scale <= 2.0**16
    assert "not known" in found.reasons[0]
    assert found.predicted.num_skipped_high == 20


def test_gradients_that_drift_get_the_scale_of_the_beginning(tmp_path: Path) -> None:
    scales = [2.0 ** (16 - i // 4) for i in range(160)]
    rows = scaled_steps(scales, set(range(3, 160, 4)))
    for row in rows:
        if not row["skipped"]:
            row["param_amax"] = [1.5 * 2.0**14]
    sampled = [row for i in range(0, 160, 4) for row in samples(i, {14: 50, 12: 50}, scale=scales[i])]
    found = recommended(tmp_path, rows, sampled)

    assert found.change_needed
    assert found.window.is_empty
    assert "fits its beginning" in found.reasons[0]
    assert 2.0**4 <= found.init_scale <= 2.0**8


def test_without_a_scaler_one_is_recommended(tmp_path: Path) -> None:
    rows = steps(20, scale=1.0, scaler=None, update=None, scaled=False, exponent=-3)
    found = recommended(tmp_path, rows, every_step(20, {-3: 50, -5: 50}, scale=1.0, scaled=False), scalers=[])

    assert found.change_needed
    assert found.current_settings is None
    assert found.init_scale > 1.0


def test_no_fp16_or_no_step_is_no_reason_to_speak_of_scales(tmp_path: Path) -> None:
    table = [{**row, "dtype": "bfloat16"} for row in tensors()]

    assert audit(run_of(tmp_path / "a", steps(5), every_step(5, {0: 9}), table=table)).recommendation is None
    assert audit(run_of(tmp_path / "b", [], [])).recommendation is None
