"""What the torch GradScaler would have done with other settings on the same recorded run.

The rule is family A of the known loss scalers: the N-th clean step in a row grows the scale, an overflow backs it off
and skips. Source: torch.amp.GradScaler and its update kernel (float32 scale, growth refused when it would be inf, the
tracker reset even then). Replay is exact where the record says whether a step overflows at the replayed scale, and an
interval where it does not.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from gradaudit.analysis.context import QUANTILE, SCALES_LOG2, Analysis, analyse
from gradaudit.analysis.history import scale_log2_of
from gradaudit.analysis.overflows import LIMIT_LOG2
from gradaudit.analysis.windows import limit_log2
from gradaudit.store.reader import Run

_MAX_FLOAT32 = float(np.finfo(np.float32).max)


@dataclass(frozen=True, slots=True)
class TorchPolicy:
    """The settings of torch.amp.GradScaler. Raises ValueError for settings under which it would not work."""

    init_scale: float = 65536.0
    growth_interval: int = 2000
    growth_factor: float = 2.0
    backoff_factor: float = 0.5

    def __post_init__(self) -> None:
        if not (0 < self.init_scale <= _MAX_FLOAT32):
            raise ValueError(f"init_scale is {self.init_scale}; it must be above 0 and finite in float32.")
        if self.growth_interval < 1:
            raise ValueError(f"growth_interval is {self.growth_interval}; it must be 1 or more.")
        if not (1 < self.growth_factor < math.inf):
            raise ValueError(f"growth_factor is {self.growth_factor}; it must be above 1 and finite.")
        if not (0 < self.backoff_factor < 1):
            raise ValueError(f"backoff_factor is {self.backoff_factor}; it must be above 0 and below 1.")


@dataclass(frozen=True, slots=True)
class ScalerState:
    """What a GradScaler carries from one update to the next."""

    scale: float
    growth_tracker: int = 0


def torch_update(state: ScalerState, policy: TorchPolicy, *, found_inf: bool) -> ScalerState:
    """One GradScaler.update(): the scale after it, rounded to float32 as torch keeps it."""
    if found_inf:
        return ScalerState(_float32(state.scale * policy.backoff_factor), 0)
    tracker = state.growth_tracker + 1
    if tracker != policy.growth_interval:
        return ScalerState(state.scale, tracker)
    grown = _float32(state.scale * policy.growth_factor)
    return ScalerState(grown if math.isfinite(grown) else state.scale, 0)


def _float32(value: float) -> float:
    """Rounded as the kernel does: the product is taken in float64, the result kept in float32."""
    with np.errstate(over="ignore"):
        return float(np.float32(value))


@dataclass(frozen=True, slots=True)
class ReplayResult:
    """A replayed run. `step` and `scale` have one entry per attempted update; rates are shares of those.

    `num_skipped_low` and `num_skipped_high` bound the number of skipped steps where the record leaves it open;
    `min_sqnr_db` is the lowest predicted layer SQNR at the replayed scales.
    """

    step: np.ndarray
    scale: np.ndarray
    skipped: np.ndarray
    num_steps: int
    num_skipped: int
    num_skipped_low: int
    num_skipped_high: int
    skip_rate: float
    min_sqnr_db: float | None


def replay(run: Run | Analysis, policy: TorchPolicy) -> ReplayResult:
    """Run the torch rule with other settings over a recorded run.

    Args:
        run: The run, or its analysis if it is at hand.
        policy: Settings to try.
    """
    analysis = run if isinstance(run, Analysis) else analyse(run)
    expected, lowest, highest = limit_log2(analysis)
    groups = _updates(analysis)
    scale, skipped = _simulate(groups, expected, policy)
    bounds = sorted(int(_simulate(groups, limit, policy)[1].sum()) for limit in (lowest, highest))
    scale_at = dict(zip(analysis.steps.step.tolist(), scale_log2_of(scale), strict=True))
    num_skipped = int(skipped.sum())
    num_steps = len(analysis.steps)
    return ReplayResult(
        step=analysis.steps.step,
        scale=scale,
        skipped=skipped,
        num_steps=num_steps,
        num_skipped=num_skipped,
        num_skipped_low=min(bounds[0], num_skipped),
        num_skipped_high=max(bounds[1], num_skipped),
        skip_rate=num_skipped / num_steps if num_steps else 0.0,
        min_sqnr_db=lowest_sqnr_db(analysis, scale_at.__getitem__),
    )


def _updates(analysis: Analysis) -> list[np.ndarray]:
    """Attempted steps that share one scaler.update(), in order; without a scaler each step has its own."""
    steps = analysis.steps
    key = np.where(steps.update >= 0, steps.update, np.arange(len(steps)))
    boundaries = np.flatnonzero((np.diff(key) != 0) | (np.diff(steps.scaler) != 0)) + 1
    return np.split(np.arange(len(steps)), boundaries) if len(steps) else []


def _simulate(groups: list[np.ndarray], limit: np.ndarray, policy: TorchPolicy) -> tuple[np.ndarray, np.ndarray]:
    scale = np.zeros(len(limit))
    skipped = np.zeros(len(limit), dtype=bool)
    state = ScalerState(float(np.float32(policy.init_scale)))
    for group in groups:
        scale[group] = state.scale
        level = math.log2(state.scale) if state.scale > 0 else -math.inf
        overflows = limit[group] >= LIMIT_LOG2 - level
        skipped[group] = overflows
        state = torch_update(state, policy, found_inf=bool(overflows.any()))
    return scale, skipped


def lowest_sqnr_db(analysis: Analysis, scale_log2_at: Callable[[int], float] | None = None) -> float | None:
    """The lowest layer SQNR: per tensor what 90 % of the sampled steps reach, then the lowest tensor.

    Args:
        analysis: The run's analysis.
        scale_log2_at: log2 of the scale at a step; the recorded one by default.

    Returns:
        dB; None if nothing passed through FP16. Tensors that are differences of equals are left out.
    """
    levels = analysis.at_all_scales
    samples = analysis.samples
    if not len(levels.rows):
        return None
    if scale_log2_at is None:
        wanted = analysis.scale_log2[levels.rows]
    else:
        wanted = np.array([scale_log2_at(int(step)) for step in samples.step[levels.rows]])
    column = np.clip(np.round(wanted), SCALES_LOG2[0], SCALES_LOG2[-1]).astype(int) - SCALES_LOG2[0]
    at = np.arange(len(levels.rows))
    rounds = analysis.rounds[samples.tensor[levels.rows]]
    db = np.where(rounds, np.fmin(levels.own_db[at, column], levels.total_db[at, column]), np.nan)
    lowest: float | None = None
    for t in np.unique(samples.tensor[levels.rows]):
        values = db[samples.tensor[levels.rows] == t]
        values = values[~np.isnan(values)]
        if len(values) and not analysis.cancels[t]:
            reached = float(np.quantile(values, QUANTILE, method="lower"))
            lowest = reached if lowest is None else min(lowest, reached)
    return lowest
