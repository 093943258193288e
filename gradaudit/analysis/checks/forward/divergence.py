"""Training that diverged: loss and gradients grew while steps were applied, until a number was not finite."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from gradaudit.analysis.checks.base import Facts, Outcome, Skipped
from gradaudit.analysis.checks.forward.forward_places import magnitude
from gradaudit.analysis.checks.precision.half_weights import optimizer_place
from gradaudit.analysis.checks.scale.scale_course import scale_course
from gradaudit.analysis.history import unscaled_amax_log2
from gradaudit.analysis.report import Evidence, Finding, Place
from gradaudit.store.tables import Steps

LOOK_BACK = 40
"""Applied steps before the end that are looked at: batches differ, and a slower growth than that is no explosion."""

GROWTH_LOG2 = 2.0
"""Loss and gradients four times what they were: more than from batch to batch."""

MIN_RISES = 3
"""Times that the loss rose to a new high: fewer is an odd batch, or an overflow that came at once."""

NEW_HIGH_LOG2 = 0.1
"""A new high counts from here on; less is noise."""

STEADY = 0.7
"""Rank correlation of the loss with time from the lowest point on, below which it goes up and down."""

BEGUN_AT = 0.5
"""Share of the first losses that is reached again: a loss that is small all along and jitters has not diverged."""

NUM_FIRST = 3
"""First losses of which the median counts; and last ones, where it is asked whether the loss came back."""

ONSET = 0.9
"""Share of the growth that lies after the step named as its beginning: what comes before was batch noise."""

MAX_ENDS = 64
"""Skipped steps tried as the end of a growth where the loss itself stayed finite."""


FAST_LOG2 = 0.25
"""Binades per step: a loss that doubles within four steps has left what a schedule of loss weights does."""


@dataclass(frozen=True, slots=True)
class _Growth:
    """What grew, from one row of the step table to another; `end` is the row of the first non-finite number."""

    start: int
    last: int
    end: int
    num_rises: int
    loss_log2: float
    gradient_log2: float

    @property
    def speed_log2(self) -> float:
        """Binades by which the loss grew per step."""
        return self.loss_log2 / max(self.last - self.start, 1)


def divergence(facts: Facts) -> Outcome:
    """Growth of loss and gradients over several applied steps before the first non-finite value."""
    steps = facts.analysis.steps
    if not np.isfinite(steps.loss).any():
        return Skipped("no finite loss was recorded")
    gradients = unscaled_amax_log2(steps)
    for optimizer in np.unique(steps.optimizer).tolist():
        rows = np.flatnonzero(steps.optimizer == optimizer)
        bad_loss = rows[(steps.loss_finite[rows] == 0) & (steps.input_finite[rows] != 0)]
        ends = bad_loss[:1] if len(bad_loss) else rows[steps.skipped[rows].astype(bool)][:MAX_ENDS]
        usable = rows[np.isfinite(steps.loss[rows]) & (steps.loss[rows] != 0) & ~steps.skipped[rows].astype(bool)]
        for end in ends.tolist():
            growth = _growth(steps, usable, gradients, end)
            if growth is not None and not _is_followed(facts, growth):
                return [_finding(facts, growth)]
    return []


def _is_followed(facts: Facts, growth: _Growth) -> bool:
    """Whether the scale merely follows gradients that grow, and training goes on: that is scale-decay."""
    if (facts.analysis.steps.loss_finite == 0).any() or growth.speed_log2 >= FAST_LOG2:
        return False
    course = scale_course(facts)
    return course is not None and course.id == "scale-decay"


def _growth(steps: Steps, usable: np.ndarray, gradients_log2: np.ndarray, end: int) -> _Growth | None:
    """What grew in applied steps with a finite loss before a row, if it did not come back afterwards."""
    before, after = usable[usable < end], usable[usable > end]
    if len(before) <= MIN_RISES or (steps.loss_finite[end] != 0 and len(after) < NUM_FIRST):
        return None
    loss_log2 = np.log2(np.abs(steps.loss[before]))
    low = len(before) - 1 - int(np.argmin(loss_log2[::-1][:LOOK_BACK]))
    rising, gradients = loss_log2[low:], gradients_log2[before[low:]]
    begun = float(np.median(loss_log2[:NUM_FIRST])) + math.log2(BEGUN_AT)
    if len(np.unique(np.sign(steps.loss[before]))) > 1:  # near a change of sign any loss is small
        begun = max(begun, float(loss_log2[: low + 1].max()))
    if not _rises(rising) or rising[-1] < begun:
        return None
    came_back = np.log2(np.abs(steps.loss[after[-NUM_FIRST:]])) < rising[-1] - GROWTH_LOG2 / 2
    known = gradients[np.isfinite(gradients)]
    gradient_log2 = float(known[1:].max() - known[0]) if len(known) > 1 else 0.0
    if gradient_log2 < GROWTH_LOG2 or (len(after) and np.median(came_back) > 0):
        return None
    loss_growth = float(rising[-1] - rising[0])
    onset = int(np.flatnonzero(rising[-1] - rising >= ONSET * loss_growth)[-1])
    num_rises = int((_rise_sizes(rising) >= NEW_HIGH_LOG2).sum())
    return _Growth(int(before[low + onset]), int(before[-1]), end, num_rises, loss_growth, gradient_log2)


def _rise_sizes(values: np.ndarray) -> np.ndarray:
    """By how much each value exceeds all before it."""
    return np.asarray(np.maximum(np.diff(np.maximum.accumulate(values)), 0.0))


def _rises(values: np.ndarray) -> bool:
    """Whether a series that begins at its lowest point goes up, in several steps, and not by one of them alone."""
    sizes = _rise_sizes(values)
    if values[-1] - values[0] < GROWTH_LOG2 or (sizes >= NEW_HIGH_LOG2).sum() < MIN_RISES:
        return False
    without_largest = float(sizes.sum() - sizes.max())
    ranks = np.argsort(np.argsort(values))
    steady = float(np.corrcoef(np.arange(len(values)), ranks)[0, 1])
    return without_largest >= GROWTH_LOG2 / 2 and steady >= STEADY


def _finding(facts: Facts, growth: _Growth) -> Finding:
    steps = facts.analysis.steps
    entries = facts.analysis.run.meta.get("optimizers", [])
    entry = next((one for one in entries if one["id"] == int(steps.optimizer[growth.start])), None)
    rate = entry.get("lr") if entry else None
    start, last, end = (int(steps.step[row]) for row in (growth.start, growth.last, growth.end))
    at_rate = f" with {entry['class']} at learning rate {rate:g}" if entry and rate is not None else ""
    what = "loss" if steps.loss_finite[growth.end] == 0 else "gradient"
    return Finding(
        id="divergence",
        severity="error",
        confidence="high" if growth.num_rises > MIN_RISES else "medium",
        title="The training diverged before anything overflowed",
        summary=(
            f"From step {start} to {last} the loss went from {magnitude(float(steps.loss[growth.start]))} to "
            f"{magnitude(float(steps.loss[growth.last]))}, in {growth.num_rises} rises of applied steps, and the "
            f"largest unscaled gradient grew {magnitude(round(2.0**growth.gradient_log2, 1))} times{at_rate}. The "
            f"first {what} that was not finite came at step {end}: it is the end of that, and what the loss scale does "
            "is a symptom."
        ),
        scale_can_fix="no",
        where=(*([optimizer_place(entry)] if entry else []), Place("step", str(start))),
        steps=(start, end),
        evidence=(
            Evidence("loss_growth_log2", growth.loss_log2, "binades", GROWTH_LOG2),
            Evidence("gradient_growth_log2", growth.gradient_log2, "binades", GROWTH_LOG2),
            Evidence("num_rises", growth.num_rises, "new highs of the loss", MIN_RISES),
            *([Evidence("lr", float(rate))] if rate is not None else []),
        ),
        remedy=(
            "Lower the learning rate, warm up longer, or clip the gradients after unscale_; and check the sign of the "
            "loss. The loss scale is innocent: BF16 or FP32 would diverge as well."
        ),
    )
