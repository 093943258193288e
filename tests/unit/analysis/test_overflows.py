from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from gradaudit.analysis.overflows import born_here, too_large, unexplained
from tests import factory
from tests.unit.analysis.runs import HIDDEN, LOSS, WEIGHT, analysis_of, samples, scaled_steps, tensors

INF, NAN = float("inf"), float("nan")


def judged(path: Path, *args: Any, **more: Any) -> list[bool]:
    analysis = analysis_of(path, *args, **more)
    assert analysis.history is not None
    found: list[bool] = unexplained(analysis, analysis.history).tolist()
    return found


def overflow_sample(step: int, scale: float, *, loss: int, hidden: dict[int, int]) -> list[dict[str, Any]]:
    return [
        factory.sample(step, LOSS, {loss: 4}, scale=scale),
        factory.sample(step, HIDDEN, hidden, num_inf=10, scale=scale),
        factory.sample(step, WEIGHT, {}, num_nan=10, scale=scale),
    ]


def test_only_the_first_non_finite_gradient_on_a_path_was_born_there(tmp_path: Path) -> None:
    analysis = analysis_of(tmp_path, scaled_steps([65536.0], {0}), overflow_sample(0, 65536.0, loss=0, hidden={15: 10}))

    assert born_here(analysis).tolist() == [False, True, False]


@pytest.mark.parametrize(
    ("loss", "hidden", "scale", "by_size"),
    [
        (-8, {15: 90}, 256.0, True),  # its other values come near the limit
        (-8, {2: 90}, 8.0, False),  # nothing comes near
        (12, {2: 90}, 8.0, True),  # what it is computed from does, times a matrix
        (-8, {}, 2.0**12, True),  # next to the loss the scale itself comes in
        (-8, {}, 2.0**2, False),
    ],
)
def test_an_overflow_is_one_of_size_if_something_finite_comes_near_the_limit(
    loss: int, hidden: dict[int, int], scale: float, by_size: bool, tmp_path: Path
) -> None:
    analysis = analysis_of(tmp_path, scaled_steps([scale], {0}), overflow_sample(0, scale, loss=loss, hidden=hidden))

    assert too_large(analysis, born_here(analysis)).tolist() == [False, by_size, False]


def test_the_usual_factor_between_two_gradients_says_how_large_it_would_have_been(tmp_path: Path) -> None:
    """At clean steps the hidden gradient is 2^15 times the loss's: no division by zero, a constant."""
    table = [factory.tensor(3, "root", "op_grad", dtype="float32"), *tensors()]
    table[1 + LOSS]["parents"] = [3]
    clean = [factory.sample(0, LOSS, {-6: 4}, scale=1.0), factory.sample(0, HIDDEN, {9: 90}, scale=1.0)]
    bad = overflow_sample(1, 2.0**5, loss=-1, hidden={})
    rows = scaled_steps([1.0, 2.0**5], {1})
    table = sorted(table, key=lambda row: row["id"])

    analysis = analysis_of(tmp_path, rows, [*clean, *bad], table=table)
    assert too_large(analysis, born_here(analysis)).tolist().count(True) == 1

    without = analysis_of(tmp_path / "without", rows, bad, table=table)
    assert not too_large(without, born_here(without)).any()


def test_a_non_finite_loss_is_explained_by_no_gradient(tmp_path: Path) -> None:
    rows = scaled_steps([2.0**16] * 4, {2})
    rows[2] |= {"loss": NAN, "loss_finite": False}

    assert judged(tmp_path, rows) == [False, False, True, False]


def test_an_overflow_that_was_not_sampled_is_explained_by_its_neighbours_size(tmp_path: Path) -> None:
    """Gradients of 1.5 * 2^-2: at 2^17 they reach the limit, at 2^2 they do not come near."""
    high = scaled_steps([2.0**16] * 4 + [2.0**17], {4})
    low = scaled_steps([2.0**2] * 4 + [2.0**3], {4})
    for row in (high[4], low[4]):
        row["param_amax"] = [INF, row["scale"] * 0.375]
    for row in (*high[:4], *low[:4]):
        row["param_amax"] = [row["scale"] * 0.375] * 2

    assert judged(tmp_path / "high", high) == [False] * 5
    assert judged(tmp_path / "low", low) == [False] * 4 + [True]


def test_parameters_that_stayed_finite_tell_a_larger_batch(tmp_path: Path) -> None:
    rows = scaled_steps([2.0**3] * 5, {3})
    for row in rows:
        row["param_amax"] = [row["scale"] * 0.375] * 2
    rows[3]["param_amax"] = [INF, 2.0**14]

    assert judged(tmp_path, rows) == [False] * 5


def test_a_larger_loss_tells_a_larger_batch(tmp_path: Path) -> None:
    rows = scaled_steps([2.0**3] * 5, {3})
    rows[3] |= {"param_amax": [INF], "loss": 2.0**13}

    assert judged(tmp_path, rows) == [False] * 5


def test_where_nothing_stayed_finite_single_batches_may_be_a_thousand_times_larger(tmp_path: Path) -> None:
    assert judged(tmp_path / "a", scaled_steps([2.0**9] * 5, {3})) == [False] * 5
    assert judged(tmp_path / "b", scaled_steps([2.0**3] * 5, {3})) == [False, False, False, True, False]


def test_without_anything_finite_only_a_tiny_scale_tells(tmp_path: Path) -> None:
    scales = [2.0**-8, 2.0**-9, 2.0**-10, 2.0**-11, 2.0**-12]

    assert judged(tmp_path, scaled_steps(scales, set(range(5)))) == [False, False, False, True, True]


def test_the_nearest_sampled_overflow_stands_for_those_between(tmp_path: Path) -> None:
    rows = scaled_steps([2.0**4] * 6, set(range(6)))
    table = [factory.tensor(3, "root", "op_grad", dtype="float32"), *tensors()]
    table[1 + LOSS]["parents"] = [3]
    table = sorted(table, key=lambda row: row["id"])
    found = judged(tmp_path, rows, overflow_sample(2, 2.0**4, loss=-8, hidden={}), table=table)

    assert found == [True] * 6


def test_runs_without_samples_or_clean_steps_are_judged_too(tmp_path: Path) -> None:
    assert judged(tmp_path / "one", scaled_steps([65536.0], {0})) == [False]
    assert judged(tmp_path / "clean", scaled_steps([65536.0], set()), samples(0, {0: 5})) == [False]
