"""The course of the loss scale: is what it does normal?

One verdict at a time, the strongest that holds: zero over at-floor over collapse over decay over thrashing over hunting
over calibration.
"""

from __future__ import annotations

import itertools
import math

import numpy as np

from gradaudit.analysis.checks.base import Facts, percent, power
from gradaudit.analysis.history import ScaleHistory
from gradaudit.analysis.report import Confidence, Evidence, Finding, Place

RECIPROCAL_OVERFLOWS = 2.0**-128
"""At or below it the float32 reciprocal is inf: unscaling makes finite gradients non-finite after they were checked."""

MIN_UNEXPLAINED = 5
"""Halvings that finite gradients do not explain before we speak of a collapse: a single bad batch is not one."""

MIN_PINNED = 3
"""Overflows that leave the scale where it is before it counts as held there."""

PINNED_SHARE = 0.25
"""Share of updates that overflow at the floor; rarer ones are single bad batches."""

RECOVERED_UPDATES = 20
"""Clean updates, and three times as many as there were overflows, after which a burst is over."""

FEW_OVERFLOWS = 3
"""Overflows beyond what the interval implies that any run may have: an odd batch, a lucky climb."""

DECAY_LOG2 = 3
"""Binades of net loss, in at least three separate drops, that make a drift: one or two happen to any run."""


FELL = ("scale-zero", "scale-at-floor", "scale-collapse")
"""Verdicts on a scale that fell for nothing: where it stands from then on is no choice of anybody's."""


def scale_course(facts: Facts) -> Finding | None:
    """The one verdict on the scale's course; the strongest of all scalers' where there are several."""
    for judge in (_zero, _at_floor, _collapse, _decay, _thrashing, _hunting, _calibration):
        for history, mask in zip(facts.analysis.histories, facts.unexplained, strict=True):
            finding = judge(history, mask)
            if finding is not None:
                return finding
    return None


def _zero(history: ScaleHistory, born_elsewhere: np.ndarray) -> Finding | None:
    gone = np.flatnonzero(history.scale <= RECIPROCAL_OVERFLOWS)
    if not len(gone):
        return None
    first = int(gone[0])
    return Finding(
        id="scale-zero",
        severity="error",
        confidence="high",
        title="The loss scale has fallen to nothing",
        summary=(
            f"At step {history.step[first]} the scale was {history.scale[first]:.3g}. Its float32 reciprocal is "
            "inf: finite "
            "gradients become inf or NaN when they are unscaled, after the check, and the optimizer steps on them."
        ),
        scale_can_fix="no",
        where=(Place("step", str(history.step[first])),),
        steps=(int(history.step[first]), int(history.step[-1])),
        evidence=(
            Evidence("scale", float(history.scale[gone].min()), "", RECIPROCAL_OVERFLOWS),
            Evidence("num_overflows", int(history.found.sum()), "updates"),
        ),
        remedy=(
            "Every step from here on may have ruined the weights: go back to a checkpoint from before the scale fell. "
            "GradScaler has no floor, so stop when the scale drops below 1, and find what is non-finite at every scale."
        ),
    )


def _at_floor(history: ScaleHistory, born_elsewhere: np.ndarray) -> Finding | None:
    floor = float(history.scale.min())
    held = np.append(np.diff(history.scale) >= 0, True)
    at_floor = born_elsewhere & held & (history.scale == floor)
    where = np.flatnonzero(at_floor)
    if len(where) < MIN_PINNED or at_floor[where[0] :].mean() < PINNED_SHARE:
        return None
    tail = bool(at_floor[-1])
    return Finding(
        id="scale-at-floor",
        severity="error",
        confidence="high" if tail else "medium",
        title="The loss scale is pinned at its floor and still overflows",
        summary=(
            f"{int(at_floor.sum())} overflows at {power(floor)} did not lower the scale further; every one of those "
            "steps was skipped."
        ),
        scale_can_fix="no",
        where=(Place("step", str(history.step[where[0]])),),
        steps=(int(history.step[where[0]]), int(history.step[where[-1]])),
        evidence=(
            Evidence("scale", floor),
            Evidence("num_overflows", int(at_floor.sum()), "updates at the floor", MIN_PINNED),
        ),
        remedy=(
            "A lower floor only hides it: no finite gradient explains these overflows. Find the first non-finite value "
            "of the forward, of the batch, or of the backward where the loss is finite (the square root or the "
            "logarithm of zero); keep that part in FP32 or train in BF16."
        ),
    )


def _collapse(history: ScaleHistory, born_elsewhere: np.ndarray) -> Finding | None:
    bad = np.flatnonzero(born_elsewhere)
    if len(bad) < MIN_UNEXPLAINED or _is_over(history, bad):
        return None
    clean_before = np.flatnonzero(~history.found[: bad[0]])
    start = int(clean_before[-1]) + 1 if len(clean_before) else 0
    before, after = float(history.scale[start]), float(history.scale[-1])
    if _num_backoffs(history, before, after) < MIN_UNEXPLAINED - 1:
        return None
    forward = int((born_elsewhere & history.forward_bad).sum())
    cause = (
        f"the loss itself was not finite in {forward} of them, so it is the forward that fails"
        if forward
        else "the finite gradients around them lie far below the limit, so something is NaN at every scale"
    )
    confidence: Confidence = "high" if forward or not history.found.all() else "medium"
    return Finding(
        id="scale-collapse",
        severity="error",
        confidence=confidence,
        title="The loss scale collapses and no scale can stop it",
        summary=(
            f"From step {history.step[start]} on the scale fell from {power(before)} to {power(after)} "
            f"in {len(bad)} overflows that finite gradients do not explain: {cause}."
        ),
        scale_can_fix="no",
        where=(Place("step", str(history.step[start])),),
        steps=(int(history.step[start]), int(history.step[bad[-1]])),
        evidence=(
            Evidence("num_unexplained_overflows", len(bad), "updates", MIN_UNEXPLAINED),
            Evidence("num_nonfinite_losses", forward, "updates"),
            Evidence("scale_before", before),
            Evidence("scale_after", after),
        ),
        remedy=(
            "Do not touch the scaler. Find the first non-finite value of the forward (or of the batch) at the first of "
            "these steps; compute that part in FP32 by leaving autocast around it, or train in BF16. A floor under the "
            "scale keeps the weights from being ruined meanwhile."
        ),
    )


def _is_over(history: ScaleHistory, bad: np.ndarray) -> bool:
    """Whether these overflows were one burst and the run went on well after it."""
    num_after = len(history) - 1 - int(bad[-1])
    one_burst = bool(history.found[bad[0] : bad[-1] + 1].all())
    return one_burst and num_after >= max(RECOVERED_UPDATES, 3 * len(bad))


def _late(history: ScaleHistory, born_elsewhere: np.ndarray) -> np.ndarray:
    """Updates after the start that overflowed because the scale was too large for them."""
    late = history.late()
    return np.asarray(late[~born_elsewhere[late]])


def _bursts(late: np.ndarray) -> list[np.ndarray]:
    return np.split(late, np.flatnonzero(np.diff(late) > 1) + 1) if len(late) else []


def _net_drop(history: ScaleHistory, late: np.ndarray) -> float:
    """Backoffs that brought the scale to where it is now: not wasted, as those are that were undone."""
    return _num_backoffs(history, float(history.scale[late[0]]), float(history.scale[-1]))


def _num_backoffs(history: ScaleHistory, before: float, after: float) -> float:
    """How many backoffs in a row lead from one scale to another; 0 if it is not lower."""
    if after >= before:
        return 0.0
    factor = history.settings.backoff_factor
    step = factor if 0 < factor < 1 else 0.5  # the setters of torch's scaler take anything
    return math.log(before / after) / -math.log(step) if after > 0 else math.inf


def _allowed(history: ScaleHistory) -> float:
    """Overflows that the interval implies, with room for chance: half again, two deviations, a few of any run."""
    expected = (len(history) - history.calibration_end) * history.settings.highest_skip_rate()
    return 1.5 * expected + 2 * math.sqrt(expected) + FEW_OVERFLOWS


def _decay(history: ScaleHistory, born_elsewhere: np.ndarray) -> Finding | None:
    late = _late(history, born_elsewhere)
    episodes = _bursts(late)
    if len(episodes) < DECAY_LOG2 or history.scale[-1] <= 0:
        return None
    start = float(history.scale[min(history.calibration_end, len(history) - 1)])
    end = float(min(history.scale[-1], history.scale[late[-1]]))
    thirds = np.array_split(np.log2(history.scale[history.calibration_end :]), 3)
    falls = all(float(np.median(b)) < float(np.median(a)) for a, b in itertools.pairwise(thirds))
    if math.log2(start / end) < DECAY_LOG2 or not falls:
        return None
    growth = _amax_rise(history)
    return Finding(
        id="scale-decay",
        severity="warning",
        confidence="high" if growth >= 1 else "medium",
        title="The loss scale drifts down over the run",
        summary=(
            f"{len(episodes)} separate drops took the scale from {power(start)} to {power(end)} with a finite loss; "
            f"the largest unscaled gradient grew by {growth:.1f} binades meanwhile."
        ),
        scale_can_fix="partly",
        where=(Place("step", str(history.step[late[0]])),),
        steps=(int(history.step[late[0]]), int(history.step[late[-1]])),
        evidence=(
            Evidence("num_drops", len(episodes), "episodes", DECAY_LOG2),
            Evidence("gradient_growth", growth, "binades"),
            Evidence("scale_before", start),
            Evidence("scale_after", end),
        ),
        remedy=(
            "The scaler follows what the gradients do. Look at the layer that limits the scale from above: clip "
            "gradients "
            "(after unscale_), lower the learning rate, or keep that layer in FP32."
        ),
    )


def _amax_rise(history: ScaleHistory) -> float:
    known = history.amax_log2[np.isfinite(history.amax_log2)]
    quarter = max(len(known) // 4, 1)
    return float(np.median(known[-quarter:]) - np.median(known[:quarter])) if len(known) >= 4 else 0.0


def _thrashing(history: ScaleHistory, born_elsewhere: np.ndarray) -> Finding | None:
    late = _late(history, born_elsewhere)
    episodes = _bursts(late)
    allowed = _allowed(history)
    if len(episodes) < 2 or len(late) - _net_drop(history, late) <= allowed:
        return None
    num_updates = len(history) - history.calibration_end
    if np.ptp(history.scale) == 0:
        return None  # a scale that never moves is judged by static-scale-unsafe
    rate = len(late) / num_updates
    return Finding(
        id="scale-thrashing",
        severity="warning",
        confidence="high" if len(late) > 2 * allowed else "medium",
        title="Steps are skipped far more often than the scaler's interval implies",
        summary=(
            f"{len(late)} of {num_updates} updates after the start overflowed ({percent(rate)}) in {len(episodes)} "
            f"separate bursts; growth_interval {history.settings.growth_interval:,} implies at most "
            f"{percent(history.settings.highest_skip_rate())}."
        ),
        scale_can_fix="yes",
        where=(Place("step", str(history.step[late[0]])),),
        steps=(int(history.step[late[0]]), int(history.step[late[-1]])),
        evidence=(
            Evidence("num_overflows", len(late), "updates after the start", round(allowed, 1)),
            Evidence("skip_rate", rate, "of updates after the start", history.settings.highest_skip_rate()),
            Evidence("num_bursts", len(episodes), "episodes"),
        ),
        remedy=(
            "Start at the recommended scale and let the scaler alone: no scaler.update(new_scale) by hand, no "
            "floor above the "
            "safe window. If single batches cause the bursts, clip their loss or look at the data."
        ),
    )


def _hunting(history: ScaleHistory, born_elsewhere: np.ndarray) -> Finding | None:
    late = _late(history, born_elsewhere)
    if not len(late) or not history.num_growths or len(late) > _allowed(history):
        return None
    after = history.scale[np.minimum(late + 1, len(history) - 1)]
    rate = len(late) / (len(history) - history.calibration_end)
    return Finding(
        id="scale-hunting",
        severity="info",
        confidence="high",
        title="Normal: the scaler probes for a larger scale now and then",
        summary=(
            f"{len(late)} overflows, {percent(rate)} of the updates after the start, each after the scale had grown, "
            "and back to "
            f"about {power(float(np.median(after)))}. That is how dynamic scaling finds its ceiling."
        ),
        scale_can_fix="yes",
        where=(),
        steps=(int(history.step[late[0]]), int(history.step[late[-1]])),
        evidence=(
            Evidence("skip_rate", rate, "of updates after the start", history.settings.highest_skip_rate()),
            Evidence("num_growths", history.num_growths, "growths"),
        ),
        remedy="Nothing to do. A longer growth_interval skips fewer steps, in proportion.",
    )


def _calibration(history: ScaleHistory, born_elsewhere: np.ndarray) -> Finding | None:
    end = history.calibration_end
    num = int(history.found[:end].sum())
    if not num or history.forward_bad[:end].any() or (end < len(history) and history.found[end]):
        return None
    after = (
        float(history.scale[end]) if end < len(history) else float(history.scale[-1]) * history.settings.backoff_factor
    )
    still = end >= len(history)
    return Finding(
        id="scale-calibration",
        severity="info",
        confidence="medium" if still else "high",
        title="Normal: the scale came down from its start",
        summary=(
            f"The first {num} overflow(s) brought the scale from {power(float(history.scale[0]))} to {power(after)}"
            + ("; the run ended before a step fitted." if still else ", and then it fitted.")
        ),
        scale_can_fix="yes",
        where=(),
        steps=(int(history.step[0]), int(history.step[max(end - 1, 0)])),
        evidence=(
            Evidence("num_overflows", num, "updates at the start"),
            Evidence("scale_before", float(history.scale[0])),
            Evidence("scale_after", after),
        ),
        remedy=f"Nothing to do; init_scale={power(after)} would save those steps.",
    )
