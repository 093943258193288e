from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from gradaudit.analysis.zones import ZONES, zone_counts
from gradaudit.formats import MIN_EXPONENT, NUM_BINS
from gradaudit.store import Samples, open_run
from gradaudit_dashboard.exponents import gather
from tests import factory
from tests.dashboard import runs


def samples(path: Path, rows: list[dict[str, object]]) -> Samples:
    factory.write_run(
        path, run_meta=factory.meta(runs.blocks(1)), steps=[factory.step(i) for i in range(9)], samples=rows
    )
    return open_run(path).samples()


def test_histograms_recorded_at_different_scales_add_up_at_scale_one(tmp_path: Path) -> None:
    rows = [factory.sample(0, 0, {-4: 10}, scale=2.0**16), factory.sample(1, 0, {-6: 5}, scale=2.0**14)]

    gathered = gather(samples(tmp_path / "a", rows))

    assert gathered.counts[-20 - gathered.lowest] == 15
    assert gathered.counts.sum() == 15
    assert (gathered.scale_low, gathered.scale_high, gathered.scale_log2) == (2.0**14, 2.0**16, 14)
    assert (gathered.first_step, gathered.last_step, gathered.num_samples) == (0, 1, 2)


@given(st.dictionaries(st.integers(-60, 15), st.integers(1, 1000), min_size=1, max_size=8), st.integers(-8, 28))
def test_zones_at_every_offered_scale_are_those_of_the_analysis(counts: dict[int, int], k: int) -> None:
    row = factory.sample(0, 0, counts, num_zero=7, scale=2.0**10)
    columns = {name: np.array([row[name]]) for name in Samples.__dataclass_fields__}

    gathered = gather(Samples(**columns))

    expected = zone_counts(
        columns["counts"], columns["num_zero"], columns["num_nan"], columns["num_inf"], columns["amax"],
        shift_log2=k - 10,
    )  # fmt: skip
    assert gathered.zones[k - gathered.scales_log2.start].tolist() == expected[0].tolist()
    assert (gathered.zones.sum(axis=1) == gathered.numel).all()


def test_the_slider_reaches_past_the_scales_a_run_used(tmp_path: Path) -> None:
    rows = [factory.sample(0, 0, {0: 1}, scale=2.0**40), factory.sample(1, 0, {0: 1}, scale=2.0**-20)]

    gathered = gather(samples(tmp_path / "a", rows))

    assert gathered.scales_log2.start <= -20
    assert gathered.scales_log2.stop > 40


@pytest.mark.parametrize("scale", [0.0, np.inf])
def test_samples_whose_scale_cannot_be_divided_out_are_counted_and_left_out(tmp_path: Path, scale: float) -> None:
    rows = [factory.sample(0, 0, {0: 8}), factory.sample(1, 0, {}, num_zero=8, scale=scale)]

    gathered = gather(samples(tmp_path / "a", rows))

    assert (gathered.num_samples, gathered.num_left_out, gathered.numel) == (1, 1, 8)


def test_an_unscaled_gradient_keeps_its_exponents_whatever_the_scale_in_force(tmp_path: Path) -> None:
    rows = [factory.sample(0, 0, {-10: 3}, scaled=False, scale=2.0**16)]

    gathered = gather(samples(tmp_path / "a", rows))

    assert gathered.counts[-10 - gathered.lowest] == 3
    assert gathered.scale_log2 == 16


def test_a_scale_that_is_no_power_of_two_is_said_to_be_rounded(tmp_path: Path) -> None:
    assert gather(samples(tmp_path / "a", [factory.sample(0, 0, {0: 1}, scale=1000.0)])).is_rounded
    assert not gather(samples(tmp_path / "b", [factory.sample(0, 0, {0: 1}, scale=1024.0)])).is_rounded


def test_nothing_gathered_is_empty_and_not_an_error() -> None:
    empty = {name: np.zeros(0) for name in Samples.__dataclass_fields__}
    empty["counts"] = np.zeros((0, NUM_BINS), dtype=np.int64)
    empty["scaled"] = np.zeros(0, dtype=bool)

    gathered = gather(Samples(**empty))

    assert (gathered.numel, gathered.num_samples, gathered.lowest) == (0, 0, MIN_EXPONENT)
    assert gathered.zones.shape[1] == len(ZONES)
