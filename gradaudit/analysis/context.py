"""What all checks work on, computed once per run.

Scales are absolute powers of two, 2^k with k in SCALES_LOG2. Each sample was recorded at some scale; moving its
histogram to another is a shift. Noise at all scales is computed for at most MAX_STEPS sampled steps, spread evenly.

Shape letters: R sample rows, K scales, T tensors.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from gradaudit.analysis.history import ScaleHistory, scale_histories, scale_log2_of
from gradaudit.analysis.noise import Noise, addend_margin_db, own_noise, rounds_in_fp16, total_noise
from gradaudit.analysis.zones import zone_counts
from gradaudit.formats import FP16_DTYPES
from gradaudit.store.reader import Run
from gradaudit.store.tables import Samples, Steps, TensorInfo, only

GRADIENT_KINDS = ("output_grad", "op_grad", "param_grad")

SCALES_LOG2 = np.arange(-30, 41)
"""From a loss summed over a billion elements to Megatron's and DeepSpeed's largest start, with room on both sides."""

TARGET_DB = 40.0
"""1 % error in a gradient: below what batch noise does to it in any training we know of."""

MAX_STEPS = 64
"""Sampled steps at which noise is computed at every scale; more would not move a 10 % quantile."""

QUANTILE = 0.1
"""A layer's SQNR is what 90 % of the sampled steps reach: a single odd step decides nothing."""

CANCELS_DB = 20.0
"""A gradient that stays below this at the best scale is a difference of equals (a bias before a norm): all of it is
rounding noise, at any scale and in FP32 as well, and so it says nothing about the scale."""


@dataclass(frozen=True, slots=True)
class AtAllScales:
    """Noise of the chosen rows at every scale.

    `rows` index the samples, shape [R']; `own_db` and `total_db` have shape [R', K].
    """

    rows: np.ndarray
    own_db: np.ndarray
    total_db: np.ndarray


@dataclass(frozen=True, slots=True)
class Analysis:
    """A run and what follows from it without judging.

    Attributes:
        run: The run.
        steps: Its step table.
        tensors: Its tensors table.
        samples: Gradient samples, sorted by (tensor, step).
        outputs: Activation samples.
        updates: Samples of what updates did to weights that are not FP32.
        histories: The loss scale per update, of each enabled scaler; the one that handled most steps first.
        scale_log2: log2 of the scale each sample carries, shape [R].
        zones: Elements per zone at the scale in force, shape [R, 7].
        applied: Whether a sample's step was applied and every gradient of it finite, shape [R].
        own_db: SQNR of each sample's own rounding at the scale in force, shape [R]; NaN where there is none to tell.
            What is only added to others is measured against the sum.
        sqnr_db: The same with inherited noise; NaN where nothing passed through FP16.
        at_all_scales: Both at every scale, for some of the rows.
        rounds: Whether a tensor rounds in FP16, shape [T].
        touched: Whether FP16 rounding reached it, shape [T].
        cancels: Whether it is a difference of equals, shape [T].
    """

    run: Run
    steps: Steps
    tensors: tuple[TensorInfo, ...]
    samples: Samples
    outputs: Samples
    updates: Samples
    histories: tuple[ScaleHistory, ...]
    scale_log2: np.ndarray
    zones: np.ndarray
    applied: np.ndarray
    own_db: np.ndarray
    sqnr_db: np.ndarray
    at_all_scales: AtAllScales
    rounds: np.ndarray
    touched: np.ndarray
    cancels: np.ndarray

    @property
    def history(self) -> ScaleHistory | None:
        """The scale of the scaler that handled most steps; None without an enabled one."""
        return self.histories[0] if self.histories else None

    @property
    def ran_fp16(self) -> bool:
        """Whether any gradient was FP16."""
        return any(t.dtype in FP16_DTYPES for t in self.tensors if t.kind in GRADIENT_KINDS)

    def rows_of(self, tensor: int, *, applied_only: bool = True, before: int | None = None) -> np.ndarray:
        """Sample rows of one tensor, in step order; only of steps before one if it is given."""
        start, stop = np.searchsorted(self.samples.tensor, [tensor, tensor + 1])
        rows = np.arange(start, stop)
        if applied_only:
            rows = rows[self.applied[rows]]
        return rows if before is None else rows[self.samples.step[rows] < before]

    def layer_db(self, values: np.ndarray, tensor: int, *, before: int | None = None) -> float | None:
        """The SQNR that 90 % of a tensor's applied sampled steps reach; None if it has none."""
        rows = self.rows_of(tensor, before=before)
        known = values[rows][~np.isnan(values[rows])]
        return float(np.quantile(known, QUANTILE, method="lower")) if len(known) else None


def analyse(run: Run) -> Analysis:
    """Compute everything the checks, the replay and the pages share.

    Args:
        run: An open run; may still be written to.

    Raises:
        RunCorrupt: A table cannot be read.
    """
    steps = run.steps
    tensors = run.tensors()
    everything = run.samples()
    known = everything.tensor < len(tensors) if len(everything) else np.zeros(0, dtype=bool)
    everything = everything.select(known)  # a live run's table may lag behind its samples by a moment
    samples = only(everything, tensors, GRADIENT_KINDS)
    scale_log2 = np.where(samples.scaled, scale_log2_of(samples.scale), 0.0)
    applied = _applied(samples, steps)
    here = np.zeros(1)
    own = own_noise(samples, tensors, here)
    total = total_noise(samples, tensors, own)
    rounds = rounds_in_fp16(tensors)
    touched = _touched(tensors)
    margin_db = addend_margin_db(samples, tensors)
    own_db = np.where(rounds[samples.tensor], own.sqnr_db()[:, 0] + margin_db, np.nan)
    sqnr_db = np.where(touched[samples.tensor], total.sqnr_db()[:, 0] + margin_db, np.nan)
    own_db[~applied] = np.nan
    sqnr_db[~applied] = np.nan
    at_all_scales = _at_all_scales(samples, tensors, scale_log2, applied, margin_db)
    zones = zone_counts(samples.counts, samples.num_zero, samples.num_nan, samples.num_inf, samples.amax)
    return Analysis(
        run=run,
        steps=steps,
        tensors=tensors,
        samples=samples,
        outputs=only(everything, tensors, ("output",)),
        updates=only(everything, tensors, ("update",)),
        histories=scale_histories(run.meta, steps),
        scale_log2=scale_log2,
        zones=zones,
        applied=applied,
        own_db=own_db,
        sqnr_db=sqnr_db,
        at_all_scales=at_all_scales,
        rounds=rounds,
        touched=touched,
        cancels=_cancels(at_all_scales, samples, len(tensors)),
    )


def fp16_gradients(analysis: Analysis) -> dict[int, int]:
    """For each parameter gradient the tensor it was computed in under autocast, where both were sampled."""
    sampled = set(np.unique(analysis.samples.tensor).tolist())
    found = {}
    for info in analysis.tensors:
        if info.kind == "param_grad" and len(info.parents) == 1 and {info.id, info.parents[0]} <= sampled:
            parent = analysis.tensors[info.parents[0]]
            if parent.fqn == info.fqn and parent.op == "ToCopy":
                found[info.id] = parent.id
    return found


def listed_tensors(analysis: Analysis) -> list[int]:
    """Ids of the tensors that a list of layers shows: sampled, reached by FP16 (if anything was), each gradient once.

    A parameter's FP32 gradient and the FP16 one that autocast computed it in hold the same values; the parameter's is
    listed. Between the loss and the first FP16 gradient the zones of FP16 do not apply.
    """
    hidden = set(fp16_gradients(analysis).values())
    sampled = np.unique(analysis.samples.tensor).tolist()
    return [t for t in sampled if t not in hidden and (analysis.touched[t] or not analysis.ran_fp16)]


def _applied(samples: Samples, steps: Steps) -> np.ndarray:
    bad = set(steps.step[steps.skipped.astype(bool)].tolist())
    bad |= set(samples.step[(samples.num_nan > 0) | (samples.num_inf > 0)].tolist())
    return ~np.isin(samples.step, np.fromiter(bad, dtype=np.int64, count=len(bad)))


def _touched(tensors: tuple[TensorInfo, ...]) -> np.ndarray:
    touched = np.array([t.dtype in FP16_DTYPES for t in tensors], dtype=bool)
    for _ in range(len(tensors)):
        grown = touched | np.array(
            [any(touched[p] for p in t.parents if p < len(tensors)) for t in tensors], dtype=bool
        )
        if (grown == touched).all():
            break
        touched = grown
    return touched


def _at_all_scales(
    samples: Samples,
    tensors: tuple[TensorInfo, ...],
    scale_log2: np.ndarray,
    applied: np.ndarray,
    margin_db: np.ndarray,
) -> AtAllScales:
    usable = np.unique(samples.step[applied])
    chosen = (
        usable[np.unique(np.linspace(0, len(usable) - 1, MAX_STEPS).round().astype(int))] if len(usable) else usable
    )
    rows = np.flatnonzero(applied & np.isin(samples.step, chosen))
    subset = samples.select(rows)
    own = Noise(np.full((len(rows), len(SCALES_LOG2)), np.nan), np.full((len(rows), len(SCALES_LOG2)), np.nan))
    for level in np.unique(scale_log2[rows]):
        at = np.flatnonzero(scale_log2[rows] == level)
        part = own_noise(subset.select(at), tensors, np.round(SCALES_LOG2 - level))
        own.ratio[at], own.shrinkage[at] = part.ratio, part.shrinkage
    total = total_noise(subset, tensors, own)
    margin_RK = margin_db[rows, None]
    return AtAllScales(rows, own.sqnr_db() + margin_RK, total.sqnr_db() + margin_RK)


def _cancels(levels: AtAllScales, samples: Samples, num_tensors: int) -> np.ndarray:
    cancels = np.zeros(num_tensors, dtype=bool)
    tensor_R = samples.tensor[levels.rows]
    for t in np.unique(tensor_R):
        own, total = (db[tensor_R == t].max(axis=1) for db in (levels.own_db, levels.total_db))
        known = ~np.isnan(own)
        # its own rounding would not be in the way: it is what it inherits
        if known.any():
            cancels[t] = np.median(total[known]) < CANCELS_DB and np.median(own[known]) >= TARGET_DB
    return cancels
