"""The upper side of the gradient zones: what overflows, and what is about to."""

from __future__ import annotations

import math

import numpy as np

from gradaudit.analysis.checks.base import NO_FP16, NUM_NAMED, Facts, Outcome, place_of, power
from gradaudit.analysis.checks.scale.scale_course import FELL, scale_course
from gradaudit.analysis.context import Analysis
from gradaudit.analysis.history import ScaleHistory
from gradaudit.analysis.overflows import born_here, too_large
from gradaudit.analysis.report import Evidence, Finding
from gradaudit.analysis.zones import headroom_log2

HEADROOM_LOG2 = 2
"""Binades of headroom at which one doubling of the scale and one of the gradient overflow."""

RISE_LOG2 = 1.0
"""Growth over the run, in binades, between the medians of its first and last quarter."""

MIN_TREND_SAMPLES = 8
"""Below eight samples a quarter of them is no basis for a trend."""


def overflow(facts: Facts) -> Outcome:
    """Overflows of the backward pass, but for those that any run has while its scale is sought."""
    analysis = facts.analysis
    if not analysis.ran_fp16:
        return NO_FP16
    steps = analysis.steps
    nonfinite = np.array([len(ids) > 0 for ids in steps.nonfinite], dtype=bool) | (steps.found_inf == 1)
    backward = nonfinite & (steps.loss_finite != 0) & (steps.input_finite != 0)
    for history, unexplained in zip(analysis.histories, facts.unexplained, strict=True):
        # what was non-finite for another reason than its size, and the start
        not_meant = unexplained.copy()
        not_meant[: history.calibration_end] = True
        mine = history.update_of >= 0
        backward[mine] &= ~not_meant[history.update_of[mine]]
    if not analysis.histories:
        backward &= ~_unexplained_without_scaler(analysis)
    if not backward.any():
        return []
    course = scale_course(facts)
    if course is not None and course.id in (*FELL, "scale-hunting", "scale-calibration"):
        return []
    if course is None and analysis.histories and all(_gave_way(history) for history in analysis.histories):
        return []  # a drop or two that the scaler dealt with
    return [_overflow_finding(facts, steps.step[backward], steps.scale[backward])]


def _unexplained_without_scaler(analysis: Analysis) -> np.ndarray:
    """Steps that were sampled and whose first non-finite gradient was not one by its size, as a mask."""
    born = born_here(analysis)
    large = too_large(analysis, born)
    steps, samples = analysis.steps.step, analysis.samples.step
    return np.isin(steps, samples[born]) & ~np.isin(steps, samples[large])


def _gave_way(history: ScaleHistory) -> bool:
    """Whether every overflow lowered the scale."""
    return bool((np.diff(history.scale)[history.found[:-1]] < 0).all())


def _overflow_finding(facts: Facts, bad_steps: np.ndarray, scales: np.ndarray) -> Finding:
    analysis = facts.analysis
    samples = analysis.samples
    born = np.flatnonzero(too_large(analysis, born_here(analysis)) & np.isin(samples.step, bad_steps))
    first = [analysis.tensors[samples.tensor[r]] for r in born[np.lexsort((samples.order[born], samples.step[born]))]]
    named = list(dict.fromkeys(first))[:NUM_NAMED]
    if not named:
        ids = [int(i) for step in analysis.steps.nonfinite for i in step]
        named = [analysis.tensors[i] for i in dict.fromkeys(ids) if i < len(analysis.tensors)][:NUM_NAMED]
    high = facts.windows.run.high_log2
    lowest = float(scales.min())
    if high is not None and lowest > 0:
        high = min(high, math.ceil(math.log2(lowest)) - 1)
    safe = f"the largest safe scale is 2^{high}" if high is not None else f"anything from {power(lowest)} up overflows"
    without_scaler = analysis.history is None
    evidence = [
        Evidence("num_overflows", len(bad_steps), f"of {len(analysis.steps)} steps"),
        Evidence("scale", lowest, "", 2.0**high if high is not None else None),
    ]
    return Finding(
        id="gradient-overflow",
        severity="warning",
        confidence="high" if len(born) else "medium",
        title="Gradients overflow in the backward pass at this loss scale",
        summary=(
            f"The forward was finite in {len(bad_steps)} step(s) whose gradients were not; "
            f"{f'first in {named[0].described}; ' if named else ''}{safe}."
        ),
        scale_can_fix="yes",
        where=tuple(place_of(info) for info in named),
        steps=(int(bad_steps.min()), int(bad_steps.max())),
        evidence=tuple(evidence),
        remedy=(
            "Let torch.amp.GradScaler find the scale and skip such steps: without it the optimizer has stepped on inf."
            if without_scaler
            else "Use the recommended init_scale and let the scaler back off: no fixed scale, no high floor."
        ),
    )


def headroom(facts: Facts) -> Outcome:
    """Gradients near the limit that grow."""
    analysis = facts.analysis
    if not analysis.ran_fp16:
        return NO_FP16
    samples = analysis.samples
    rising = []
    for t in np.flatnonzero(analysis.rounds).tolist():
        rows = analysis.rows_of(t)
        rows = rows[samples.amax[rows] > 0]
        if len(rows) < MIN_TREND_SAMPLES:
            continue
        scale = analysis.scale_log2[rows]
        unscaled = np.log2(samples.amax[rows]) - scale
        quarter = len(rows) // 4
        rise = float(np.median(unscaled[-quarter:]) - np.median(unscaled[:quarter]))
        headroom = float(np.median(headroom_log2(samples.amax[rows[-quarter:]])))
        scale_grew = float(np.median(scale[-quarter:])) > float(np.median(scale[:quarter]))
        # a scaler that probes for its ceiling ends near the limit whatever the gradients do
        if rise >= RISE_LOG2 and headroom <= HEADROOM_LOG2 and not scale_grew:
            rising.append((headroom, rise, t))
    if not rising:
        return []
    headroom, rise, t = min(rising)
    low, high = facts.windows.run.low_log2, facts.windows.run.high_log2
    runs_out = low is not None and high is not None and high - rise < low <= high
    info = analysis.tensors[t]
    return [
        Finding(
            id="gradient-headroom-low",
            severity="warning" if runs_out else "info",
            confidence="medium",
            title="A gradient is near FP16's maximum and growing",
            summary=(
                f"{info.described} has {headroom:.1f} binades left below 65,504 at the scale in force, and its "
                "unscaled "
                f"magnitude grew by {rise:.1f} binades over the run."
                + (" Another run's length of it and no scale fits any more." if runs_out else "")
            ),
            scale_can_fix="yes",
            where=(place_of(info),),
            steps=(int(samples.step.min()), int(samples.step.max())),
            evidence=(
                Evidence("headroom", round(headroom, 2), "binades", float(HEADROOM_LOG2)),
                Evidence("growth", round(rise, 2), "binades over the run", RISE_LOG2),
            ),
            remedy=(
                "A dynamic scale follows; a fixed one needs lowering. If it keeps growing, clip after "
                "unscale_ or lower the rate."
            ),
        )
    ]
