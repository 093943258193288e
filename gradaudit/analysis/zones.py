"""Which share of a tensor falls into which zone of a format, at the recorded scale or any other.

A scale of 2^k moves a value's exponent by k and nothing else, so a histogram recorded once answers for every scale.
Bins are whole binades and so are the zone edges, but for two slivers that a histogram cannot see: exactly 2^-25
flushes although nothing else in its bin does, and FP16 overflows from 65,520 on, at the very end of the bin of 2^15;
there the largest magnitude decides.
"""

from __future__ import annotations

import numpy as np

from gradaudit.formats import FP16, MAX_EXPONENT, MIN_EXPONENT, NumberFormat

ZONES = ("zero", "flushed", "subnormal", "normal", "near_max", "overflow", "nan")

NEAR_MAX_BINADES = 2
"""Two binades of headroom or less: one doubling of the scale and one of the gradient would overflow."""

EXPONENTS = np.arange(MIN_EXPONENT, MAX_EXPONENT + 1)


def zone_counts(
    counts: np.ndarray,
    num_zero: np.ndarray,
    num_nan: np.ndarray,
    num_inf: np.ndarray,
    amax: np.ndarray,
    *,
    shift_log2: np.ndarray | int = 0,
    fmt: NumberFormat = FP16,
) -> np.ndarray:
    """Elements per zone after multiplying by 2^shift_log2.

    Args:
        counts: Elements per exponent as recorded, shape [n, NUM_BINS].
        num_zero: Exact zeros, shape [n].
        num_nan: NaNs, shape [n].
        num_inf: Infinities, shape [n].
        amax: Largest finite magnitude as recorded, shape [n].
        shift_log2: Binades to move by, shape [n] or a scalar.
        fmt: Format whose zones are meant.

    Returns:
        Counts in the order of ZONES, shape [n, 7]; each row sums to the tensor's elements.
    """
    shift_N = np.broadcast_to(np.asarray(shift_log2, dtype=np.int64), (len(counts),))
    exponent_NE = EXPONENTS[None, :] + shift_N[:, None]
    overflow_bin = fmt.max_exponent
    over_NE = exponent_NE > overflow_bin
    flushed_NE = exponent_NE < fmt.flush_log2
    subnormal_NE = ~flushed_NE & (exponent_NE < fmt.min_normal_log2)
    near_NE = ~over_NE & ~subnormal_NE & ~flushed_NE & (exponent_NE > overflow_bin - NEAR_MAX_BINADES)
    normal_NE = ~(over_NE | flushed_NE | subnormal_NE | near_NE)
    zones = np.empty((len(counts), len(ZONES)), dtype=np.int64)
    zones[:, 0] = num_zero
    for column, mask in ((1, flushed_NE), (2, subnormal_NE), (3, normal_NE), (4, near_NE), (5, over_NE)):
        zones[:, column] = np.where(mask, counts, 0).sum(axis=1)
    shifted_amax_N = np.ldexp(amax, shift_N.astype(np.int32))
    in_sliver_N = (shifted_amax_N >= fmt.overflow_at) & (shifted_amax_N < 2.0 ** (overflow_bin + 1))
    zones[:, 4] -= in_sliver_N
    zones[:, 5] += in_sliver_N + num_inf
    zones[:, 6] = num_nan
    return zones


def zone_fractions(counts_NZ: np.ndarray) -> np.ndarray:
    """Zone counts as shares of all elements, shape [n, 7]; all zero for tensors without elements."""
    total_N = counts_NZ.sum(axis=1, keepdims=True)
    return np.asarray(np.divide(counts_NZ, total_N, out=np.zeros(counts_NZ.shape), where=total_N > 0))


def headroom_log2(amax: np.ndarray, fmt: NumberFormat = FP16) -> np.ndarray:
    """Binades left before the largest value overflows.

    Args:
        amax: Largest magnitude, any shape, at the scale in question.
        fmt: Number format the tensor was stored in.

    Returns:
        log2(fmt.max_value / amax), same shape. +inf where amax is 0, -inf where it is inf, NaN where it is NaN.
    """
    with np.errstate(divide="ignore"):
        return np.asarray(np.log2(fmt.max_value) - np.log2(np.asarray(amax, dtype=np.float64)))
