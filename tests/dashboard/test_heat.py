from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gradaudit.analysis.zones import ZONES
from gradaudit_dashboard.heat import (
    FINE,
    MAX_COLUMNS,
    MAX_ROWS,
    METRIC_TABLE,
    NO_VALUE,
    NOT_SAMPLED,
    WORST,
    Matrix,
    build_matrix,
    matches,
    pool,
    pool_columns,
    share_codes,
    share_limit,
    sort_rows,
    sqnr_codes,
)


def matrix(codes: np.ndarray, steps: np.ndarray | None = None, order: np.ndarray | None = None) -> Matrix:
    rows, columns = codes.shape
    scale = np.full(columns, 1024.0)
    return Matrix(
        codes.astype(np.uint8),
        np.arange(rows),
        np.arange(rows) if order is None else order,
        np.arange(columns) if steps is None else steps,
        scale,
        scale,
    )


def test_share_codes_grow_with_the_share_and_keep_nothing_apart_from_next_to_nothing() -> None:
    shares = np.array([0.0, 1e-12, 1e-6, 1e-3, 0.5, 1.0, np.nan])

    codes = share_codes(shares)

    assert codes.tolist()[:3] == [FINE, FINE + 1, FINE + 1]
    assert codes[3] < codes[4] < codes[5] == WORST
    assert codes[6] == NO_VALUE


@given(st.floats(1e-6, 1.0))
def test_the_limit_of_a_share_code_is_never_below_the_share(share: float) -> None:
    code = int(share_codes(np.array([share]))[0])

    assert share <= share_limit(code) * (1 + 1e-6)
    assert code == FINE + 1 or share > share_limit(code - 1) * (1 - 1e-6)


@pytest.mark.parametrize(
    ("sqnr_db", "code"),
    [
        (np.inf, FINE),
        (40.0, FINE),
        (39.99, FINE + 1),
        (0.0, WORST),
        (-50.0, WORST),
        (-np.inf, WORST),
        (np.nan, NO_VALUE),
    ],
)
def test_sqnr_codes_are_fine_from_the_target_up_and_worst_from_zero_down(sqnr_db: float, code: int) -> None:
    assert sqnr_codes(np.array([sqnr_db]), 40.0).tolist() == [code]


@pytest.mark.parametrize(("metric", "share"), [("small", 2 / 3), ("broken", 3 / 8), ("zero", 2 / 8)])
def test_each_share_is_of_the_elements_its_words_name(metric: str, share: float) -> None:
    counts = {"zero": 2, "flushed": 1, "subnormal": 3, "normal": 1, "near_max": 1, "overflow": 0, "nan": 0}
    if metric == "broken":
        counts = {"zero": 2, "flushed": 0, "subnormal": 0, "normal": 3, "near_max": 0, "overflow": 1, "nan": 2}
    zones = np.array([[counts[zone] for zone in ZONES]])

    code = int(METRIC_TABLE[metric].codes(zones, np.array([np.nan]), 40.0)[0])

    assert share_limit(code) == pytest.approx(share, rel=0.06)


@pytest.mark.parametrize("metric", METRIC_TABLE)
def test_every_code_has_words_and_a_place_on_the_ramp(metric: str) -> None:
    table = METRIC_TABLE[metric]
    place = table.ramp(np.arange(FINE + 1, WORST + 1))

    assert all(table.text(code, 40.0) for code in range(FINE, WORST + 1))
    assert ((place >= 0) & (place <= 1)).all()
    assert (np.diff(place) > 0).all()


def test_a_matrix_leaves_unsampled_cells_at_zero_and_keeps_the_worst_of_two_samples() -> None:
    built = build_matrix(
        np.array([5, 5, 9, 5]), np.array([3, 7, 7, 3]), np.array([1, 0, 0, 1]), np.array([2.0, 2.0, 1.0, 4.0]),
        np.array([10, 20, 30, 99], dtype=np.uint8),
    )  # fmt: skip

    assert built.tensors.tolist() == [3, 7]
    assert built.steps.tolist() == [5, 9]
    assert built.codes.tolist() == [[99, NOT_SAMPLED], [20, 30]]
    assert (built.scale_low.tolist(), built.scale_high.tolist()) == ([2.0, 1.0], [4.0, 1.0])


def test_rows_are_sorted_by_the_worst_cell_by_what_is_bad_lately_or_by_the_model() -> None:
    codes = np.full((3, 20), FINE)
    codes[0, 0] = 255
    codes[2, 19] = 100
    built = matrix(codes, order=np.array([2, 1, 0]))

    assert sort_rows(built, "worst").tolist() == [0, 2, 1]
    assert sort_rows(built, "recent").tolist() == [2, 0, 1]
    assert sort_rows(built, "model").tolist() == [0, 1, 2]


def test_a_row_that_was_not_sampled_is_not_better_than_a_fine_one() -> None:
    built = matrix(np.array([[NOT_SAMPLED, NOT_SAMPLED], [FINE, FINE + 1]]))

    assert sort_rows(built, "worst").tolist() == [1, 0]


@pytest.mark.parametrize(
    ("q", "shown"), [("", True), ("FC1", True), ("fc1 param", True), ("fc1 output", False), ("fc2", False)]
)
def test_a_filter_wants_every_word_in_name_or_kind(q: str, shown: bool) -> None:
    assert matches("blocks.3.fc1", "param_grad", q) is shown


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_the_worst_cell_of_any_window_survives_pooling(data: st.DataObject) -> None:
    rows = data.draw(st.integers(1, 40))
    steps = np.unique(data.draw(st.lists(st.integers(0, 5000), min_size=1, max_size=80)))
    codes = np.full((rows, len(steps)), FINE)
    row, column = data.draw(st.integers(0, rows - 1)), data.draw(st.integers(0, len(steps) - 1))
    codes[row, column] = data.draw(st.integers(FINE + 1, WORST))
    max_rows, max_columns = data.draw(st.integers(1, 12)), data.draw(st.integers(1, 30))

    pooled = pool(matrix(codes, steps), np.arange(rows), max_rows=max_rows, max_columns=max_columns)

    group = next(i for i, members in enumerate(pooled.groups) if row in members)
    within = np.flatnonzero((pooled.first <= steps[column]) & (pooled.last >= steps[column]))
    assert pooled.codes.shape[0] <= max_rows
    assert pooled.codes.shape[1] <= max_columns
    assert pooled.codes.max() == codes.max()
    assert (pooled.codes[group, within] == codes[row, column]).all()
    assert len(within) > 0
    assert pooled.groups[group][0] == row  # a click on the merged row pins the layer that made it bad


def test_pooled_cells_stay_under_the_budget() -> None:
    codes = np.full((1000, 5000), FINE, dtype=np.uint8)

    pooled = pool(matrix(codes), np.arange(1000))

    assert pooled.codes.shape[0] <= MAX_ROWS
    assert pooled.codes.shape[1] <= MAX_COLUMNS
    assert pooled.codes.size <= 300_000


@settings(max_examples=100, deadline=None)
@given(st.lists(st.integers(0, 10**6), min_size=1, max_size=200), st.integers(1, 50))
def test_no_column_is_narrower_than_its_share_of_the_axis(steps: list[int], max_columns: int) -> None:
    at = np.unique(steps)
    width = (at[-1] - at[0] + 1) / max_columns

    columns = pool_columns(at, max_columns)

    assert len(columns.take) <= max_columns
    assert len(columns.edges) == len(columns.take) + 1
    assert np.diff(columns.edges).min() >= width * (1 - 1e-9) or len(at) == len(columns.take)
    assert set(columns.take.tolist()) == set(range(len(columns.starts)))


def test_far_apart_samples_get_a_column_each_that_reaches_halfway_to_its_neighbours() -> None:
    columns = pool_columns(np.array([0, 50, 100]), 900)

    assert columns.edges.tolist() == [-25.0, 25.0, 75.0, 125.0]


def test_a_burst_in_a_long_run_is_as_wide_as_a_column() -> None:
    steps = np.unique(np.concatenate([np.arange(0, 100_000, 500), np.arange(40_123, 40_131)]))
    codes = np.full((1, len(steps)), FINE)
    codes[0, steps == 40_125] = WORST

    pooled = pool(matrix(codes, steps), np.arange(1), max_columns=100)

    bad = np.flatnonzero(pooled.codes[0] == WORST)
    assert len(bad) == 1
    assert pooled.edges[bad[0]] <= 40_125 <= pooled.edges[bad[0] + 1]
    assert pooled.edges[bad[0] + 1] - pooled.edges[bad[0]] == pytest.approx(1000, rel=0.01)
