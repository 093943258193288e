"""Gradient zones: what flushes, what never arrives, and where no scale fits. What overflows is in gradient_overflow."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from gradaudit.analysis.checks.base import NO_FP16, NUM_NAMED, Check, Facts, Outcome, Skipped, percent, place_of, power
from gradaudit.analysis.checks.calls.call_places import detail, number
from gradaudit.analysis.checks.gradients.gradient_overflow import headroom, overflow
from gradaudit.analysis.checks.scale.scale_course import FELL, scale_course
from gradaudit.analysis.context import QUANTILE, TARGET_DB, Analysis
from gradaudit.analysis.noise import energy
from gradaudit.analysis.report import Evidence, Finding, Place
from gradaudit.analysis.windows import EMPTY_SHARE, is_lost
from gradaudit.formats import FP16
from gradaudit.store.tables import NO_GRADIENT

FLUSHED_ZERO_SHARE = 0.01
"""Zeros beyond those of a larger scale, as a share of elements, that must have been flushed."""

MIN_SILENT_STEPS = 5
"""A layer may start without a gradient (an adapter's first step); after five it is no start any more."""


@dataclass(frozen=True, slots=True)
class _TooSmall:
    """Tensors that lose too much: the worst first with their SQNR, the all-zero, those with zeros that were flushed."""

    low: list[tuple[float, int]]
    lost: list[int]
    flushed: list[int]

    @property
    def tensors(self) -> list[int]:
        """All of them, the worst first."""
        return [*(t for _, t in self.low), *self.lost, *self.flushed]


def _underflow(facts: Facts) -> Outcome:
    analysis = facts.analysis
    if not analysis.ran_fp16:
        return NO_FP16
    if not analysis.applied.any():
        return Skipped("no sampled step was applied with finite gradients")
    course = scale_course(facts)
    # what a scale that fell for another reason did to the gradients is that reason's doing
    before = course.steps[0] if course is not None and course.id in FELL else None
    small = _too_small(analysis, before)
    if not small.tensors:
        return []
    gone = any(_is_layer(analysis, t) for t in small.lost)
    named = [place_of(analysis.tensors[t]) for t in small.tensors]
    rows = np.concatenate([analysis.rows_of(t, before=before) for t in small.tensors])
    scale, steps = float(2.0 ** np.median(analysis.scale_log2[rows])), analysis.samples.step[rows]
    needed = facts.windows.run.low_log2
    if needed is not None and 2.0**needed <= scale:
        needed = None  # what has flushed is not in the histogram: it only tells that this is not enough
    evidence = [
        Evidence("num_tensors_below_target", len(small.tensors), "FP16 gradients"),
        Evidence("scale", scale, "", 2.0**needed if needed is not None else None),
    ]
    if small.low:
        evidence.insert(0, Evidence("sqnr_db", round(small.low[0][0], 2), "dB", TARGET_DB))
    return [
        Finding(
            id="gradient-underflow",
            severity="error" if gone else "warning",
            confidence="high" if small.low else "medium",
            title="Gradients are too small for FP16 at this loss scale",
            summary=_underflow_summary(facts, small, scale, needed),
            scale_can_fix="yes",
            where=tuple(dict.fromkeys(named))[:NUM_NAMED],
            steps=(int(steps.min()), int(steps.max())),
            evidence=tuple(evidence),
            remedy=_underflow_remedy(facts, needed),
        )
    ]


def _too_small(analysis: Analysis, before: int | None) -> _TooSmall:
    small = _TooSmall([], [], [])
    for t in np.flatnonzero(analysis.rounds & ~analysis.cancels).tolist():
        own = analysis.layer_db(analysis.own_db, t, before=before)
        if own is not None and own < TARGET_DB:
            small.low.append((own, t))
        elif is_lost(analysis, t, before):
            small.lost.append(t)
        elif own is not None and _zeros_were_flushed(analysis, t, before):
            small.flushed.append(t)
    small.low.sort()
    return small


def _underflow_summary(facts: Facts, small: _TooSmall, scale: float, needed: int | None) -> str:
    tensors, parts, lowest = facts.analysis.tensors, [], facts.windows.lowest
    if small.low:
        db, worst = small.low[0]
        parts.append(
            f"{len(small.low)} FP16 gradient(s) keep less than {TARGET_DB:g} dB; the worst is "
            f"{tensors[worst].described} with {db:.1f} dB"
        )
    if small.lost:
        parts.append(f"{len(small.lost)} are flushed to zero entirely, first {tensors[small.lost[0]].described}")
    if not parts:
        parts.append(f"{tensors[small.flushed[0]].described} has zeros that a larger scale turns into values")
    enough = "A larger scale is needed"
    if needed is not None and lowest is not None:
        censored = facts.windows.tensors[lowest.id].censored
        enough = f"At least 2^{needed} is needed" if censored else f"2^{needed} would do"
    return f"At the scale in force (median {power(scale)}) {'; '.join(parts)}. {enough}."


def _underflow_remedy(facts: Facts, needed: int | None) -> str:
    high = facts.windows.run.high_log2
    if facts.analysis.history is None:
        start = f" with init_scale=2.0**{needed}" if needed is not None else ""
        return f"Use torch.amp.GradScaler{start}: scale the loss, unscale before clipping, step and update through it."
    if needed is not None and high is not None and needed > high:
        return "A scale that large overflows elsewhere: see scale-window-empty."
    return "Raise init_scale to the recommended one, and let it grow back sooner (a shorter growth_interval)."


def _is_layer(analysis: Analysis, tensor: int) -> bool:
    """Whether it is the gradient of a module's output or of a parameter, and not one inside a module."""
    info = analysis.tensors[tensor]
    return info.kind != "op_grad" or any(t.kind == "param_grad" and t.fqn == info.fqn for t in analysis.tensors)


def _zeros_were_flushed(analysis: Analysis, tensor: int, before: int | None) -> bool:
    """Zeros that vanish at the run's largest scale, if they could hide enough energy to matter, and often enough."""
    samples = analysis.samples
    rows = analysis.rows_of(tensor, before=before)
    scale = analysis.scale_log2[rows]
    if not len(rows) or np.ptp(scale) == 0:
        return False
    zero_frac = samples.num_zero[rows] / np.maximum(samples.numel[rows], 1)
    beyond = zero_frac - float(np.median(zero_frac[scale == scale.max()]))
    hidden = samples.num_zero[rows] * 2.0 ** (2 * FP16.flush_log2)
    matters = hidden > energy(samples.select(rows)) * 10 ** (-TARGET_DB / 10)
    return bool((matters & (beyond >= FLUSHED_ZERO_SHARE)).mean() > QUANTILE)


def _window_empty(facts: Facts) -> Outcome:
    analysis, window = facts.analysis, facts.windows.run
    if not analysis.ran_fp16:
        return NO_FP16
    low, high = facts.windows.lowest, facts.windows.highest
    if not facts.windows.is_empty or low is None or high is None:
        return []
    assert window.low_log2 is not None
    assert window.high_log2 is not None
    steps = analysis.samples.step
    return [
        Finding(
            id="scale-window-empty",
            severity="error",
            confidence="high",
            title="No single loss scale fits this model",
            summary=(
                f"{low.described} needs at least 2^{window.low_log2}, {high.described} overflows above "
                f"2^{window.high_log2}: {window.low_log2 - window.high_log2} binades are missing, in "
                f"{percent(facts.windows.empty_share)} of the sampled steps."
            ),
            scale_can_fix="no",
            where=(place_of(low), place_of(high)),
            steps=(int(steps.min()), int(steps.max())),
            evidence=(
                Evidence("window_low_log2", window.low_log2),
                Evidence("window_high_log2", window.high_log2),
                Evidence("empty_frac", facts.windows.empty_share, "of sampled steps", EMPTY_SHARE),
            ),
            remedy=(
                "Take one of the two out of FP16: leave autocast around it (torch.autocast(..., enabled=False) "
                "and .float() "
                "inputs), or train in BF16. Two losses of very different size can be weighted to meet, or scaled apart."
            ),
        )
    ]


def _without_gradient(facts: Facts) -> Outcome:
    analysis = facts.analysis
    steps = analysis.steps
    findings = []
    silent: dict[str, list[str]] = {}
    alive: set[str] = set()
    num_steps = 0
    for optimizer in analysis.run.meta.get("optimizers", []):
        rows, amax = steps.param_matrix(optimizer["id"])
        num_steps = max(num_steps, len(rows))
        if len(rows) < MIN_SILENT_STEPS:
            continue
        for slot, tensor in enumerate(optimizer["params"][: amax.shape[1]]):
            info = analysis.tensors[tensor] if tensor < len(analysis.tensors) else None
            if info is None or not info.trainable or not math.prod(info.shape):
                continue
            layer = info.fqn.rpartition(".")[0] or info.fqn
            column = amax[:, slot]
            if ((column == 0) | (column == NO_GRADIENT)).all():
                silent.setdefault(layer, []).append(info.fqn)
            else:
                alive.add(layer)
    if num_steps < MIN_SILENT_STEPS:
        return Skipped(f"fewer than {MIN_SILENT_STEPS} steps")
    dead = {layer: names for layer, names in silent.items() if layer not in alive and not _flushed(facts, names)}
    if dead:
        count = sum(len(names) for names in dead.values())
        findings.append(
            Finding(
                id="layer-without-gradient",
                severity="warning",
                confidence="high",
                title="Layers that the optimizer owns never get a gradient",
                summary=(
                    f"{len(dead)} layer(s), first {next(iter(dead))}: all {count} trainable parameters had a "
                    "gradient of exactly "
                    f"zero, or none, in each of {num_steps} steps."
                ),
                scale_can_fix="no",
                where=tuple(Place("module", layer) for layer in list(dead)[:NUM_NAMED]),
                steps=(int(steps.step.min()), int(steps.step.max())),
                evidence=(
                    Evidence("num_parameters", count, "parameters"),
                    Evidence("num_steps", num_steps, "steps", float(MIN_SILENT_STEPS)),
                ),
                remedy=(
                    "Check that their output reaches the loss: a detach(), a no_grad block, an output that is "
                    "not used, a "
                    "branch multiplied by zero. If they are frozen on purpose, set requires_grad_(False)."
                ),
            )
        )
    return findings


def _flushed(facts: Facts, params: Sequence[str]) -> bool:
    """Whether these parameters' FP16 gradients, or what they come from, were flushed: then underflow is the finding."""
    analysis = facts.analysis
    for info in analysis.tensors:
        if info.fqn in params and info.kind in ("param_grad", "op_grad"):
            stack, seen = [info.id], set()
            while stack:
                t = stack.pop()
                if t in seen or t >= len(analysis.tensors):
                    continue
                seen.add(t)
                if analysis.rounds[t] and is_lost(analysis, t):
                    return True
                stack += analysis.tensors[t].parents
    return False


def _missing_scaling(facts: Facts) -> Outcome:
    analysis = facts.analysis
    if not analysis.ran_fp16:
        return NO_FP16
    if not len(analysis.steps) or (analysis.steps.scaler >= 0).any() or _was_scaled(facts):
        return []
    scalers = analysis.run.meta.get("scalers", [])
    disabled = any(not scaler.get("enabled", True) for scaler in scalers)
    low = facts.windows.run.low_log2
    harm = low is not None and low > 0
    sites = [a for a in analysis.run.meta.get("autocast", []) if a.get("enabled") and a.get("dtype") == "float16"]
    needs = (
        f"{facts.windows.lowest.described} would need at least 2^{low}."
        if harm and facts.windows.lowest is not None
        else "On this run the gradients were large enough; the next one may not be so lucky."
    )
    return [
        Finding(
            id="missing-loss-scaling",
            severity="warning",
            confidence="high" if harm else "medium",
            title="FP16 without loss scaling",
            summary=(
                f"{len(analysis.steps)} steps ran their backward in FP16 and "
                f"{'the GradScaler is disabled' if disabled else 'no GradScaler was used'}. {needs}"
            ),
            scale_can_fix="yes",
            where=tuple(Place("call_site", "autocast", a.get("file"), a.get("line")) for a in sites[:NUM_NAMED]),
            steps=(int(analysis.steps.step.min()), int(analysis.steps.step.max())),
            evidence=(
                Evidence("num_steps", len(analysis.steps), "steps"),
                Evidence("scale", 1.0, "", 2.0**low if harm and low is not None else None),
            ),
            remedy=(
                "Create one torch.amp.GradScaler for the device you train on and send the loss, the step and the "
                "update "
                "through it, or train in BF16."
                + (" GradScaler() without a device turns itself off on a machine without CUDA." if disabled else "")
            ),
        )
    ]


def _was_scaled(facts: Facts) -> bool:
    """Whether losses went through a scaler that no step went through, or were scaled and unscaled by hand."""
    if any(event["name"] == "backward" and event["scaled"] for event in facts.events):
        return True
    factors = {number(detail(e).get("factor")) for e in facts.events if e["name"] == "backward"} - {None}
    changes = [detail(e) for e in facts.events if factors and e["name"] == "gradients.changed"]
    raised = [factor for factor in factors if factor is not None and factor > 1]
    # an optimizer with FP32 masters divides where it fills them, unseen
    keeps = any(entry.get("keeps_masters") for entry in facts.analysis.run.meta.get("optimizers", []))
    return any(_undoes(change, factor) for change in changes for factor in raised) or (keeps and bool(raised))


def _undoes(change: dict[str, Any], factor: float) -> bool:
    """Whether a change divided gradients by a loss's factor; copies to FP32 masters that nobody measured may have."""
    low, high = number(change.get("factor_min")), number(change.get("factor_max"))
    if low is None or high is None:
        return change.get("kind") == "replaced"
    return math.isclose(low * factor, 1, rel_tol=1e-3) and math.isclose(low, high)


GRADIENT_ZONES: tuple[Check, ...] = (
    Check("gradient-underflow", _underflow),
    Check("gradient-overflow", overflow),
    Check("gradient-headroom-low", headroom),
    Check("scale-window-empty", _window_empty),
    Check("layer-without-gradient", _without_gradient),
    Check("missing-loss-scaling", _missing_scaling),
)
