"""The loss scale over the run, one entry per scaler.update(), and how often its rule lets steps be skipped.

Shape letter: U updates.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np

from gradaudit.analysis.report import History
from gradaudit.store.tables import NO_GRADIENT, Steps

CALIBRATION_GAP = 3
"""Clean steps allowed between two overflows of the start: near the limit some batches still fit."""

CALIBRATION_CLEAN = 6
"""Clean steps allowed in all before the start is over: a scale that goes on falling now and then drifts."""

SMALLEST_SCALE = 2.0**-149

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
        scaler: Entry of run.json's scalers; the first one's where a script made a new scaler now and then.
        settings: Its settings.
        update_of: For each row of the step table the update that closed it, -1 if another scaler's did; shape [steps].
        step: First step of the update.
        scale: Scale in force.
        found: Whether an optimizer found inf or NaN, so that the scale backs off.
        forward_bad: Whether the loss or the batch was non-finite already.
        amax_log2: log2 of the largest unscaled parameter gradient; -inf for all zero, NaN where one was non-finite.
        growth_tracker: Clean updates in a row before it, as the scaler counts them; -1 where unknown.
        calibration_end: Updates up to here belong to the start, while the scale comes down from init_scale.
    """

    scaler: dict[str, Any]
    settings: ScalerSettings
    update_of: np.ndarray
    step: np.ndarray
    scale: np.ndarray
    found: np.ndarray
    forward_bad: np.ndarray
    amax_log2: np.ndarray
    growth_tracker: np.ndarray
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


def scale_log2_of(scale: np.ndarray) -> np.ndarray:
    """log2 of scales; one of zero counts as float32's smallest number, the last that was more than nothing."""
    return np.asarray(np.log2(np.maximum(scale, SMALLEST_SCALE)))


def unscaled_amax_log2(steps: Steps) -> np.ndarray:
    """log2 of each step's largest unscaled parameter gradient, shape [steps]; NaN where one was non-finite."""
    largest = np.array([max(float(v.max(initial=0.0)), 0.0) if np.isfinite(v).all() else np.nan for v in _known(steps)])
    scale = np.where(steps.scaled.astype(bool), steps.scale, 1.0)
    with np.errstate(divide="ignore", invalid="ignore"):
        return np.asarray(np.log2(largest) - scale_log2_of(scale))


def _known(steps: Steps) -> list[np.ndarray]:
    return [values[values != NO_GRADIENT] for values in steps.param_amax]


def scale_histories(meta: dict[str, Any], steps: Steps) -> tuple[ScaleHistory, ...]:
    """The scale per update of every enabled scaler, the one that handled most steps first.

    Scalers that follow one another, as where a script makes a new one every epoch, are one history: to the model they
    are one scale that jumps.
    """
    entries = {entry["id"]: entry for entry in meta.get("scalers", []) if "init_scale" in entry}
    chains: list[list[int]] = []
    for scaler in sorted(entries, key=lambda scaler: _first_row(steps, scaler)):
        rows = np.flatnonzero(steps.scaler == scaler)
        if not len(rows):
            continue
        chain = next((c for c in chains if np.flatnonzero(steps.scaler == c[-1])[-1] < rows[0]), None)
        if chain is None:
            chains.append([scaler])
        else:
            chain.append(scaler)
    histories = [_history(entries[chain[0]], np.flatnonzero(np.isin(steps.scaler, chain)), steps) for chain in chains]
    return tuple(sorted(histories, key=len, reverse=True))


def _first_row(steps: Steps, scaler: int) -> int:
    rows = np.flatnonzero(steps.scaler == scaler)
    return int(rows[0]) if len(rows) else len(steps)


def _history(entry: dict[str, Any], mine: np.ndarray, steps: Steps) -> ScaleHistory:
    is_new = (np.diff(steps.update[mine]) != 0) | (np.diff(steps.scaler[mine]) != 0)
    inverse = np.concatenate([[0], np.cumsum(is_new)])
    first = np.flatnonzero(np.concatenate([[True], is_new]))
    num = len(first)
    found, forward_bad = np.zeros(num, dtype=bool), np.zeros(num, dtype=bool)
    np.logical_or.at(found, inverse, steps.found_inf[mine] == 1)
    np.logical_or.at(forward_bad, inverse, (steps.loss_finite[mine] == 0) | (steps.input_finite[mine] == 0))
    amax = np.full(num, -np.inf)
    with np.errstate(invalid="ignore"):
        np.maximum.at(amax, inverse, unscaled_amax_log2(steps)[mine])
    update_of = np.full(len(steps), -1)
    update_of[mine] = inverse
    scale = steps.scale[mine][first]
    return ScaleHistory(
        scaler=entry,
        settings=ScalerSettings(
            entry["init_scale"], entry["growth_factor"], entry["backoff_factor"], entry["growth_interval"]
        ),
        update_of=update_of,
        step=steps.step[mine][first],
        scale=scale,
        found=found,
        forward_bad=forward_bad,
        amax_log2=amax,
        growth_tracker=steps.growth_tracker[mine][first],
        calibration_end=_calibration_end(found, scale),
    )


def _calibration_end(found: np.ndarray, scale: np.ndarray) -> int:
    last = -1
    for num_before, index in enumerate(np.flatnonzero(found)):
        grew = bool((np.diff(scale[: index + 1]) > 0).any())
        held = index + 1 < len(scale) and scale[index + 1] >= scale[index]
        num_clean = index - num_before
        if index - last > CALIBRATION_GAP + 1 or num_clean > CALIBRATION_CLEAN or grew or held:
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
