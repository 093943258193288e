"""One layer's exponents over its samples, and the share of elements in every zone at every scale the slider offers.

A scale of 2^k only moves exponents by k, so the page gets the answer for each k at once and asks nothing while the
slider moves. Letters in names: N samples, E exponents, K scales, Z zones.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from gradaudit.analysis.zones import ZONES, zone_counts
from gradaudit.formats import MAX_EXPONENT, MIN_EXPONENT, NUM_BINS
from gradaudit.store import Samples

LOWEST_LOG2, HIGHEST_LOG2 = -8, 28
"""The slider spans these powers of two, and reaches further where a run's own scales do."""

SLIDER_MARGIN = 4
"""Powers of two offered on both sides of the scales a run used."""

LIMIT_LOG2 = 126
"""Larger powers of two are no FP32 numbers, and a loss scale is one."""


@dataclass(frozen=True, slots=True)
class Exponents:
    """Sum of histograms, moved to scale 1.

    `counts` are elements per floor(log2 |gradient|) from `lowest` on, shape [E]; `zones` elements per zone at the
    scales 2^`scales_log2`, shape [K, 7]. `scale_low` and `scale_high` bound the scales at which the samples were
    recorded, `scale_log2` is the last one's power of two. `num_left_out` samples carried a scale of 0 or inf, which
    cannot be divided out. `is_rounded` says that a scale was no power of two, so that bins are off by half a binade.
    """

    counts: np.ndarray
    lowest: int
    zones: np.ndarray
    scales_log2: range
    scale_log2: int
    scale_low: float
    scale_high: float
    first_step: int
    last_step: int
    num_samples: int
    num_left_out: int
    is_rounded: bool

    @property
    def numel(self) -> int:
        """Elements of all samples together."""
        return int(self.zones[0].sum()) if len(self.zones) else 0


def gather(samples: Samples) -> Exponents:
    """Add up the histograms of one tensor.

    Args:
        samples: Rows of one tensor, sorted by step.
    """
    usable = ~samples.scaled | (np.isfinite(samples.scale) & (samples.scale > 0))
    kept = samples.select(usable)
    scale_N = np.where(np.isfinite(kept.scale) & (kept.scale > 0), kept.scale, 1.0)
    exact_N = np.where(kept.scaled, np.log2(scale_N), 0.0)
    shift_N = np.clip(np.round(exact_N), -LIMIT_LOG2, LIMIT_LOG2).astype(np.int64)
    force_N = np.clip(np.round(np.log2(scale_N)), -LIMIT_LOG2, LIMIT_LOG2).astype(np.int64)
    scales = _scales(force_N)
    lowest = MIN_EXPONENT - int(shift_N.max(initial=0))
    counts = np.zeros(MAX_EXPONENT - int(shift_N.min(initial=0)) - lowest + 1, dtype=np.int64)
    zones = np.zeros((len(scales), len(ZONES)), dtype=np.int64)
    for shift in np.unique(shift_N):
        rows = kept.select(shift_N == shift)
        start = MIN_EXPONENT - int(shift) - lowest
        counts[start : start + NUM_BINS] += rows.counts.sum(axis=0)
        zones += _zones(rows, scales, int(shift))
    return Exponents(
        counts=counts,
        lowest=lowest,
        zones=zones,
        scales_log2=scales,
        scale_log2=int(force_N[-1]) if len(force_N) else 0,
        scale_low=float(scale_N.min(initial=math.inf)),
        scale_high=float(scale_N.max(initial=-math.inf)),
        first_step=int(kept.step[0]) if len(kept) else 0,
        last_step=int(kept.step[-1]) if len(kept) else 0,
        num_samples=len(kept),
        num_left_out=len(samples) - len(kept),
        is_rounded=bool((exact_N != shift_N).any()),
    )


def _scales(force_N: np.ndarray) -> range:
    low = min(LOWEST_LOG2, int(force_N.min(initial=0)) - SLIDER_MARGIN)
    high = max(HIGHEST_LOG2, int(force_N.max(initial=0)) + SLIDER_MARGIN)
    return range(max(low, -LIMIT_LOG2), min(high, LIMIT_LOG2) + 1)


def _zones(rows: Samples, scales: range, shift: int) -> np.ndarray:
    """Elements per zone of all rows together at every scale, shape [K, 7]."""
    num_scales = len(scales)
    return zone_counts(
        np.broadcast_to(rows.counts.sum(axis=0), (num_scales, NUM_BINS)),
        np.full(num_scales, rows.num_zero.sum()),
        np.full(num_scales, rows.num_nan.sum()),
        np.full(num_scales, rows.num_inf.sum()),
        np.full(num_scales, rows.amax.max(initial=0.0)),
        shift_log2=np.arange(scales.start, scales.stop) - shift,
    )
