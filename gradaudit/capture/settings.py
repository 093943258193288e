"""What to record and how often."""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass
from typing import Any

BURST_STEPS = 2
"""Steps sampled after an overflow: the overflow says where, the next clean ones say how far away the limit is."""

FREE_BURST_SAMPLES = 40
"""Enough for a scale that comes down from 2^40; beyond it bursts may not exceed the regular samples in number."""

COST_SMOOTHING = 0.2
"""Weight of the newest measurement of the cost of a sampled step."""


ORIGINS = ("auto", "always")


@dataclass(frozen=True, slots=True, kw_only=True)
class CaptureSettings:
    """Settings of one recording.

    Attributes:
        every: Histograms are taken every this many steps, at least 1.
        budget: Percent of step time that recording may cost; the interval is lengthened to stay under it. None: no
            limit.
        include: Only modules and parameters whose fqn matches one of these globs get histograms; empty means all.
        exclude: Those that match one of these do not.
        origin: "auto" traces the operations of a forward after a fault, "always" those of every step.
        save_batch: Whether the batch of a step that fails is kept, for `gradaudit.replay_batch`.
    """

    every: int = 10
    budget: float | None = None
    include: tuple[str, ...] = ()
    exclude: tuple[str, ...] = ()
    origin: str = "auto"
    save_batch: bool = False

    def __post_init__(self) -> None:
        if not isinstance(self.every, int) or self.every < 1:
            raise ValueError(f"every is {self.every}; it must be a whole number, 1 or more.")
        if self.budget is not None and not 0 < self.budget <= 100:
            raise ValueError(f"budget is {self.budget}; it must be above 0 and at most 100 (percent of step time).")
        if self.origin not in ORIGINS:
            raise ValueError(f"origin is {self.origin!r}; it must be one of {', '.join(ORIGINS)}.")

    def to_dict(self) -> dict[str, Any]:
        """As written to run.json."""
        return asdict(self)


class Sampler:
    """Decides before each step whether its histograms are taken. The first step's are."""

    def __init__(self, settings: CaptureSettings) -> None:
        self._settings = settings
        self._every = settings.every
        self._burst_left = 0
        self._num_burst = 0
        self._num_regular = 1
        self._sample_cost_s = 0.0

    @property
    def every(self) -> int:
        """The interval in force."""
        return self._every

    def next(self, step: int, num_optimizers: int, *, overflowed: bool) -> bool:
        """Whether to sample the coming step.

        Args:
            step: Its index.
            num_optimizers: Optimizers that take turns; consecutive steps of all of them are sampled together.
            overflowed: Whether the step just closed was skipped, as far as the host knows.
        """
        if overflowed:
            self._burst_left = BURST_STEPS
        in_burst = self._burst_left > 0
        self._burst_left -= in_burst
        if (step // max(num_optimizers, 1)) % self._every == 0:
            self._num_regular += 1
            return True
        if in_burst and self._num_burst < max(FREE_BURST_SAMPLES, self._num_regular):
            self._num_burst += 1
            return True
        return False

    def measured(self, cost_s: float, step_s: float, *, sampled: bool) -> None:
        """Learn what the last step's recording cost, and lengthen or shorten the interval to keep the budget."""
        budget = self._settings.budget
        if budget is None or not sampled or step_s <= cost_s:
            return
        previous = self._sample_cost_s or cost_s
        self._sample_cost_s = (1 - COST_SMOOTHING) * previous + COST_SMOOTHING * cost_s
        allowed_s = (step_s - cost_s) * budget / 100
        self._every = max(self._settings.every, math.ceil(self._sample_cost_s / allowed_s))
