"""The loss scale over the run, one entry per scaler.update(), and how often its rule lets steps be skipped.

Shape letter: U updates.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np

from gradaudit.analysis.report import History
from gradaudit.store.reader import NO_GRADIENT, Steps

CALIBRATION_GAP = 3
"""Clean steps allowed between two overflows of the start: near the limit some batches still fit."""

MAX_DRAWN = 600
"""Points of the loss curve kept for drawing."""


@dataclass(frozen=True, slots=True)
class ScalerSettings:
    """A GradScaler's settings as run.json holds them."""

    init_scale: float
    growth_factor: float
    backoff_factor: float
    growth_interval: int

    def highest_skip_rate(self) -> float:
        """Skipped share of updates when the gradients' maximum is constant: one failed climb per recovery.

        No sequence of independent gradients exceeds it for long; 1 / (N + 1) for factors 2 and 0.5.
        """
        if not (self.growth_factor > 1 and 0 < self.backoff_factor < 1):
            return 0.0
        growths = math.log(1 / self.backoff_factor) / math.log(self.growth_factor)
        return 1 / (self.growth_interval * growths + 1)


@dataclass(frozen=True, slots=True)
class ScaleHistory:
    """Columns per update, shape [U] each.

    Attributes:
        scaler: Entry of run.json's scalers.
        settings: Its settings.
        step: First step of the update.
        scale: Scale in force.
        found: Whether an optimizer found inf or NaN, so that the scale backs off.
        forward_bad: Whether the loss or the batch was non-finite already.
        amax_log2: log2 of the largest unscaled parameter gradient; -inf for all zero, NaN where one was non-finite.
        num_attempts: Optimizer steps attempted under it.
        num_skipped: How many of them were skipped.
        calibration_end: Updates up to here belong to the start, while the scale comes down from init_scale.
    """

    scaler: dict[str, Any]
    settings: ScalerSettings
    step: np.ndarray
    scale: np.ndarray
    found: np.ndarray
    forward_bad: np.ndarray
    amax_log2: np.ndarray
    num_attempts: np.ndarray
    num_skipped: np.ndarray
    calibration_end: int

    def __len__(self) -> int:
        return len(self.step)

    @property
    def num_growths(self) -> int:
        """How often the scale rose from one update to the next."""
        return int((np.diff(self.scale) > 0).sum())

    def late(self) -> np.ndarray:
        """Updates after calibration that found an overflow, as indices."""
        return np.flatnonzero(self.found)[np.flatnonzero(self.found) >= self.calibration_end]

    def episodes(self) -> list[np.ndarray]:
        """`late`, grouped into runs of neighbouring updates."""
        late = self.late()
        return np.split(late, np.flatnonzero(np.diff(late) > 1) + 1) if len(late) else []


def unscaled_amax_log2(steps: Steps) -> np.ndarray:
    """log2 of each step's largest unscaled parameter gradient, shape [steps]; NaN where one was non-finite."""
    largest = np.array([max(float(v.max(initial=0.0)), 0.0) if np.isfinite(v).all() else np.nan for v in _known(steps)])
    scale = np.where(steps.scaled.astype(bool), steps.scale, 1.0)
    with np.errstate(divide="ignore", invalid="ignore"):
        return np.asarray(np.log2(largest) - np.log2(scale))


def _known(steps: Steps) -> list[np.ndarray]:
    return [values[values != NO_GRADIENT] for values in steps.param_amax]


def scale_history(meta: dict[str, Any], steps: Steps) -> ScaleHistory | None:
    """The scale per update of the scaler that handled most steps; None without an enabled one."""
    used = steps.scaler[steps.scaler >= 0]
    scalers = meta.get("scalers", [])
    if not len(used) or not scalers:
        return None
    main = int(np.bincount(used).argmax())
    entry = next((s for s in scalers if s["id"] == main), None)
    if entry is None or "init_scale" not in entry:
        return None
    settings = ScalerSettings(
        entry["init_scale"], entry["growth_factor"], entry["backoff_factor"], entry["growth_interval"]
    )
    mine = np.flatnonzero(steps.scaler == main)
    update = steps.update[mine]
    _, first, inverse = np.unique(update, return_index=True, return_inverse=True)
    num = len(first)
    skipped = steps.skipped[mine].astype(bool)
    found = np.zeros(num, dtype=bool)
    np.logical_or.at(found, inverse, steps.found_inf[mine] == 1)
    forward_bad = np.zeros(num, dtype=bool)
    np.logical_or.at(forward_bad, inverse, (steps.loss_finite[mine] == 0) | (steps.input_finite[mine] == 0))
    amax = np.full(num, -np.inf)
    with np.errstate(invalid="ignore"):
        np.maximum.at(amax, inverse, unscaled_amax_log2(steps)[mine])
    scale = steps.scale[mine][first]
    return ScaleHistory(
        scaler=entry,
        settings=settings,
        step=steps.step[mine][first],
        scale=scale,
        found=found,
        forward_bad=forward_bad,
        amax_log2=amax,
        num_attempts=np.bincount(inverse, minlength=num),
        num_skipped=np.bincount(inverse, weights=skipped, minlength=num).astype(np.int64),
        calibration_end=_calibration_end(found, scale),
    )


def _calibration_end(found: np.ndarray, scale: np.ndarray) -> int:
    last = -1
    for index in np.flatnonzero(found):
        grew = bool((np.diff(scale[: index + 1]) > 0).any())
        held = index + 1 < len(scale) and scale[index + 1] >= scale[index]
        if index - last > CALIBRATION_GAP + 1 or grew or held:
            break
        last = int(index)
    return last + 1


def drawable(steps: Steps) -> History:
    """The loss scale's change points, the skipped steps and a thinned loss curve."""
    if not len(steps):
        return History()
    change = np.flatnonzero(np.concatenate([[True], np.diff(steps.scale) != 0]))
    change = np.unique(np.append(change, len(steps) - 1))
    known = np.flatnonzero(~np.isnan(steps.loss))
    buckets = np.array_split(known, min(MAX_DRAWN, len(known))) if len(known) else []
    peaks = [int(b[np.argmax(np.where(np.isfinite(steps.loss[b]), steps.loss[b], np.inf))]) for b in buckets if len(b)]
    return History(
        scale_points=tuple((int(steps.step[i]), float(steps.scale[i])) for i in change),
        skipped_steps=tuple(int(s) for s in steps.step[steps.skipped.astype(bool)]),
        loss_points=tuple((int(steps.step[i]), float(steps.loss[i])) for i in peaks),
    )
