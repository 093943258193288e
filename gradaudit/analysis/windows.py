"""Safe windows: the scales that neither overflow nor harmfully underflow, per tensor, per step and for the run."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from gradaudit.analysis.context import QUANTILE, SCALES_LOG2, TARGET_DB, Analysis
from gradaudit.analysis.history import scale_log2_of, unscaled_amax_log2
from gradaudit.analysis.overflows import LIMIT_LOG2, born_here, too_large, unexplained
from gradaudit.analysis.report import Window
from gradaudit.formats import FP16
from gradaudit.store.tables import NO_GRADIENT, TensorInfo

OVERFLOW_SHARE = 0.005
"""A scale is safe for a tensor that overflows in at most this share of steps: 1 in 200, about what growth costs."""

EMPTY_SHARE = 0.5
"""No scale fits if none does in at least half of the sampled steps; less often, a dynamic scale can follow."""

LOST_SHARE = 0.9
"""A gradient is lost if it is all zero in nine of ten sampled steps."""

ATTENUATION_LOG2 = 6
"""What one operation takes from a gradient, in binades: one that is all zero below a larger gradient is zero by itself
(a unit that is off, a state that starts at zero)."""

LOST_LOG2 = 6
"""What is flushed entirely needs a scale larger by this at the least: 2^-25 times 2^6 is where 40 dB begin."""


@dataclass(frozen=True, slots=True)
class TensorWindow:
    """Edges as exponents of two; None where nothing bounds the tensor. `censored`: what flushed cannot be seen, so the
    low edge is a lower bound."""

    tensor: int
    low_log2: int | None
    high_log2: int | None
    censored: bool


@dataclass(frozen=True, slots=True)
class Windows:
    """Windows of all FP16 tensors, of the run, and the share of sampled steps at which no scale fits.

    `lowest` and `highest` are the tensors that limit the run's window from below and from above.
    """

    tensors: dict[int, TensorWindow]
    run: Window
    lowest: TensorInfo | None
    highest: TensorInfo | None
    empty_share: float

    @property
    def is_empty(self) -> bool:
        """Whether no single scale fits, step by step and over the run."""
        return self.empty_share >= EMPTY_SHARE and self.run.is_empty


def low_edges(analysis: Analysis) -> np.ndarray:
    """Smallest safe scale of each row of `at_all_scales`, shape [R'], as exponent; NaN where nothing bounds it.

    The inherited noise counts where it can reach the target at all; where it cannot, rounding itself is the limit and a
    scale changes nothing, so the tensor's own noise decides.
    """
    levels = analysis.at_all_scales
    tensor_R = analysis.samples.tensor[levels.rows]
    reachable_R = np.nanmax(np.nan_to_num(levels.total_db, nan=-np.inf), axis=1, initial=-np.inf) >= TARGET_DB + 6.0
    db_RK = np.where(reachable_R[:, None], np.fmin(levels.own_db, levels.total_db), levels.own_db)
    enough_RK = db_RK >= TARGET_DB
    # the last scale that is too small decides, not the first that is enough: noise is not monotone among few values
    short_RK = ~enough_RK
    last_short_R = np.where(short_RK.any(axis=1), len(SCALES_LOG2) - 1 - short_RK[:, ::-1].argmax(axis=1), -1)
    first_R = last_short_R + 1
    edge_R = SCALES_LOG2[0] + first_R  # one beyond the last scale if even that is too small
    bounds = analysis.rounds[tensor_R] & ~analysis.cancels[tensor_R] & ~np.isnan(levels.own_db[:, 0])
    return np.where(bounds & (first_R > 0), edge_R, np.nan)


def high_edges(analysis: Analysis) -> np.ndarray:
    """Largest safe scale of every sample row, shape [R], as exponent; NaN where nothing bounds it.

    A non-finite gradient computed from finite ones overflowed here, at the scale in force, if size can explain it;
    computed from non-finite ones it is an echo and says nothing.
    """
    samples = analysis.samples
    with np.errstate(divide="ignore"):
        amax_log2 = np.log2(samples.amax) - analysis.scale_log2
    edge = np.where(np.isfinite(amax_log2), np.ceil(LIMIT_LOG2 - amax_log2) - 1, np.nan)
    bad = (samples.num_inf > 0) | (samples.num_nan > 0)
    edge[bad] = np.nan
    overflowed = (
        too_large(analysis, born_here(analysis))
        & (samples.num_inf > 0)
        & ~np.isin(samples.step, _forward_bad_steps(analysis))
    )
    edge[overflowed] = np.ceil(analysis.scale_log2[overflowed]) - 1
    edge[~analysis.rounds[samples.tensor]] = np.nan
    return edge


def windows(analysis: Analysis) -> Windows:
    """Safe windows of every tensor that rounds in FP16 and of the run."""
    samples, tensors = analysis.samples, analysis.tensors
    levels = analysis.at_all_scales
    low_R, high_R = low_edges(analysis), high_edges(analysis)
    row_tensor = samples.tensor[levels.rows]
    every_step = _high_from_parameters(analysis)
    found: dict[int, TensorWindow] = {}
    lost = [t for t in np.flatnonzero(analysis.rounds).tolist() if is_lost(analysis, t)]
    for t in np.flatnonzero(analysis.rounds).tolist():
        lows = low_R[row_tensor == t]
        lows = lows[~np.isnan(lows)]
        highs = high_R[analysis.rows_of(t, applied_only=False)]
        highs = np.concatenate([highs[~np.isnan(highs)], every_step.get(t, np.zeros(0))])
        own = analysis.layer_db(analysis.own_db, t)
        if t in lost:
            lows = np.ceil(analysis.scale_log2[analysis.rows_of(t)]) + LOST_LOG2
        found[t] = TensorWindow(
            tensor=t,
            low_log2=int(np.quantile(lows, 1 - QUANTILE, method="higher")) if len(lows) else None,
            high_log2=int(np.quantile(highs, OVERFLOW_SHARE, method="lower")) if len(highs) else None,
            censored=t in lost or (own is not None and own < TARGET_DB),
        )
    low = max((w for w in found.values() if w.low_log2 is not None), key=lambda w: w.low_log2 or 0, default=None)
    high = min((w for w in found.values() if w.high_log2 is not None), key=lambda w: w.high_log2 or 0, default=None)
    seen = [] if high is None or high.high_log2 is None else [high.high_log2]
    return Windows(
        tensors=found,
        run=Window(
            low_log2=low.low_log2 if low else None,
            high_log2=min([*seen, *_high_from_overflows(analysis)], default=None),
            limited_low_by=tensors[low.tensor].fqn if low else None,
            limited_high_by=tensors[high.tensor].fqn if high else None,
        ),
        lowest=tensors[low.tensor] if low else None,
        highest=tensors[high.tensor] if high else None,
        empty_share=_empty_share(analysis, lost, low_R, high_R[levels.rows]),
    )


def needed_since(analysis: Analysis, step: int) -> tuple[TensorInfo | None, int | None]:
    """The tensor that needs the largest scale from a step on, and that scale as exponent; None if none is bounded."""
    rows = analysis.at_all_scales.rows
    recent = analysis.samples.step[rows] >= step
    low_R, tensor_R = low_edges(analysis)[recent], analysis.samples.tensor[rows][recent]
    needed: tuple[TensorInfo | None, int | None] = (None, None)
    for t in np.unique(tensor_R[~np.isnan(low_R)]):
        lows = low_R[(tensor_R == t) & ~np.isnan(low_R)]
        low = int(np.quantile(lows, 1 - QUANTILE, method="higher"))
        if needed[1] is None or low > needed[1]:
            needed = analysis.tensors[t], low
    return needed


def is_lost(analysis: Analysis, tensor: int, before: int | None = None) -> bool:
    """All zero although what it is computed from is not, and is so small that what comes of it vanishes.

    Args:
        analysis: The run.
        tensor: Tensor id.
        before: Look only at steps before this one.
    """
    samples = analysis.samples
    rows = analysis.rows_of(tensor, before=before)
    if not len(rows) or (samples.num_zero[rows] == samples.numel[rows]).mean() < LOST_SHARE:
        return False
    parents = [p for p in analysis.tensors[tensor].parents if p < len(analysis.tensors)]
    parent_rows = [r for p in parents for r in analysis.rows_of(p, before=before).tolist()]
    amax = samples.amax[parent_rows] if parent_rows else np.zeros(0)
    alive = amax[amax > 0]
    return len(alive) > 0 and float(np.median(alive)) < 2.0 ** (FP16.flush_log2 + ATTENUATION_LOG2)


def _empty_share(analysis: Analysis, lost: list[int], low_R: np.ndarray, high_R: np.ndarray) -> float:
    rows = analysis.at_all_scales.rows
    steps, inverse = np.unique(analysis.samples.step[rows], return_inverse=True)
    if not len(steps):
        return 0.0
    at_least_R = np.ceil(analysis.scale_log2[rows]) + LOST_LOG2
    low_R = np.where(np.isin(analysis.samples.tensor[rows], lost), at_least_R, low_R)
    low = np.full(len(steps), -np.inf)
    high = np.full(len(steps), np.inf)
    np.fmax.at(low, inverse, low_R)
    np.fmin.at(high, inverse, high_R)
    return float((low > high).mean())


def _high_from_parameters(analysis: Analysis) -> dict[int, np.ndarray]:
    """Largest safe scale at every step, sampled or not, of weight gradients that were computed in FP16."""
    tensors, steps = analysis.tensors, analysis.steps
    source = {}
    for t in np.flatnonzero(analysis.rounds).tolist():
        if tensors[t].kind == "param_grad":
            source[t] = t
    for info in tensors:
        if info.kind == "param_grad":
            source |= {p: info.id for p in info.parents if p < len(tensors) and tensors[p].fqn == info.fqn}
    scale_log2 = scale_log2_of(np.where(steps.scaled.astype(bool), steps.scale, 1.0))
    found: dict[int, np.ndarray] = {}
    for optimizer in analysis.run.meta.get("optimizers", []):
        rows, amax = steps.param_matrix(optimizer["id"])
        slot = {tensor: i for i, tensor in enumerate(optimizer["params"])}
        for t, param in source.items():
            if analysis.rounds[t] and param in slot and slot[param] < amax.shape[1]:
                column = amax[:, slot[param]]
                usable = np.isfinite(column) & (column > 0) & (column != NO_GRADIENT)
                with np.errstate(divide="ignore"):
                    unscaled = np.log2(column[usable]) - scale_log2[rows[usable]]
                found[t] = np.ceil(LIMIT_LOG2 - unscaled) - 1
    return found


def _high_from_overflows(analysis: Analysis) -> list[int]:
    """What the overflows, sampled or not, leave as the largest safe scale: one entry, or none without any."""
    edges = []
    for history in analysis.histories:
        by_size = np.flatnonzero(history.found & ~unexplained(analysis, history) & (history.scale > 0))
        edges.append(np.ceil(np.log2(history.scale[by_size])) - 1)
    lowest_first = np.sort(np.concatenate(edges)) if edges else np.zeros(0)
    tolerated = int(OVERFLOW_SHARE * len(analysis.steps))
    return [int(lowest_first[tolerated])] if len(lowest_first) > tolerated else []


def _forward_bad_steps(analysis: Analysis) -> np.ndarray:
    steps = analysis.steps
    return np.asarray(steps.step[(steps.loss_finite == 0) | (steps.input_finite == 0)])


def limit_log2(analysis: Analysis) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """log2 of the unscaled magnitude that decides about overflow at each step.

    Returns (expected, lowest, highest), shape [steps] each.

    At sampled steps it is measured: the maximum over every FP16 gradient of the graph. Between them the parameters'
    maximum, known at every step, is multiplied by the ratio of the two at the neighbouring samples; the bounds are the
    parameters' maximum itself and the largest ratio seen nearby. A step that overflowed at scale S has at least
    65,520 / S; from above it is bounded by nothing, and +inf if its forward was non-finite.
    """
    steps, samples = analysis.steps, analysis.samples
    param = unscaled_amax_log2(steps)
    graph = np.full(len(steps), np.nan)
    position = {int(s): i for i, s in enumerate(steps.step)}
    with np.errstate(divide="ignore"):
        amax = np.log2(samples.amax) - analysis.scale_log2
    usable = np.flatnonzero(analysis.rounds[samples.tensor] & analysis.applied & np.isfinite(amax))
    for row in usable:
        i = position.get(int(samples.step[row]))
        if i is not None:
            graph[i] = np.fmax(graph[i], amax[row])
    index = np.arange(len(steps))
    both = np.isfinite(graph) & np.isfinite(param)
    if both.any():
        ratio = graph[both] - param[both]
        expected_ratio = np.interp(index, index[both], ratio)
        nearest = np.searchsorted(index[both], index).clip(0, both.sum() - 1)
        around = np.stack([ratio[np.clip(nearest + d, 0, len(ratio) - 1)] for d in (-2, -1, 0, 1)])
        highest_ratio = np.maximum(around.max(axis=0), expected_ratio)
    else:
        expected_ratio = highest_ratio = np.zeros(len(steps))
    expected = np.where(np.isfinite(graph), graph, param + np.maximum(expected_ratio, 0.0))
    lowest = np.where(np.isfinite(graph), graph, param)
    highest = np.where(np.isfinite(graph), graph, param + np.maximum(highest_ratio, 0.0))
    return _with_overflows(analysis, expected, lowest, highest)


def _with_overflows(
    analysis: Analysis, expected: np.ndarray, lowest: np.ndarray, highest: np.ndarray
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    steps = analysis.steps
    index = np.arange(len(steps))
    nonfinite = np.array([len(ids) > 0 for ids in steps.nonfinite], dtype=bool) | (steps.found_inf == 1)
    clean = np.isfinite(expected) & ~nonfinite
    neighbours = np.interp(index, index[clean], expected[clean]) if clean.any() else np.full(len(steps), -np.inf)
    at_least = LIMIT_LOG2 - scale_log2_of(steps.scale)
    expected = np.where(nonfinite, np.maximum(neighbours, at_least), expected)
    lowest = np.where(nonfinite, at_least, lowest)
    highest = np.where(nonfinite, np.inf, highest)
    forward_bad = nonfinite & ((steps.loss_finite == 0) | (steps.input_finite == 0))
    for values in (expected, lowest):
        values[forward_bad] = np.inf
    return expected, lowest, highest
