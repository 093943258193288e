"""Values that FP16 holds badly though nothing is inf yet: critical operations in FP16, and little headroom."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from gradaudit.analysis.checks.base import NO_FP16, NUM_NAMED, Facts, Outcome, Skipped
from gradaudit.analysis.checks.forward.forward_places import is_other_kind, magnitude, op_places, span, what
from gradaudit.analysis.context import Analysis
from gradaudit.analysis.op_words import CRITERIA, INPUT, SOFTMAXES, in_loss, is_half
from gradaudit.analysis.origin import Trace, mask_constant, traces
from gradaudit.analysis.report import Evidence, Finding, Place
from gradaudit.formats import FP16, FP16_DTYPES
from gradaudit.store.tables import OpRow

NEAR_LIMIT = FP16.max_value / 2
"""Within one binade of the limit: a value twice as large is inf."""

COARSE_LOGITS = 2048.0
"""From here on FP16 is spaced by 2 and more: neighbouring logits differ by a factor of 7 in the softmax, or by none."""

MIN_GROWTH_SAMPLES = 5
"""Below five samples there is no trend to speak of."""

MIN_RISE_LOG2 = 0.25
"""Growth over the run, in binades, that is worth extrapolating."""

NORMS = frozenset(["native_layer_norm", "native_group_norm", "layer_norm", "group_norm", "rms_norm", "fused_rms_norm"])

CRITICAL = SOFTMAXES | NORMS | CRITERIA | {"exp", "exp2", "log", "log2", "log10", "log1p", "pow"}

CRITICAL_NODES = frozenset(["Softmax", "LogSoftmax", "NativeLayerNorm", "NativeGroupNorm", "Exp", "Log", "Pow"])
"""Names of autograd nodes: the dtype of the gradient that arrives at one is that of its result."""


def critical_op_in_half(facts: Facts) -> Outcome:
    """Operations that lose much in FP16 and ran in it: a warning outside autocast or where the values show harm."""
    analysis = facts.analysis
    if not facts.ops and not analysis.ran_fp16:
        return NO_FP16
    harmful, plain = _critical_ops(facts)
    if harmful or plain:
        return [_critical(facts, harmful, plain)]
    nodes = [
        info
        for info in analysis.tensors
        if info.kind == "op_grad" and info.dtype in FP16_DTYPES and info.op.rpartition(" -> ")[2] in CRITICAL_NODES
    ]
    if facts.ops or not nodes:
        return []
    names = dict.fromkeys(f"{info.op.rpartition(' -> ')[2]} in {info.fqn}" for info in nodes)
    in_autocast = any(entry.get("enabled") for entry in analysis.run.meta.get("autocast", []))
    steps = analysis.samples.step
    return [
        _critical_finding(
            "info" if in_autocast else "warning", tuple(Place("op", name) for name in names), list(names),
            (int(steps.min()), int(steps.max())) if len(steps) else (0, 0), "",
        )
    ]  # fmt: skip


def _critical_ops(facts: Facts) -> tuple[dict[OpRow, str], list[OpRow]]:
    """Those that show harm, with what shows it, and the others; each line once."""
    harmful: dict[tuple[object, ...], tuple[OpRow, str]] = {}
    plain: dict[tuple[object, ...], OpRow] = {}
    # what overflowed at other steps has a finding of its own
    born = {(b.row.name, b.row.module, b.row.file, b.row.line) for origin in facts.origins() for b in origin.births}
    for trace in traces(facts.ops):
        for row in trace.rows.values():
            if row.name in CRITICAL and is_half(row) and row.sequence is not None and _is_critical(row):
                place = (row.name, row.module, row.file, row.line)
                harm = _harm(trace, row)
                if place in born:
                    continue
                if harm:
                    harmful.setdefault(place, (row, harm))
                else:
                    plain.setdefault(place, row)
    return dict(harmful.values()), [row for place, row in plain.items() if place not in harmful]


def _is_critical(row: OpRow) -> bool:
    if not row.autocast and (row.name in CRITERIA or (row.name == "log_softmax" and in_loss(row))):
        return False  # that is loss-in-half
    return row.name != "pow" or row.constants not in ((2.0,), (1.0,))


def _harm(trace: Trace, row: OpRow) -> str:
    """What shows that the result suffers; empty where nothing does."""
    inputs = trace.inputs(row)
    if not all(made.is_finite for made in (row, *inputs)):
        return ""  # a worse thing happened there, which has a finding of its own
    largest = max((made.amax for made in inputs if is_half(made)), default=0.0)
    if row.name in SOFTMAXES and largest > COARSE_LOGITS and all(mask_constant(trace, made) is None for made in inputs):
        return f"its input reaches {magnitude(largest)}, where FP16 is spaced by 2 and more"
    if row.name.startswith("exp") and row.amax >= NEAR_LIMIT:
        return f"its result reaches {magnitude(row.amax)}, within a factor of 2 of the limit"
    return "" if row.autocast else "autocast was off there"


def _critical(facts: Facts, harmful: dict[OpRow, str], plain: Sequence[OpRow]) -> Finding:
    rows = [*harmful, *plain]
    places = dict.fromkeys(place for row in rows[:NUM_NAMED] for place in op_places(row))
    steps = span(facts, min(row.step for row in rows), max(row.step for row in rows))
    names = list(dict.fromkeys(what(row) for row in rows))
    why = next(iter(harmful.values()), "")
    return _critical_finding("warning" if harmful else "info", tuple(places), names, steps, why)


def _critical_finding(
    severity: str, places: tuple[Place, ...], names: list[str], steps: tuple[int, int], why: str
) -> Finding:
    listed = "; ".join(names[:NUM_NAMED])
    more = f"; and {len(names) - NUM_NAMED} more" if len(names) > NUM_NAMED else ""
    calm = "Autocast left them in FP16 here; on CUDA it computes them in FP32. Nothing shows harm."
    reason = f"Of the first, {why}." if why else calm if severity == "info" else "Autocast was off."
    return Finding(
        id="critical-op-in-half",
        severity="warning" if severity == "warning" else "info",
        confidence="high",
        title="Operations that lose much in FP16 ran in it",
        summary=f"In FP16: {listed}{more}. {reason}",
        scale_can_fix="no",
        where=places,
        steps=steps,
        evidence=(Evidence("num_places", len(names), "places"),),
        remedy="Put .float() on their inputs, or leave them inside an autocast that computes them in FP32.",
    )


@dataclass(frozen=True, slots=True)
class _Near:
    """An activation near the limit: how large, where and when, in whose code."""

    amax: float
    text: str
    places: tuple[Place, ...]
    steps: tuple[int, int]
    module: str


def headroom_low(facts: Facts) -> Outcome:
    """Activations within one binade of the limit."""
    if not facts.ops and not len(facts.analysis.outputs):
        return Skipped("no activation was seen")
    overflowed = {birth.row.module for origin in facts.origins() for birth in origin.births}
    near = [found for found in (*_near_ops(facts), *_near_outputs(facts)) if found.module not in overflowed]
    near.sort(key=lambda found: -found.amax)
    by_module: dict[str, _Near] = {}
    for found in near:
        by_module.setdefault(found.module, found)
    if not by_module:
        return []
    named = list(by_module.values())[:NUM_NAMED]
    first = named[0]
    course = next((text for text in (_course(facts.analysis, found.module) for found in named) if text), "")
    others = "; ".join(f"{found.text} with {magnitude(found.amax)}" for found in named[1:])
    return [
        Finding(
            id="forward-headroom-low",
            severity="warning",
            confidence="high",
            title="An activation is within one binade of FP16's limit",
            summary=(
                f"{first.text} reaches {magnitude(first.amax)}; the limit is 65,504"
                f"{f'. Also {others}' if others else ''}.{course} No loss scale moves it."
            ),
            scale_can_fix="no",
            where=tuple(dict.fromkeys(place for found in named for place in found.places)),
            steps=span(facts, min(found.steps[0] for found in near), max(found.steps[1] for found in near)),
            evidence=(
                Evidence("amax", first.amax, "largest activation", NEAR_LIMIT),
                Evidence("headroom", round(float(np.log2(FP16.max_value / first.amax)), 3), "binades", 1.0),
            ),
            remedy="Normalise or scale down what feeds it, or compute it in FP32, before it overflows.",
        )
    ]


def _near_ops(facts: Facts) -> list[_Near]:
    found: dict[tuple[object, ...], list[OpRow]] = {}
    for trace in traces(facts.ops):
        for row in trace.rows.values():
            close = is_half(row) and row.is_finite and row.amax >= NEAR_LIMIT and row.op != INPUT
            if close and not (in_loss(row) and row.numel == 1) and not is_other_kind(trace, row):
                found.setdefault((row.module, row.file, row.line), []).append(row)
    near = []
    for rows in found.values():
        largest = max(rows, key=lambda row: row.amax)
        near.append(
            _Near(largest.amax, what(largest), op_places(largest), _span([r.step for r in rows]), largest.module)
        )
    return near


def _near_outputs(facts: Facts) -> list[_Near]:
    outputs, tensors = facts.analysis.outputs, facts.analysis.tensors
    masks = {row.module for row in facts.ops if is_half(row) and row.amax == FP16.max_value}
    found = []
    close = (outputs.amax >= NEAR_LIMIT) & (outputs.amax < FP16.max_value) & (outputs.num_nan + outputs.num_inf == 0)
    for t in np.unique(outputs.tensor[close]).tolist():
        info = tensors[t]
        if info.dtype in FP16_DTYPES and info.fqn not in masks:
            rows = np.flatnonzero(close & (outputs.tensor == t))
            text = f"the output of {info.fqn} ({info.module})" if info.fqn else f"the output of {info.module}"
            amax = float(outputs.amax[rows].max())
            place = Place("module", info.fqn or info.module)
            found.append(_Near(amax, text, (place,), _span(outputs.step[rows].tolist()), info.fqn))
    return found


def _span(steps: Sequence[int]) -> tuple[int, int]:
    return min(steps), max(steps)


def _course(analysis: Analysis, module: str) -> str:
    """A sentence on how a module's output grows, and when it will overflow; empty where it does not grow."""
    outputs = analysis.outputs
    mine = [info.id for info in analysis.tensors if info.kind == "output" and info.fqn == module]
    bad = outputs.num_nan + outputs.num_inf > 0
    own = np.isin(outputs.tensor, mine)
    if (own & bad).any():
        return f" At step {int(outputs.step[own & bad].min())} it held inf or NaN."
    usable = own & (outputs.amax > 0)
    if usable.sum() < MIN_GROWTH_SAMPLES:
        return ""
    step, size = outputs.step[usable].astype(float), np.log2(outputs.amax[usable])
    if not np.ptp(step):
        return ""
    slope, start = np.polyfit(step, size, 1)
    rise = float(slope * np.ptp(step))
    if rise < MIN_RISE_LOG2:
        return " It does not grow."
    meets = (np.log2(FP16.max_value) - start) / slope
    return (
        f" It grew by {rise:.1f} binades over {int(np.ptp(step))} steps and meets the limit at about step {meets:,.0f}."
    )
