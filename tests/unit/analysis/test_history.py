from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from gradaudit.analysis.history import (
    MAX_DRAWN,
    ScaleHistory,
    ScalerSettings,
    drawable,
    scale_histories,
    unscaled_amax_log2,
)
from tests import factory
from tests.unit.analysis.runs import run_of, scaled_steps, steps


def histories(path: Path, rows: list[dict[str, Any]], **meta: Any) -> tuple[ScaleHistory, ...]:
    run = run_of(path, rows, **meta)
    return scale_histories(run.meta, run.steps)


def halved(count: int, start: float = 2.0**20) -> list[float]:
    return [start / 2**i for i in range(count)]


def test_the_start_lasts_while_the_scale_comes_down(tmp_path: Path) -> None:
    (history,) = histories(tmp_path, scaled_steps([*halved(4), *[2.0**16] * 6], {0, 1, 2, 3}))

    assert history.calibration_end == 4
    assert history.late().tolist() == []


def test_a_few_clean_steps_may_lie_between_the_overflows_of_the_start(tmp_path: Path) -> None:
    scales = [2.0**18, 2.0**17, 2.0**17, 2.0**17, 2.0**17, 2.0**16, 2.0**16]

    (history,) = histories(tmp_path, scaled_steps(scales, {0, 4}))

    assert history.calibration_end == 5


def test_an_overflow_after_many_clean_steps_is_not_of_the_start(tmp_path: Path) -> None:
    (history,) = histories(tmp_path, scaled_steps([2.0**16] * 9 + [2.0**15], {8}))

    assert history.calibration_end == 0
    assert history.late().tolist() == [8]


def test_a_scale_that_goes_on_falling_every_few_steps_is_past_its_start(tmp_path: Path) -> None:
    (history,) = histories(tmp_path, scaled_steps([2.0 ** (16 - i // 4) for i in range(40)], set(range(3, 40, 4))))

    assert history.calibration_end == 8
    assert len(history.late()) == 8


def test_the_start_is_over_once_the_scale_has_grown(tmp_path: Path) -> None:
    (history,) = histories(tmp_path, scaled_steps([2.0**16, 2.0**15, 2.0**16, 2.0**15], {0, 2}))

    assert history.calibration_end == 1
    assert history.late().tolist() == [2]
    assert history.num_growths == 1


def test_an_overflow_that_does_not_lower_the_scale_is_not_of_the_start(tmp_path: Path) -> None:
    (history,) = histories(tmp_path, scaled_steps([2.0**19] * 5, {0, 1, 2}))

    assert history.calibration_end == 0
    assert history.late().tolist() == [0, 1, 2]


def test_two_optimizers_that_share_an_update_are_one_entry(tmp_path: Path) -> None:
    rows = [
        factory.step(i, optimizer=i % 2, update=i // 2, found_inf=i == 3, skipped=i == 3, param_amax=[1.0])
        for i in range(8)
    ]
    (history,) = histories(tmp_path, rows)

    assert len(history) == 4
    assert history.found.tolist() == [False, True, False, False]
    assert history.step.tolist() == [0, 2, 4, 6]
    assert history.update_of.tolist() == [0, 0, 1, 1, 2, 2, 3, 3]


def test_two_scalers_that_take_turns_have_a_history_each(tmp_path: Path) -> None:
    rows = [factory.step(i, scaler=i % 2, update=i // 2, scale=2.0 ** (10 + i % 2)) for i in range(9)]
    found = histories(tmp_path, rows, scalers=[factory.scaler(), factory.scaler(id=1, init_scale=2.0**11)])

    assert [history.scaler["id"] for history in found] == [0, 1]
    assert [len(history) for history in found] == [5, 4]
    assert found[1].update_of.tolist() == [-1, 0, -1, 1, -1, 2, -1, 3, -1]


def test_scalers_that_follow_one_another_are_one_history(tmp_path: Path) -> None:
    rows = [factory.step(i, scaler=i // 3, update=i % 3, scale=2.0 ** (20 - i % 3)) for i in range(9)]
    (history,) = histories(tmp_path, rows, scalers=[factory.scaler(id=i) for i in range(3)])

    assert len(history) == 9
    assert history.num_growths == 2
    assert np.log2(history.scale).tolist() == [20, 19, 18] * 3


def test_without_an_enabled_scaler_there_is_no_history(tmp_path: Path) -> None:
    rows = [factory.step(i, scaler=None, update=None, scale=1.0) for i in range(3)]

    assert histories(tmp_path, rows, scalers=[{"id": 0, "class": "GradScaler", "enabled": False}]) == ()
    assert histories(tmp_path / "none", rows, scalers=[]) == ()


def test_the_forward_is_bad_where_the_loss_or_the_batch_was_not_finite(tmp_path: Path) -> None:
    rows = steps(4)
    rows[1] |= {"loss": float("nan"), "loss_finite": False}
    rows[2] |= {"input_finite": False}
    rows[3] |= {"loss": None, "loss_finite": None, "input_finite": None}
    (history,) = histories(tmp_path, rows)

    assert history.forward_bad.tolist() == [False, True, True, False]


def test_gradients_are_unscaled_only_where_they_were_scaled(tmp_path: Path) -> None:
    rows = [
        factory.step(0, scale=16.0, param_amax=[32.0, 8.0]),
        factory.step(1, scale=16.0, param_amax=[2.0], scaled=False),
        factory.step(2, scale=16.0, param_amax=[None, 0.0]),
        factory.step(3, scale=16.0, param_amax=[1.0, float("inf")]),
        factory.step(4, scale=0.0, param_amax=[1.0]),
    ]
    found = unscaled_amax_log2(run_of(tmp_path, rows).steps)

    assert found[:3].tolist() == [1.0, 1.0, -np.inf]
    assert np.isnan(found[3])
    assert found[4] == 149.0


@pytest.mark.parametrize(
    ("settings", "rate"),
    [
        (ScalerSettings(1.0, 2.0, 0.5, 2000), 1 / 2001),
        (ScalerSettings(1.0, 2.0, 0.5, 1), 1 / 2),
        (ScalerSettings(1.0, 2.0, 0.25, 10), 1 / 21),
        (ScalerSettings(1.0, 4.0, 0.5, 10), 1 / 6),
        (ScalerSettings(1.0, 1.0, 0.5, 10), 0.0),
        (ScalerSettings(1.0, 2.0, 1.0, 10), 0.0),
    ],
)
def test_the_interval_and_the_factors_imply_how_often_a_step_is_skipped(settings: ScalerSettings, rate: float) -> None:
    assert settings.highest_skip_rate() == pytest.approx(rate)


def test_what_is_drawn_of_a_long_run_stays_small_and_keeps_peaks(tmp_path: Path) -> None:
    rows = steps(5000)
    rows[3333] |= {"loss": 99.0}
    rows[4444] |= {"loss": float("nan"), "loss_finite": False, "skipped": True}
    history = drawable(run_of(tmp_path, rows).steps)

    assert history.scale_points == ((0, 65536.0), (4999, 65536.0))
    assert history.skipped_steps == (4444,)
    assert len(history.loss_points) == MAX_DRAWN
    assert (3333, 99.0) in history.loss_points


def test_a_run_without_steps_has_nothing_to_draw(tmp_path: Path) -> None:
    assert drawable(run_of(tmp_path, []).steps).scale_points == ()
