from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from gradaudit.analysis.windows import Windows, needed_since, windows
from tests import factory
from tests.unit.analysis.runs import HIDDEN, LOSS, WEIGHT, analysis_of, samples, scaled_steps, steps, tensors


def windows_of(path: Path, *args: Any, **more: Any) -> Windows:
    return windows(analysis_of(path, *args, **more))


@pytest.mark.parametrize(
    ("exponent", "high"),
    [(0, 31), (5, 26), (14, 17), (15, 16)],
)
def test_the_high_edge_is_the_last_scale_at_which_the_largest_value_stays_finite(
    exponent: int, high: int, tmp_path: Path
) -> None:
    """The largest value is 1.5 times 2^exponent at 2^16: doubled until it would reach 65,520."""
    found = windows_of(tmp_path, steps(1, exponent=-30), samples(0, {exponent: 100}))

    assert found.tensors[HIDDEN].high_log2 == high - 1 + (1.5 * 2**15 < 65520)
    assert found.run.high_log2 == found.tensors[HIDDEN].high_log2
    assert found.run.limited_high_by == "hidden"


def test_one_binade_of_values_needs_just_enough_steps_of_the_format(tmp_path: Path) -> None:
    """40 dB are sqrt(1e4 / 12) or 28.9 steps of 2^-24: 1.5 * 2^-19 has 48, and 1.5 * 2^-20 only 24."""
    found = windows_of(tmp_path, steps(1), samples(0, {0: 100}))

    assert found.tensors[HIDDEN].low_log2 == 16 - 19
    assert found.run.limited_low_by == "hidden"
    assert not found.tensors[HIDDEN].censored


def test_exact_copies_and_wider_tensors_bound_nothing(tmp_path: Path) -> None:
    table = [*tensors(), factory.tensor(3, "copy", parents=[HIDDEN], exact=True)]
    rows = [*samples(0, {0: 100}), factory.sample(0, 3, {0: 100})]
    found = windows_of(tmp_path, steps(1), rows, table=table)

    assert set(found.tensors) == {HIDDEN}


def test_a_copy_of_something_wider_is_cast_and_so_bounds(tmp_path: Path) -> None:
    table = tensors()
    table[HIDDEN]["exact"] = True
    found = windows_of(tmp_path, steps(1), samples(0, {0: 100}), table=table)

    assert found.tensors[HIDDEN].low_log2 is not None


def test_a_tensor_of_zeros_bounds_nothing(tmp_path: Path) -> None:
    found = windows_of(tmp_path, steps(1, exponent=-3), samples(0, {}, num_zero=100))

    assert (found.tensors[HIDDEN].low_log2, found.run.low_log2) == (None, None)


def test_what_is_flushed_entirely_needs_at_least_six_binades_more(tmp_path: Path) -> None:
    rows = samples(0, {}, num_zero=100)
    rows[LOSS] = factory.sample(0, LOSS, {-22: 4})
    found = windows_of(tmp_path, steps(1, exponent=-60), rows)

    assert found.tensors[HIDDEN].low_log2 == 16 + 6
    assert found.tensors[HIDDEN].censored


def test_zeros_below_an_ordinary_gradient_are_no_flush(tmp_path: Path) -> None:
    rows = samples(0, {}, num_zero=100)
    rows[LOSS] = factory.sample(0, LOSS, {-10: 4})

    assert windows_of(tmp_path, steps(1, exponent=-60), rows).tensors[HIDDEN].low_log2 is None


def test_the_low_edge_is_what_nine_of_ten_steps_need(tmp_path: Path) -> None:
    """One step in twenty has gradients 2^10 smaller: a single odd step decides nothing."""
    rows = [row for i in range(20) for row in samples(i, {-10 if i == 7 else 0: 100})]

    assert windows_of(tmp_path, steps(20), rows).tensors[HIDDEN].low_log2 == -3


def test_the_high_edge_holds_in_all_but_one_of_two_hundred_steps(tmp_path: Path) -> None:
    rows = [row for i in range(20) for row in samples(i, {5 if i == 7 else 0: 100})]

    assert windows_of(tmp_path, steps(20, exponent=-30), rows).tensors[HIDDEN].high_log2 == 16 + 15 - 5


def test_weight_gradients_bound_the_window_at_steps_that_were_not_sampled(tmp_path: Path) -> None:
    """The FP16 gradient behind a parameter's FP32 one goes by its name."""
    table = [*tensors(), factory.tensor(3, "hidden.weight", "op_grad", op="ToCopy", parents=[HIDDEN])]
    table[WEIGHT]["parents"] = [3]
    step_rows = steps(10, exponent=-2)
    step_rows[6]["param_amax"] = [1.5 * 2.0**5 * 65536]
    found = windows_of(tmp_path, step_rows, [*samples(0, {0: 100}), factory.sample(0, 3, {0: 100})], table=table)

    assert found.tensors[3].high_log2 == 15 - 5
    assert found.run.limited_high_by == "hidden.weight"


def test_an_overflow_bounds_the_window_below_the_scale_at_which_it_happened(tmp_path: Path) -> None:
    scales = [2.0**18, 2.0**17] + [2.0**16] * 8
    rows = scaled_steps(scales, {0, 1})
    found = windows_of(tmp_path, rows, [row for i in (2, 5) for row in samples(i, {10: 100})])

    assert found.run.high_log2 == 16


def test_a_gradient_that_overflowed_here_bounds_and_an_echo_does_not(tmp_path: Path) -> None:
    rows = [
        factory.sample(0, LOSS, {0: 4}),
        factory.sample(0, HIDDEN, {15: 50}, num_inf=50),
        factory.sample(0, 3, {}, num_nan=100),
        factory.sample(0, WEIGHT, {}, num_nan=100),
    ]
    table = [*tensors(), factory.tensor(3, "earlier", parents=[HIDDEN])]
    found = windows_of(tmp_path, scaled_steps([65536.0], {0}), rows, table=table)

    assert found.tensors[HIDDEN].high_log2 == 15
    assert found.tensors[3].high_log2 is None


def test_an_overflow_of_the_forward_bounds_nothing(tmp_path: Path) -> None:
    rows = [factory.sample(0, LOSS, {}, num_nan=4), factory.sample(0, HIDDEN, {}, num_inf=100)]
    step_rows = scaled_steps([65536.0], {0}, loss=float("nan"), loss_finite=False)

    assert windows_of(tmp_path, step_rows, rows).run.high_log2 is None


def test_infinity_made_of_small_values_is_no_overflow(tmp_path: Path) -> None:
    """As the gradient of a square root at zero: a smaller scale would not help."""
    rows = [
        factory.sample(0, LOSS, {-6: 4}, scale=1.0),
        factory.sample(0, HIDDEN, {-6: 50}, num_inf=50, scale=1.0),
    ]

    assert windows_of(tmp_path, scaled_steps([1.0], {0}), rows).tensors[HIDDEN].high_log2 is None


def two_tensors(low_exponent: int, high_exponent: int, step: int) -> list[dict[str, Any]]:
    return [
        factory.sample(step, LOSS, {0: 4}),
        factory.sample(step, HIDDEN, {low_exponent: 100}),
        factory.sample(step, 3, {high_exponent: 100}),
    ]


def test_two_tensors_far_apart_leave_no_window(tmp_path: Path) -> None:
    table = [*tensors(), factory.tensor(3, "other", parents=[LOSS])]
    rows = [row for i in range(8) for row in two_tensors(-24, 14, i)]
    found = windows_of(tmp_path, steps(8, exponent=-30), rows, table=table)

    assert found.is_empty
    assert found.run.is_empty
    assert found.empty_share == 1.0
    assert (found.run.limited_low_by, found.run.limited_high_by) == ("hidden", "other")
    assert found.lowest is not None
    assert found.lowest.fqn == "hidden"


def test_gradients_that_drift_leave_no_single_scale_but_one_for_every_step(tmp_path: Path) -> None:
    rows = [row for i in range(30) for row in samples(i, {14 - i: 100})]
    found = windows_of(tmp_path, steps(30, exponent=-40), rows)

    assert found.run.low_log2 is not None
    assert found.empty_share == 0.0
    assert not found.is_empty


def test_what_later_steps_need_is_told_apart(tmp_path: Path) -> None:
    rows = [row for i in range(10) for row in samples(i, {0 if i < 5 else -8: 100})]
    analysis = analysis_of(tmp_path, steps(10), rows)

    lowest, needed = needed_since(analysis, 5)
    assert lowest is not None
    assert (lowest.fqn, needed) == ("hidden", 16 - 11)
    assert needed_since(analysis, 99) == (None, None)


def test_a_difference_of_equals_bounds_nothing(tmp_path: Path) -> None:
    """A bias before a norm: what arrives is cancelled but for its noise, at any scale."""
    table = [
        *tensors(),
        factory.tensor(3, "before_norm.bias", "op_grad", op="ToCopy", shape=[8], parents=[HIDDEN]),
    ]
    rows = [*samples(0, {0: 10_000}), factory.sample(0, 3, {-14: 8})]
    analysis = analysis_of(tmp_path, steps(1), rows, table=table)

    assert analysis.cancels.tolist() == [False, False, False, True]
    assert windows(analysis).tensors[3].low_log2 is None


def test_gradients_too_small_for_any_scale_looked_at_need_one_beyond(tmp_path: Path) -> None:
    found = windows_of(tmp_path, steps(1, exponent=-70, scale=1.0), samples(0, {-64: 100}, scale=1.0))

    assert found.tensors[HIDDEN].low_log2 == 41
