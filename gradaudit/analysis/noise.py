"""Predicted SQNR: what FP16 rounding does to a gradient at any scale, from its exponent histogram.

A value of exponent e (taken as 1.5 * 2^e) carries, at the scale in question, rounding noise of

    (1.5 * 2^e)^2       where it flushes to zero,
    (2^-24)^2 / 12      where it is subnormal,
    (2^(e - 10))^2 / 12 where it is normal,

so a histogram recorded once gives the noise at every scale. Where most values flush the error is no noise but a loss of
amplitude, the same for all: that part, the shrinkage, is kept apart, since summing over a batch averages noise away but
not a loss.

The noise of a tensor also enters every gradient computed from it. A matrix product passes independent noise on with the
energy of the other factor, whatever the signal does: a weight gradient whose contributions agree across the batch is
cleaner than the output gradient it comes from, one whose contributions cancel is noisier. The run records that factor
(`noise_gain`) for layers' weights; sums over the batch have the factor 1; elsewhere noise is taken to travel as the
signal does.
What is named as the culprit is a tensor whose own ratio is bad.

Sources: Widrow and Kollar, Quantization Noise, for the uniform rounding model; design section 5 for the rest.

Shape letters: R sample rows, E exponents, K scales.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from gradaudit.analysis.zones import EXPONENTS
from gradaudit.formats import FP16, FP16_DTYPES, NumberFormat
from gradaudit.store.tables import Samples, TensorInfo

REPEATING_OPS = frozenset({"Mean", "Sum", "AdaptiveAvgPool1D", "AdaptiveAvgPool2D", "AdaptiveAvgPool3D", "AvgPool2D"})

ADDEND = " -> "
"""In the operation's name of a gradient that is one of several summed: from where to where it flows."""

MANTISSA_MEAN = 1.5
"""Stands for all values of a binade."""


PEAK_RATIO = 4
"""A smooth distribution has at most twice as many values in its top binade as in the one below."""

PEAK_STEPS = 4
"""Values that differ by a few percent round alike while they are no more than four steps of the format."""

MAX_AVERAGING = 0.1
"""Summing over a batch is credited with at most 10 dB: beyond that, errors of similar values agree too much. Chosen on
an MLP, a transformer and a convnet, where it centres the prediction for weight gradients."""


@dataclass(frozen=True, slots=True)
class Noise:
    """Errors relative to the signal, shape [R, K] each.

    `ratio` is the energy of all errors; `shrinkage` (0 to 1) the part of each value that is missing on average, an
    error that follows the signal and so does not average out. Its energy, shrinkage squared, is part of the ratio.
    """

    ratio: np.ndarray
    shrinkage: np.ndarray

    def sqnr_db(self) -> np.ndarray:
        """Signal to noise in dB, shape [R, K]: +inf without noise, NaN without a signal."""
        with np.errstate(divide="ignore"):
            return np.asarray(-10 * np.log10(self.ratio))


def energy(samples: Samples) -> np.ndarray:
    """Sum of squares of each histogram, shape [R], in units of the recorded values."""
    value_E = MANTISSA_MEAN * np.exp2(EXPONENTS.astype(np.float64))
    total_R: np.ndarray = samples.counts @ value_E**2
    rows, bins, peak = _peaks(samples)
    total_R[rows] += peak * (samples.amax[rows] ** 2 - value_E[bins] ** 2)
    return total_R


def _peaks(samples: Samples) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Histograms whose largest values share one magnitude, `amax`: their top bin stands apart from the one below.

    So it is with the gradient of logits, where the right class of every sample has nearly the same.

    Returns:
        Rows, top bins, and how many values are in them.
    """
    rows = np.flatnonzero(samples.counts.any(axis=1))
    top = samples.counts.shape[1] - 1 - (samples.counts[rows, ::-1] > 0).argmax(axis=1)
    in_top = samples.counts[rows, top]
    below = np.where(top > 0, samples.counts[rows, top - 1], 0)
    # the end bin holds larger values too
    apart = (in_top >= PEAK_RATIO * np.maximum(below, 1)) & (top < samples.counts.shape[1] - 1)
    return rows[apart], top[apart], in_top[apart]


def rounds_in_fp16(tensors: Sequence[TensorInfo]) -> np.ndarray:
    """Whether values are rounded to FP16 in making each tensor, shape [T].

    Not where the operation hands on what it received; but where that was wider it is cast on the way.
    """
    half = [t.dtype in FP16_DTYPES for t in tensors]
    copied = [t.exact and all(half[p] for p in t.parents if p < len(tensors)) for t in tensors]
    return np.asarray(np.array(half, dtype=bool) & ~np.array(copied, dtype=bool))


def own_noise(
    samples: Samples, tensors: Sequence[TensorInfo], shift_log2: np.ndarray, fmt: NumberFormat = FP16
) -> Noise:
    """What each tensor's own rounding does to it.

    Args:
        samples: Gradient samples.
        tensors: Tensors table.
        shift_log2: Scales as binades above each sample's recorded one, shape [K].
        fmt: Format the values are rounded to.

    Returns:
        Shapes [R, K]; zero where the tensor did not round in FP16, NaN where there is no finite signal.
    """
    shift_K = np.asarray(shift_log2, dtype=np.float64)
    exponent_EK = EXPONENTS[:, None] + shift_K[None, :]
    value_EK = MANTISSA_MEAN * np.exp2(exponent_EK)
    smallest = 2.0**fmt.min_subnormal_log2
    flushed_EK = exponent_EK < fmt.flush_log2
    step_EK = np.where(exponent_EK < fmt.min_normal_log2, smallest, np.exp2(exponent_EK - fmt.mantissa_bits))
    noise_EK = np.where(flushed_EK, value_EK**2, step_EK**2 / 12)
    # how much of the values' energy the rounded values no longer follow: flushing loses all of theirs, and the
    # binade just above, which rounds up, gives some back
    missing_EK = np.where(
        flushed_EK, value_EK**2, np.where(exponent_EK == fmt.flush_log2, (value_EK - smallest) * value_EK, 0.0)
    )

    noise_RK, missing_RK = samples.counts @ noise_EK, samples.counts @ missing_EK
    rows, bins, peak = _peaks(samples)
    peak_noise, peak_missing = _of_one_magnitude(samples.amax[rows, None] * np.exp2(shift_K), noise_EK[bins], fmt)
    noise_RK[rows] += peak[:, None] * (peak_noise - noise_EK[bins])
    missing_RK[rows] += peak[:, None] * (peak_missing - missing_EK[bins])

    signal_R = energy(samples)
    has_signal = signal_R > 0
    ratio_RK = np.full((len(samples), len(shift_K)), np.nan)
    shrinkage_RK = ratio_RK.copy()
    unit_K = np.exp2(2 * shift_K)
    np.divide(noise_RK / unit_K, signal_R[:, None], out=ratio_RK, where=has_signal[:, None])
    np.divide(missing_RK / unit_K, signal_R[:, None], out=shrinkage_RK, where=has_signal[:, None])
    shrinkage_RK = np.clip(shrinkage_RK, 0.0, 1.0)

    rounds = rounds_in_fp16(tensors)
    untouched_R = has_signal & ~rounds[samples.tensor] if len(samples) else np.zeros(0, dtype=bool)
    ratio_RK[untouched_R] = 0.0
    shrinkage_RK[untouched_R] = 0.0
    return Noise(ratio_RK, shrinkage_RK)


def _of_one_magnitude(value: np.ndarray, usual_noise: np.ndarray, fmt: NumberFormat) -> tuple[np.ndarray, np.ndarray]:
    """Noise and missing energy of values that all have this magnitude, as long as steps are coarse enough to matter."""
    smallest = 2.0**fmt.min_subnormal_log2
    with np.errstate(over="ignore", invalid="ignore"):
        rounded = np.round(value / smallest) * smallest
        known = value < PEAK_STEPS * smallest
        noise = np.where(known, (value - rounded) ** 2, usual_noise)
        missing = np.where(known, np.abs(value - rounded) * value, 0.0)
    return noise, missing


def total_noise(samples: Samples, tensors: Sequence[TensorInfo], own: Noise) -> Noise:
    """Own noise plus what was inherited along the graph from the tensors between each one and the loss.

    Args:
        samples: Sorted by (tensor, step).
        tensors: Tensors table, whose `parents` are the graph.
        own: From `own_noise`.

    Returns:
        Shapes [R, K]; NaN where `own` is.
    """
    ratio_RK, shrinkage_RK = own.ratio.copy(), own.shrinkage.copy()
    signal_R = energy(samples)
    bounds = np.searchsorted(samples.tensor, np.arange(len(tensors) + 1))
    row_of = [dict(zip(samples.step[a:b].tolist(), range(a, b), strict=True)) for a, b in itertools.pairwise(bounds)]
    gain_of = {
        (tensors[samples.tensor[row]].fqn, int(samples.step[row])): float(samples.noise_gain[row])
        for row in np.flatnonzero(np.isfinite(samples.noise_gain))
    }
    order = _parents_first(tensors)
    repeats_of = _repeats(tensors, order)
    for t in order:
        info = tensors[t]
        if not info.parents:
            continue
        for step, row in row_of[t].items():
            rows = [row_of[p][step] for p in info.parents if p < len(tensors) and step in row_of[p]]
            rows = [r for r in rows if signal_R[r] > 0]
            if not rows or not signal_R[row] > 0:
                continue
            weight = signal_R[rows] / signal_R[rows].sum()
            gain = _noise_gain(info, [tensors[samples.tensor[r]] for r in rows], gain_of, step)
            amplification = 1.0
            if gain is not None:
                amplification = gain * signal_R[rows].sum() / signal_R[row]
                repeats = max(repeats_of[p] for p in info.parents if p < len(tensors))
                amplification = max(amplification, MAX_AVERAGING, min(1.0, amplification * repeats))
            inherited_K, missing_K = weight @ ratio_RK[rows], weight @ shrinkage_RK[rows]
            if amplification > 1.0:  # the signal cancels in the sum; errors do not
                inherited_K = inherited_K * amplification
            else:
                followed_K = np.minimum(missing_K**2, inherited_K)
                inherited_K = amplification * (inherited_K - followed_K) + followed_K
            # what flushes here takes its errors with it
            ratio_RK[row] += (1.0 - own.shrinkage[row] ** 2) * inherited_K
            shrinkage_RK[row] = np.maximum(shrinkage_RK[row], missing_K)
    return Noise(ratio_RK, shrinkage_RK)


def addend_margin_db(samples: Samples, tensors: Sequence[TensorInfo]) -> np.ndarray:
    """By how much a gradient that is only added to others may be noisier than their sum, in dB, shape [R].

    What counts of an addend is what it does to the sum: one that is small beside the others may flush unnoticed. Zero
    for gradients that are no addends.
    """
    sum_of = {p: info.id for info in tensors for p in info.parents if p < len(tensors) and ADDEND in tensors[p].op}
    margin = np.zeros(len(samples))
    addends = np.flatnonzero(np.isin(samples.tensor, list(sum_of)))
    if not len(addends):
        return margin
    signal_R = energy(samples)
    row_at = {(int(t), int(s)): row for row, (t, s) in enumerate(zip(samples.tensor, samples.step, strict=True))}
    for row in addends:
        total = row_at.get((sum_of[int(samples.tensor[row])], int(samples.step[row])))
        if total is not None and signal_R[total] > signal_R[row] > 0:
            margin[row] = 10 * math.log10(signal_R[total] / signal_R[row])
    return margin


def _repeats(tensors: Sequence[TensorInfo], order: Sequence[int]) -> list[float]:
    """How often each gradient repeats one value: the backward of a mean hands the same to all it was taken over.

    Equal values round alike, so their errors agree and do not average out in a sum.
    """
    repeats = [1.0] * len(tensors)
    for t in order:
        for p in (p for p in tensors[t].parents if p < len(tensors)):
            if tensors[p].op in REPEATING_OPS and math.prod(tensors[p].shape) > 0:
                widened = math.prod(tensors[t].shape) / math.prod(tensors[p].shape)
                repeats[t] = max(repeats[t], repeats[p] * max(widened, 1.0))
            elif tensors[t].exact:
                repeats[t] = max(repeats[t], repeats[p])
    return repeats


def _noise_gain(
    info: TensorInfo, parents: Sequence[TensorInfo], gain_of: dict[tuple[str, int], float], step: int
) -> float | None:
    """Energy that independent errors of the parents bring to this tensor, per unit of theirs; None: as the signal."""
    if all(parent.fqn == info.fqn for parent in parents):
        return None
    recorded = gain_of.get((info.fqn, step))
    if recorded is not None:
        return recorded
    # a bias or a norm's weight: a sum over the batch of the output gradient, times values of unit variance at most
    is_vector = len(info.shape) == 1 and all(len(parent.shape) > 1 for parent in parents)
    return 1.0 if is_vector and (info.kind == "param_grad" or info.op == "ToCopy") else None


def _parents_first(tensors: Sequence[TensorInfo]) -> list[int]:
    """Tensor ids, parents first; a cycle (names that moved between steps) is cut where it closes."""
    order: list[int] = []
    seen = [False] * len(tensors)
    for start in range(len(tensors)):
        stack = [(start, False)]
        while stack:
            t, done = stack.pop()
            if done:
                order.append(t)
            elif not seen[t]:
                seen[t] = True
                stack.append((t, True))
                stack += [(p, False) for p in tensors[t].parents if p < len(tensors) and not seen[p]]
    return order
