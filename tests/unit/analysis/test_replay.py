from __future__ import annotations

from pathlib import Path

import numpy as np

from gradaudit.analysis.replay import TorchPolicy, lowest_sqnr_db, replay
from tests import factory
from tests.unit.analysis.runs import analysis_of, run_of, samples, scaled_steps, steps


def test_gradients_of_one_size_are_climbed_to_and_bumped_into(tmp_path: Path) -> None:
    """1.5 * 2^-2 at every step: 2^17 fits, 2^18 does not; three clean steps and a failed climb, over and over."""
    result = replay(run_of(tmp_path, steps(20)), TorchPolicy(init_scale=2.0**17, growth_interval=3))

    assert np.log2(result.scale).tolist() == [17, 17, 17, 18] * 5
    assert result.skipped.tolist() == [False, False, False, True] * 5
    assert (result.num_skipped, result.num_steps, result.skip_rate) == (5, 20, 0.25)
    assert (result.num_skipped_low, result.num_skipped_high) == (5, 5)


def test_two_optimizers_of_one_update_skip_by_themselves_and_lower_the_scale_together(tmp_path: Path) -> None:
    rows = [
        factory.step(i, optimizer=i % 2, update=i // 2, param_amax=[65536 * 2.0 ** (4 if i % 2 else -4)])
        for i in range(8)
    ]
    result = replay(run_of(tmp_path, rows), TorchPolicy(init_scale=2.0**13, growth_interval=100))

    assert np.log2(result.scale).tolist() == [13, 13, 12, 12, 11, 11, 11, 11]
    assert result.skipped.tolist() == [False, True, False, True, False, False, False, False]


def test_a_run_without_a_scaler_is_replayed_as_if_it_had_one(tmp_path: Path) -> None:
    rows = steps(6, scale=1.0, scaler=None, update=None, scaled=False)
    result = replay(run_of(tmp_path, rows, scalers=[]), TorchPolicy(init_scale=2.0**18, growth_interval=100))

    assert np.log2(result.scale).tolist() == [18, 17, 17, 17, 17, 17]


def test_the_largest_gradient_of_the_graph_decides_and_between_samples_its_usual_lead(tmp_path: Path) -> None:
    """The hidden gradient is 2^4 times the parameters': known where sampled, taken over in between."""
    rows = [row for i in (0, 6) for row in samples(i, {18 - 16 + 14: 10}, scale=65536.0)]
    result = replay(run_of(tmp_path, steps(7, exponent=-4), rows), TorchPolicy(init_scale=2.0**16, growth_interval=9))

    assert np.log2(result.scale).tolist() == [16, 15, 15, 15, 15, 15, 15]


def test_a_step_that_overflowed_does_so_at_every_larger_scale_and_perhaps_below(tmp_path: Path) -> None:
    run = run_of(tmp_path, scaled_steps([2.0**16] * 5, {2}))

    above = replay(run, TorchPolicy(init_scale=2.0**16, growth_interval=100))
    assert above.skipped.tolist() == [False, False, True, False, False]
    below = replay(run, TorchPolicy(init_scale=2.0**4, growth_interval=100))
    assert (below.num_skipped_low, below.num_skipped, below.num_skipped_high) == (0, 0, 1)


def test_a_run_without_steps_replays_to_nothing(tmp_path: Path) -> None:
    result = replay(run_of(tmp_path, []), TorchPolicy())

    assert (result.num_steps, result.num_skipped, result.skip_rate, result.min_sqnr_db) == (0, 0, 0.0, None)


def test_the_lowest_sqnr_is_that_of_the_scale_asked_for(tmp_path: Path) -> None:
    rows = [row for i in range(4) for row in samples(i, {0: 50, -2: 50, -3: 50})]
    analysis = analysis_of(tmp_path, steps(4), rows)

    here, low = lowest_sqnr_db(analysis), lowest_sqnr_db(analysis, lambda step: -6.0)
    assert here is not None
    assert low is not None
    assert here > 60
    assert 15 < low < 35
