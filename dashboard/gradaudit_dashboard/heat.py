"""From sampled statistics to a heatmap small enough to send: one byte per cell, pooled by the worst.

A cell is a code: 0 not sampled, 1 nothing to measure, 2 nothing bad, then 253 levels of badness up to 255. Codes grow
with badness, so pooling rows or columns is a maximum and a single bad step survives at any zoom. Letters in names: R
rows (tensors), C sampled steps, G columns drawn, N samples.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from gradaudit.analysis.zones import ZONES
from gradaudit.reporters.words import format_share

NOT_SAMPLED, NO_VALUE, FINE, WORST = 0, 1, 2, 255
NUM_LEVELS = WORST - FINE

MAX_ROWS = 320
MAX_COLUMNS = 900
"""288,000 cells draw in about 80 ms and travel as 0.4 MB; four times as many feel slow."""

SMALLEST_SHARE_LOG10 = -6
"""Shares at or below one in a million share the lowest level."""

RECENT_SHARE = 0.1
"""Sorting by what is bad lately looks at the last tenth of the sampled steps."""

_ZERO, _FLUSHED, _SUBNORMAL, _OVERFLOW, _NAN = (
    ZONES.index(zone) for zone in ("zero", "flushed", "subnormal", "overflow", "nan")
)


@dataclass(frozen=True, slots=True)
class Metric:
    """What a heatmap shows: a code per sample, a text per code and a place on the colour ramp (0 to 1) per level.

    `codes` takes (zones [N, 7], sqnr_db [N], target_db), `text` a code and target_db, `ramp` codes above FINE;
    `no_value` says why a sampled cell has nothing to show.
    """

    title: str
    codes: Callable[[np.ndarray, np.ndarray, float], np.ndarray]
    text: Callable[[int, float], str]
    ramp: Callable[[np.ndarray], np.ndarray]
    no_value: str


def share_codes(share_N: np.ndarray) -> np.ndarray:
    """Codes of shares (0 to 1, NaN where there is nothing to share), levels spaced evenly in the logarithm."""
    with np.errstate(divide="ignore", invalid="ignore"):
        position = (np.log10(share_N) - SMALLEST_SHARE_LOG10) / -SMALLEST_SHARE_LOG10
    # rounding guards 1.0 and other exact levels against floating noise before ceil
    level = np.ceil(np.round(np.nan_to_num(position, nan=0.0, neginf=0.0) * (NUM_LEVELS - 1), 9))
    codes = np.clip(FINE + 1 + level, FINE + 1, WORST)
    codes = np.where(share_N <= 0, FINE, codes)
    return np.where(np.isnan(share_N), NO_VALUE, codes).astype(np.uint8)


def share_limit(code: int) -> float:
    """Largest share that gets this code."""
    return float(10 ** (SMALLEST_SHARE_LOG10 * (1 - (code - FINE - 1) / (NUM_LEVELS - 1)))) if code > FINE else 0.0


def sqnr_codes(sqnr_N: np.ndarray, target_db: float) -> np.ndarray:
    """Codes of SQNR in dB: nothing bad from the target up, worst at 0 dB and below, levels spaced evenly between."""
    with np.errstate(invalid="ignore"):
        missing = np.nan_to_num((target_db - sqnr_N) / target_db, nan=0.0, posinf=1.0, neginf=0.0)
    codes = np.clip(FINE + np.ceil(missing * NUM_LEVELS), FINE, WORST)
    return np.where(np.isnan(sqnr_N), NO_VALUE, codes).astype(np.uint8)


def _ratio(part_N: np.ndarray, whole_N: np.ndarray) -> np.ndarray:
    return np.divide(part_N, whole_N, out=np.full(len(part_N), np.nan), where=whole_N > 0)


def _share_text(part: str, whole: str) -> Callable[[int, float], str]:
    def text(code: int, target_db: float) -> str:
        return f"{part}: {'up to ' if code > FINE else ''}{format_share(share_limit(code))} of {whole}"

    return text


def _sqnr_text(code: int, target_db: float) -> str:
    if code in (FINE, WORST):
        return f"SQNR {target_db:.0f} dB or more" if code == FINE else "SQNR 0 dB or less"
    return f"SQNR about {target_db * (1 - (code - FINE - 0.5) / NUM_LEVELS):.1f} dB"


def _small(zones_NZ: np.ndarray, sqnr_N: np.ndarray, target_db: float) -> np.ndarray:
    nonzero_N = zones_NZ.sum(axis=1) - zones_NZ[:, _ZERO]
    return share_codes(_ratio(zones_NZ[:, _FLUSHED] + zones_NZ[:, _SUBNORMAL], nonzero_N))


def _broken(zones_NZ: np.ndarray, sqnr_N: np.ndarray, target_db: float) -> np.ndarray:
    return share_codes(_ratio(zones_NZ[:, _OVERFLOW] + zones_NZ[:, _NAN], zones_NZ.sum(axis=1)))


def _zero(zones_NZ: np.ndarray, sqnr_N: np.ndarray, target_db: float) -> np.ndarray:
    return share_codes(_ratio(zones_NZ[:, _ZERO], zones_NZ.sum(axis=1)))


def _sqnr(zones_NZ: np.ndarray, sqnr_N: np.ndarray, target_db: float) -> np.ndarray:
    return sqnr_codes(sqnr_N, target_db)


def _root_of_share(code: np.ndarray) -> np.ndarray:
    """A few percent should be seen, a millionth should not shout: the square root of the share."""
    return np.sqrt(np.array([share_limit(int(c)) for c in code]))


def _any_is_loud(code: np.ndarray) -> np.ndarray:
    """One inf spoils a step, so the smallest share starts in the middle of the ramp."""
    return 0.45 + 0.55 * (code - FINE) / NUM_LEVELS


def _even(code: np.ndarray) -> np.ndarray:
    return (code - FINE) / NUM_LEVELS


_SMALL_TEXT = _share_text("flushed + subnormal", "non-zero elements")
_BROKEN_TEXT = _share_text("overflow + NaN", "all elements")
_ZERO_TEXT = _share_text("zero", "all elements")

METRIC_TABLE = {
    "sqnr": Metric(
        "predicted SQNR below target", _sqnr, _sqnr_text, _even, "no SQNR: not FP16, or only zeros, inf and NaN"
    ),
    "small": Metric(
        "flushed + subnormal, % of non-zero elements", _small, _SMALL_TEXT, _root_of_share, "no non-zero element"
    ),
    "broken": Metric("overflow + NaN, % of all elements", _broken, _BROKEN_TEXT, _any_is_loud, "no element"),
    "zero": Metric("exact zeros, % of all elements", _zero, _ZERO_TEXT, _root_of_share, "no element"),
}


@dataclass(frozen=True, slots=True)
class Matrix:
    """Codes of all sampled tensors at all sampled steps.

    `codes` is uint8 [R, C]; `tensors` ids [R]; `order` mean position in backward [R]; `steps` [C];
    `scale_low` and `scale_high` the scales in force at each step [C].
    """

    codes: np.ndarray
    tensors: np.ndarray
    order: np.ndarray
    steps: np.ndarray
    scale_low: np.ndarray
    scale_high: np.ndarray


def build_matrix(
    step_N: np.ndarray, tensor_N: np.ndarray, order_N: np.ndarray, scale_N: np.ndarray, codes_N: np.ndarray
) -> Matrix:
    """Spread one code per sample over rows and steps; the worst where a tensor was sampled twice in a step."""
    tensors, row_N = np.unique(tensor_N, return_inverse=True)
    steps, column_N = np.unique(step_N, return_inverse=True)
    codes = np.zeros((len(tensors), len(steps)), dtype=np.uint8)
    np.maximum.at(codes, (row_N, column_N), codes_N)
    order = np.bincount(row_N, weights=order_N, minlength=len(tensors)) / np.maximum(np.bincount(row_N), 1)
    low, high = np.full(len(steps), np.inf), np.full(len(steps), -np.inf)
    np.minimum.at(low, column_N, scale_N)
    np.maximum.at(high, column_N, scale_N)
    return Matrix(codes, tensors, order, steps, low, high)


def sort_rows(matrix: Matrix, sort: str) -> np.ndarray:
    """Row indices in the order to show: worst first (over the run or lately), or the model's own order."""
    # backward meets the last layer first
    model = np.lexsort((matrix.tensors, -matrix.order))
    if sort == "model":
        return model
    codes = matrix.codes
    if sort == "recent":
        codes = codes[:, -max(1, round(codes.shape[1] * RECENT_SHARE)) :]
    bad = np.maximum(codes, FINE).astype(np.float64) - FINE
    rank = np.empty(len(model))
    rank[model] = np.arange(len(model))
    return np.lexsort((rank, -bad.mean(axis=1), -bad.max(axis=1, initial=0)))


def matches(name: str, kind: str, q: str) -> bool:
    """Whether a row passes the text filter: every word occurs in its name or kind, in any case."""
    text = f"{name} {kind}".lower()
    return all(word in text for word in q.lower().split())


@dataclass(frozen=True, slots=True)
class Pooled:
    """A heatmap as it is drawn.

    `codes` is uint8 [rows, G]; `edges` steps [G + 1]; `groups` the matrix rows merged into each row, worst first;
    `first`, `last` the sampled steps behind each column and `num_steps` how many [G]; `scale_low`, `scale_high` [G].
    """

    codes: np.ndarray
    edges: np.ndarray
    groups: tuple[np.ndarray, ...]
    first: np.ndarray
    last: np.ndarray
    num_steps: np.ndarray
    scale_low: np.ndarray
    scale_high: np.ndarray


def pool(matrix: Matrix, rows: np.ndarray, *, max_rows: int = MAX_ROWS, max_columns: int = MAX_COLUMNS) -> Pooled:
    """Merge neighbouring rows and steps by their worst until they fit.

    Args:
        matrix: Codes of the run.
        rows: Matrix rows to show, in order; at least one, as the matrix has at least one step.
        max_rows: Rows that fit.
        max_columns: Columns that fit.
    """
    columns = pool_columns(matrix.steps, max_columns)
    starts = columns.starts
    codes = np.maximum.reduceat(matrix.codes[rows], starts, axis=1)
    size = -(-len(rows) // max_rows)
    row_starts = np.arange(0, len(rows), size)
    pooled = np.maximum.reduceat(codes, row_starts, axis=0)
    worst_R = codes.max(axis=1)
    groups = []
    for start in row_starts:
        members = np.arange(start, min(start + size, len(rows)))
        groups.append(rows[members[np.argsort(-worst_R[members].astype(int), kind="stable")]])
    ends = np.append(starts[1:], len(matrix.steps))
    take = columns.take
    return Pooled(
        codes=np.ascontiguousarray(pooled[:, take]),
        edges=columns.edges,
        groups=tuple(groups),
        first=matrix.steps[starts][take],
        last=matrix.steps[ends - 1][take],
        num_steps=(ends - starts)[take],
        scale_low=np.minimum.reduceat(matrix.scale_low, starts)[take],
        scale_high=np.maximum.reduceat(matrix.scale_high, starts)[take],
    )


@dataclass(frozen=True, slots=True)
class Columns:
    """How sampled steps become columns: groups begin at `starts`; column g shows group take[g] between its edges."""

    starts: np.ndarray
    edges: np.ndarray
    take: np.ndarray


def pool_columns(steps_C: np.ndarray, max_columns: int) -> Columns:
    """Columns on a true step axis, none of them narrower than 1 / max_columns of it.

    Where samples are far enough apart each gets its own column, reaching halfway to its neighbours. Otherwise (long
    runs, bursts) columns are even and a column without a sample shows the nearest one, so that no column is thinner
    than a pixel and a burst of one bad step is still seen.
    """
    first, last = float(steps_C[0]), float(steps_C[-1])
    width = (last - first + 1) / max_columns
    gaps = np.diff(steps_C)
    if len(steps_C) <= max_columns and (len(gaps) == 0 or gaps.min() >= width):
        middle = steps_C[:-1] + gaps / 2
        left = gaps[0] / 2 if len(gaps) else 0.5
        right = gaps[-1] / 2 if len(gaps) else 0.5
        edges = np.concatenate([[first - left], middle, [last + right]])
        index = np.arange(len(steps_C))
        return Columns(index, edges, index)
    bin_C = np.clip(((steps_C - first) / width).astype(np.int64), 0, max_columns - 1)
    filled, starts = np.unique(bin_C, return_index=True)
    after = np.clip(np.searchsorted(filled, np.arange(max_columns)), 0, len(filled) - 1)
    before = np.maximum(after - 1, 0)
    position = np.arange(max_columns)
    nearer_before = np.abs(filled[before] - position) < np.abs(filled[after] - position)
    edges = first - 0.5 + width * np.arange(max_columns + 1)
    return Columns(starts, edges, np.where(nearer_before, before, after))
