"""The loss scale over time.

The course of the scale gets one verdict, see `scale_course`; the other checks of the group stand on their own.
"""

from __future__ import annotations

import math
from functools import partial
from typing import Any

import numpy as np

from gradaudit.analysis.checks.base import NO_SCALER, Check, Facts, Outcome, percent, place_of, power
from gradaudit.analysis.checks.scale.scale_course import FELL, scale_course
from gradaudit.analysis.context import TARGET_DB
from gradaudit.analysis.history import ScaleHistory
from gradaudit.analysis.report import Evidence, Finding, Place
from gradaudit.analysis.windows import needed_since

STATIC_INTERVAL = 1_000_000
"""A growth interval beyond any run is a way of saying static."""

RUNAWAY_GROWTHS = 3
"""Doublings in a row on gradients of nothing but zeros."""

MIN_STATIC_UPDATES = 10
"""A scale that has not moved for ten updates, overflows included, is held."""

HELD_SHARE = 0.9
"""Share of overflows that leave the scale where it is from which on it is held there; with fewer it thrashes."""


def _look_for(name: str, facts: Facts) -> Outcome:
    if facts.analysis.history is None:
        return NO_SCALER
    finding = scale_course(facts)
    return [finding] if finding is not None and finding.id == name else []


def _runaway(facts: Facts) -> Outcome:
    history = facts.analysis.history
    if history is None:
        return NO_SCALER
    late = history.amax_log2[len(history) // 2 :]
    silent = np.isneginf(late).mean() if len(late) else 0.0
    growths = int((np.diff(history.scale[history.late()[-1] + 1 if len(history.late()) else 0 :]) > 0).sum())
    if growths < RUNAWAY_GROWTHS or silent < 0.9 or history.scale[-1] < history.scale.max():
        return []
    return [
        Finding(
            id="scale-runaway",
            severity="warning",
            confidence="high",
            title="The loss scale grows without limit because the gradients are zero",
            summary=(
                f"The scale reached {power(float(history.scale[-1]))} after {growths} growths while every "
                "parameter gradient "
                f"was exactly zero in {percent(silent)} of the later updates: nothing is left that could overflow."
            ),
            scale_can_fix="partly",
            where=(),
            steps=(int(history.step[0]), int(history.step[-1])),
            evidence=(
                Evidence("num_growths", growths, "growths", RUNAWAY_GROWTHS),
                Evidence("zero_gradient_frac", float(silent), "of the later updates", 0.9),
                Evidence("scale", float(history.scale[-1])),
            ),
            remedy=(
                "Check that the loss depends on the parameters: a detached tensor, a constant loss, a frozen "
                "model. If the "
                "gradients are merely tiny, raise init_scale instead of waiting for it to grow."
            ),
        )
    ]


def _never_grew(facts: Facts) -> Outcome:
    history = facts.analysis.history
    if history is None:
        return NO_SCALER
    if not len(history) or history.found[-1] or history.num_growths or facts.windows.is_empty:
        return []
    course = scale_course(facts)
    if course is not None and course.id in FELL:
        return []
    found = np.flatnonzero(history.found)
    first = int(found[-1]) + 1 if len(found) else 0
    clean, last, interval = len(history) - first, float(history.scale[-1]), history.settings.growth_interval
    lowest, low = needed_since(facts.analysis, int(history.step[first]))
    if low is None or lowest is None or clean >= interval or _is_held(history):
        return []
    if last <= 0 or math.log2(last) >= low:
        return []
    return [
        Finding(
            id="scale-never-grew",
            severity="warning",
            confidence="high" if len(history) > interval // 10 else "medium",
            title="The run is too short for the scale to grow, and it needs to",
            summary=(
                f"The scale stayed at {power(last)} for {clean} clean updates; growing takes {interval:,}. "
                f"{lowest.described} needs at least 2^{low}."
            ),
            scale_can_fix="yes",
            where=(place_of(lowest),),
            steps=(int(history.step[first]), int(history.step[-1])),
            evidence=(
                Evidence("num_clean_updates", clean, "updates since the last overflow", float(interval)),
                Evidence("scale", last, "", 2.0**low),
            ),
            remedy="Start at the recommended init_scale, or use a growth_interval well below the length of the run.",
        )
    ]


def _static_unsafe(facts: Facts) -> Outcome:
    history = facts.analysis.history
    if history is None:
        return NO_SCALER
    if len(history) < MIN_STATIC_UPDATES or not _is_held(history):
        return []
    overflows = history.found & ~facts.unexplained[0]
    overflows[: history.calibration_end] = False
    low = facts.windows.run.low_log2
    scale = float(history.scale[-1])
    underflows = low is not None and scale > 0 and math.log2(scale) < low
    if not (overflows.any() or underflows):
        return []
    needy = facts.windows.lowest.described if facts.windows.lowest is not None else "a gradient"
    harm = (
        f"{int(overflows.sum())} of {len(history)} updates overflowed"
        if overflows.any()
        else f"{needy} needs at least 2^{low} to stay above {TARGET_DB:g} dB"
    )
    return [
        Finding(
            id="static-scale-unsafe",
            severity="warning",
            confidence="high",
            title="The loss scale is held fixed at a value that does harm",
            summary=f"The scale was held at {power(scale)} and {harm}.",
            scale_can_fix="yes",
            where=(),
            steps=(int(history.step[0]), int(history.step[-1])),
            evidence=(
                Evidence("scale", scale),
                Evidence("num_overflows", int(overflows.sum()), f"of {len(history)} updates"),
            ),
            remedy="Let GradScaler move the scale (its default factors), starting at the recommended init_scale.",
        )
    ]


def _is_held(history: ScaleHistory) -> bool:
    """Whether something other than the scaler's rule keeps the scale where it is, from the end of the start on."""
    first = history.calibration_end
    scale, found, tracker = history.scale[first:], history.found[first:], history.growth_tracker[first:]
    if not len(scale) or np.ptp(scale) > 0:
        return False
    if found[:-1].any():
        # an overflow that did not lower it; with a floor above what batches bear some still fit, see scale-thrashing
        return bool(np.ptp(history.scale) == 0 or found.mean() >= HELD_SHARE)
    never_counts = len(tracker) >= MIN_STATIC_UPDATES and (tracker >= 0).all() and not (np.diff(tracker) > 0).any()
    return never_counts or history.settings.growth_interval >= STATIC_INTERVAL


def _resume_reset(facts: Facts) -> Outcome:
    history = facts.analysis.history
    if history is None:
        return NO_SCALER
    scaler = history.scaler
    resumed = [
        o for o in facts.analysis.run.meta.get("optimizers", []) if o.get("resumed") and _begins_with(facts, o, scaler)
    ]
    if not resumed or scaler.get("loaded") or not len(history):
        return []
    if float(history.scale[0]) != history.settings.init_scale or history.growth_tracker[0] > 0:
        return []  # recording began while it was in use
    wasted = int(history.found[: history.calibration_end].sum())
    return [
        Finding(
            id="resume-reset-scale",
            severity="warning",
            confidence="high" if wasted else "medium",
            title="The optimizer was resumed, the loss scale was not",
            summary=(
                f"{resumed[0]['class']} starts with state from earlier steps, but the GradScaler starts again at its "
                f"init_scale, {power(history.settings.init_scale)}; {wasted} step(s) were skipped until it fitted."
            ),
            scale_can_fix="partly",
            where=tuple(Place("optimizer", o["class"]) for o in resumed),
            steps=(int(history.step[0]), int(history.step[max(history.calibration_end - 1, 0)])),
            evidence=(
                Evidence("num_overflows", wasted, "updates at the start"),
                Evidence("scale", float(history.scale[0])),
            ),
            remedy="Save scaler.state_dict() with the checkpoint and call scaler.load_state_dict() on resume.",
        )
    ]


def _begins_with(facts: Facts, optimizer: dict[str, Any], scaler: dict[str, Any]) -> bool:
    """Whether an optimizer's first step is among the first of a scaler: one that joins later finds it in use."""
    steps = facts.analysis.steps
    mine = np.flatnonzero(steps.optimizer == optimizer["id"])
    of_scaler = np.flatnonzero(steps.scaler == scaler["id"])
    if not len(mine) or not len(of_scaler):
        return False
    turns = len(np.unique(steps.optimizer))  # several optimizers may each have an update of their own
    return bool(steps.scaler[mine[0]] == scaler["id"] and steps.step[mine[0]] <= steps.step[of_scaler[0]] + turns)


_COURSE = (
    "scale-zero",
    "scale-at-floor",
    "scale-collapse",
    "scale-decay",
    "scale-thrashing",
    "scale-hunting",
    "scale-calibration",
)

LOSS_SCALE: tuple[Check, ...] = (
    *(Check(name, partial(_look_for, name)) for name in _COURSE),
    Check("scale-runaway", _runaway),
    Check("scale-never-grew", _never_grew),
    Check("static-scale-unsafe", _static_unsafe),
    Check("resume-reset-scale", _resume_reset),
)
