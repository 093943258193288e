"""Which overflows finite gradients explain: those that a smaller scale would have spared.

A gradient of ordinary size that the scale took over the limit is explained. A non-finite loss is not, nor is a gradient
that is inf or NaN at every scale (the square root of zero, inf times zero): there the scale falls for nothing.
"""

from __future__ import annotations

import math

import numpy as np

from gradaudit.analysis.context import Analysis
from gradaudit.analysis.history import ScaleHistory, scale_log2_of
from gradaudit.formats import FP16
from gradaudit.store.tables import NO_GRADIENT, Steps

LIMIT_LOG2 = float(np.log2(FP16.overflow_at))

SLACK_LOG2 = 3
"""An overflow is explained by finite gradients if they come within three binades of the limit: batches differ."""

OUTLIER_LOG2 = 10
"""The same where nothing of the overflowing step stayed finite to compare with: single batches may be far larger."""

AMPLIFICATION_LOG2 = 10
"""By how much one operation may enlarge a gradient, sums over a batch aside: a matrix of large weights does, by a few
binades. A division by zero enlarges anything, at any scale."""

MAX_COMPARED = 20
"""Clean steps looked at for the usual factor between a gradient and its source."""

NEVER_EXPLAINED_LOG2 = -10
"""With nothing finite to compare, an overflow at 2^-10 would take gradients above 6.7e7: nothing finite does that."""


def born_here(analysis: Analysis) -> np.ndarray:
    """Whether a sample is non-finite although all it was computed from was finite, shape [R]."""
    samples = analysis.samples
    bad = (samples.num_inf > 0) | (samples.num_nan > 0)
    bad_at = set(zip(samples.tensor[bad].tolist(), samples.step[bad].tolist(), strict=True))
    born = np.zeros(len(samples), dtype=bool)
    for row in np.flatnonzero(bad):
        step = int(samples.step[row])
        born[row] = not any((p, step) in bad_at for p in analysis.tensors[samples.tensor[row]].parents)
    return born


def sources_seen(analysis: Analysis, rows: np.ndarray) -> np.ndarray:
    """Whether what some samples were computed from is known of their steps too, shape of `rows`.

    Where another graph took its turn, the sources that are on record were not part of it.
    """
    samples = analysis.samples
    seen = set(zip(samples.tensor.tolist(), samples.step.tolist(), strict=True))
    ever = set(samples.tensor.tolist())
    known = []
    for row in rows:
        parents = analysis.tensors[samples.tensor[row]].parents
        known.append(all((p, int(samples.step[row])) in seen for p in parents if p in ever))
    return np.array(known, dtype=bool)


def too_large(analysis: Analysis, born: np.ndarray) -> np.ndarray:
    """Whether a non-finite sample that was born here is one by its size, shape [R].

    It is if its largest finite value comes near the limit, or if those it was computed from would take it there: by the
    factor between the two at clean steps, where there are any.
    """
    samples = analysis.samples
    large = np.zeros(len(samples), dtype=bool)
    gains: dict[int, float] = {}
    for row in np.flatnonzero(born):
        t = int(samples.tensor[row])
        if t not in gains:
            gains[t] = _usual_gain_log2(analysis, t)
        source = _sources_log2(analysis, int(row))
        if np.isfinite(gains[t]):
            reach = source + gains[t] + SLACK_LOG2
        else:
            parents = [analysis.tensors[p] for p in analysis.tensors[t].parents if p < len(analysis.tensors)]
            num_sources = max((math.prod(parent.shape) for parent in parents), default=1)
            summed = _log2(num_sources / max(samples.numel[row], 1))
            reach = source + AMPLIFICATION_LOG2 + max(summed, 0.0)
        large[row] = max(reach, _log2(samples.amax[row]) + SLACK_LOG2) >= LIMIT_LOG2
    return large


def _sources_log2(analysis: Analysis, row: int) -> float:
    """log2 of the largest value that a sample was computed from: the scale itself next to the loss."""
    samples, found = analysis.samples, [-math.inf]
    parents = analysis.tensors[samples.tensor[row]].parents
    for parent in parents:
        rows = analysis.rows_of(parent, applied_only=False)
        rows = rows[samples.step[rows] == samples.step[row]]
        found += [_log2(value) for value in samples.amax[rows]]
    if not parents or not any(analysis.tensors[p].parents for p in parents if p < len(analysis.tensors)):
        found.append(float(analysis.scale_log2[row]))
    return max(found)


def _usual_gain_log2(analysis: Analysis, tensor: int) -> float:
    """By how many binades a gradient exceeds what it is computed from, at most, at clean steps; -inf without any."""
    rows = analysis.rows_of(tensor)
    gains = [_log2(analysis.samples.amax[row]) - _sources_log2(analysis, int(row)) for row in rows[-MAX_COMPARED:]]
    return max((gain for gain in gains if math.isfinite(gain)), default=-math.inf)


def _log2(value: float) -> float:
    return math.log2(value) if value > 0 else -math.inf


def unexplained(analysis: Analysis, history: ScaleHistory) -> np.ndarray:
    """Updates whose overflow no finite gradient explains, as a mask of shape [U].

    A non-finite loss explains none. Where the step was sampled, the gradient that was non-finite first decides.
    Otherwise the largest gradient of the clean updates on either side, times the factor by which the loss and those
    parameters that stayed finite exceed theirs, has to come near the limit at the scale in force. Failing that, the
    nearest sampled overflow stands for it.
    """
    if not history.found.any():
        return history.found.copy()
    judged = _judged_by_samples(analysis, history)
    usual = _usual_log2(analysis, history)
    enlarged = _enlarged_log2(analysis.steps, history)
    reach = usual + np.nan_to_num(enlarged) + scale_log2_of(history.scale)
    for update in np.flatnonzero(history.found & np.isnan(judged)):
        if np.isfinite(reach[update]):
            slack = OUTLIER_LOG2 if np.isnan(enlarged[update]) else SLACK_LOG2
            judged[update] = reach[update] < LIMIT_LOG2 - slack
    known = np.flatnonzero(~np.isnan(judged))
    for update in np.flatnonzero(history.found & np.isnan(judged)):
        if len(known):
            judged[update] = judged[known[np.abs(known - update).argmin()]]
        else:
            judged[update] = history.scale[update] < 2.0**NEVER_EXPLAINED_LOG2
    return np.asarray(history.found & (history.forward_bad | (judged == 1)))


def _judged_by_samples(analysis: Analysis, history: ScaleHistory) -> np.ndarray:
    """1: not by its size, 0: by its size, NaN: not sampled; shape [U]."""
    samples = analysis.samples
    born = born_here(analysis)
    large = too_large(analysis, born)
    update_at = dict(zip(analysis.steps.step.tolist(), history.update_of.tolist(), strict=True))
    judged = np.full(len(history), np.nan)
    rows = np.flatnonzero(born)
    for row in rows[sources_seen(analysis, rows)]:
        update = update_at.get(int(samples.step[row]), -1)
        if update >= 0:
            judged[update] = np.fmin(judged[update], 0.0 if large[row] else 1.0)
    return judged


def _usual_log2(analysis: Analysis, history: ScaleHistory) -> np.ndarray:
    """log2 of the largest unscaled gradient of the clean updates next to each overflow, shape [U]; NaN if unknown."""
    usual = np.full(len(history), np.nan)
    clean = np.flatnonzero(~history.found & np.isfinite(history.amax_log2))
    above = _graph_above_params(analysis)
    for update in np.flatnonzero(history.found) if len(clean) else []:
        usual[update] = history.amax_log2[_beside(clean, int(update))].max() + above
    return usual


def _beside(clean: np.ndarray, index: int) -> np.ndarray:
    """The entry before and the one after."""
    after = np.searchsorted(clean, index)
    return clean[max(after - 1, 0) : after + 1]


def _enlarged_log2(steps: Steps, history: ScaleHistory) -> np.ndarray:
    """By how many binades the loss, or any parameter that stayed finite, exceeds what it was on either side.

    Shape [U]; NaN where neither can be compared.
    """
    enlarged = np.full(len(history), np.nan)
    with np.errstate(divide="ignore"):
        loss_log2 = np.log2(np.abs(steps.loss))
    for optimizer in np.unique(steps.optimizer):
        rows, amax = steps.param_matrix(int(optimizer))
        mine = history.update_of[rows] >= 0
        rows, amax = rows[mine], amax[mine]
        finite = np.isfinite(amax) & (amax > 0) & (amax != NO_GRADIENT)
        scale = np.where(steps.scaled[rows].astype(bool), steps.scale[rows], 1.0)
        sizes = np.full((len(rows), amax.shape[1] + 1), np.nan)
        sizes[:, :-1][finite] = np.log2(amax[finite])
        sizes -= scale_log2_of(scale)[:, None]
        # a loss that stays as it was says nothing: only a larger one is a sign
        sizes[:, -1] = np.where(np.isfinite(loss_log2[rows]), loss_log2[rows], np.nan)
        found = history.found[history.update_of[rows]]
        clean = np.flatnonzero(~found)
        for i in np.flatnonzero(found) if len(clean) else []:
            factor = sizes[i] - np.fmax.reduce(sizes[_beside(clean, int(i))], axis=0)
            if factor[-1] < SLACK_LOG2:
                factor[-1] = np.nan
            update = history.update_of[rows[i]]
            enlarged[update] = np.fmax(enlarged[update], np.fmax.reduce(factor))
    return np.asarray(np.maximum(enlarged, 0.0))


def _graph_above_params(analysis: Analysis) -> float:
    """Binades by which the largest FP16 gradient of the graph exceeds the largest parameter gradient of its step."""
    samples, is_param = analysis.samples, np.array([t.kind == "param_grad" for t in analysis.tensors], dtype=bool)
    usable = np.flatnonzero(analysis.applied & (samples.amax > 0))
    if not len(usable):
        return 0.0
    steps, inverse = np.unique(samples.step[usable], return_inverse=True)
    amax = np.log2(samples.amax[usable]) - analysis.scale_log2[usable]
    params, graph = np.full(len(steps), np.nan), np.full(len(steps), np.nan)
    for into, chosen in ((params, is_param), (graph, analysis.rounds)):
        mask = chosen[samples.tensor[usable]]
        np.fmax.at(into, inverse[mask], amax[mask])
    return float(np.fmax.reduce(graph - params, initial=0.0))
