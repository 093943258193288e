"""What each panel shows of a run, from the cache to plain values; callbacks.py only passes them on."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from dash import html

from gradaudit.analysis.context import TARGET_DB
from gradaudit.analysis.report import LayerRow, Place
from gradaudit.formats import FP16_DTYPES
from gradaudit.reporters.rows import layer_window
from gradaudit.reporters.words import clean, format_db, format_scale, plural
from gradaudit.store import Samples, TensorInfo
from gradaudit_dashboard import exponents, figures, heat
from gradaudit_dashboard.components import (
    error_card,
    facts,
    findings_card,
    guarded,
    legend,
    message_card,
    recommendation_card,
    verdict_card,
)
from gradaudit_dashboard.source import Loaded
from gradaudit_dashboard.state import Pin, View

KIND_WORDS = {
    "output_grad": "gradient of a module's output",
    "op_grad": "gradient inside a module's own code or the loss",
    "param_grad": "gradient of a parameter",
}

PLACE_KINDS = {
    "module": ("output_grad", "op_grad"),
    "param": ("param_grad",),
    "op": ("op_grad", "output_grad"),
    "tensor": ("output_grad", "op_grad", "param_grad"),
}
"""Which kinds of tensor a finding's place can mean, best first."""

MAX_CHOICES = 5000
"""Layers offered in the picker; a longer list would be slow, and the heatmap and the filter reach the rest."""


def summary(loaded: Loaded) -> list[Any]:
    """Verdict, findings and recommendation."""
    try:
        report = loaded.report
    except Exception as error:
        return [error_card("The audit", error)]

    def find(place: Place) -> str | None:
        return row_of(place, loaded)

    return [
        guarded("The verdict", lambda: verdict_card(report)),
        html.Div(
            [
                guarded("The findings", lambda: findings_card(report, find)),
                guarded("The recommendation", lambda: recommendation_card(report, loaded.run.meta, find)),
            ],
            className="columns",
        ),
    ]


def row_of(place: Place, loaded: Loaded) -> str | None:
    """Heatmap row that shows a finding's place, the worst one where several do."""
    kinds = PLACE_KINDS.get(place.type, ())
    tensors = loaded.analysis.tensors
    fitting = [t for t in loaded.worst if tensors[t].kind in kinds and place.name in (tensors[t].fqn, tensors[t].label)]
    fitting.sort(key=lambda tensor: kinds.index(tensors[tensor].kind))
    return loaded.names[fitting[0]] if fitting else None


@dataclass(frozen=True, slots=True)
class Timeline:
    """Figure and words of the panel over time; `data` is None where there is nothing to draw."""

    data: dict[str, Any] | None
    note: Any
    legend: Any


def timeline(loaded: Loaded, view: View, max_columns: int) -> Timeline:
    """The loss scale over the heatmap; each of the two stands where the other fails."""
    notes: list[Any] = []
    points: tuple[tuple[int, float], ...] = ()
    skipped: tuple[int, ...] = ()
    try:
        points, skipped = loaded.history.scale_points, loaded.history.skipped_steps
    except Exception as error:
        notes.append(error_card("The loss scale", error))
    pooled, names, colours = None, [], None
    try:
        matrix = loaded.matrix(view.metric)
        names = [loaded.names[tensor] for tensor in matrix.tensors.tolist()]
        kinds = [loaded.analysis.tensors[tensor].kind for tensor in matrix.tensors.tolist()]
        order = heat.sort_rows(matrix, view.sort) if len(matrix.steps) else []
        rows = np.array([row for row in order if heat.matches(names[row], kinds[row], view.q)], dtype=np.int64)
        if len(rows):
            pooled = heat.pool(matrix, rows, max_columns=max_columns)
            colours = legend(view.metric, TARGET_DB)
        notes.append(_heat_note(loaded, matrix, rows, pooled, view))
    except Exception as error:
        notes.append(error_card("The heatmap", error))
    if pooled is None and not points:
        return Timeline(None, notes, None)
    figure = figures.timeline(
        points,
        skipped,
        pooled,
        names=names,
        metric=view.metric,
        run=loaded.run.name,
        rows_key=f"{view.sort} {view.q} {len(names)}",
    )
    meta = figures.timeline_meta(pooled, names, view.metric, TARGET_DB) if pooled is not None else None
    return Timeline({"figure": figure, "meta": meta}, notes, colours)


def _heat_note(loaded: Loaded, matrix: heat.Matrix, rows: np.ndarray, pooled: heat.Pooled | None, view: View) -> Any:
    """What the heatmap leaves out or merges, or why there is none."""
    if len(matrix.steps) == 0:
        return _waiting(loaded)
    if pooled is None:
        return message_card(
            "No layer matches", f"0 of {plural(len(matrix.tensors), 'gradient tensor')} contain all of: {view.q}"
        )
    steps = loaded.analysis.steps
    said = [f"{plural(len(matrix.steps), 'sampled step')} of {len(np.unique(steps.step)):,}"]
    if len(rows) < len(matrix.tensors):
        said.append(f"{len(rows):,} of {plural(len(matrix.tensors), 'gradient tensor')} match the filter")
    else:
        said.append(plural(len(rows), "gradient tensor"))
    most = int(pooled.num_steps.max())
    if most > 1:
        said.append(f"a column shows the worst of up to {most:,} sampled steps")
    if len(pooled.groups[0]) > 1:
        said.append(f"a row shows the worst of {len(pooled.groups[0]):,} tensors")
    if view.metric == "sqnr" and not (matrix.codes[rows] > heat.NO_VALUE).any():
        said.append("nothing finite and non-zero passed through FP16, so there is no SQNR")
    said.append("every value holds at the scale in force at its step")
    return html.P("; ".join(said) + ".", className="note")


def _waiting(loaded: Loaded) -> Any:
    last, every = loaded.last_step, loaded.run.meta.get("settings", {}).get("every")
    rule = f" (every {plural(every, 'step')})" if isinstance(every, int) else ""
    if loaded.run.ended == "running":
        at = "training has not made a step yet" if last is None else f"training is at step {last:,}"
        return message_card("Waiting for the first sampled step", f"{at}{rule}; this page refreshes itself.")
    text = (
        "The run ended before its first step." if last is None else f"No step was sampled{rule}; no histogram is there."
    )
    return message_card("No gradient was sampled", text)


@dataclass(frozen=True, slots=True)
class LayerPanel:
    """What the pinned layer's panel shows; `data` is None where there is no histogram."""

    head: Any
    data: dict[str, Any] | None
    choices: list[dict[str, str]]
    chosen: str | None
    spans: list[dict[str, str]]
    span: str


def layer(loaded: Loaded, pin: Pin, view: View) -> LayerPanel:
    """One layer's exponents: the pinned one, or the one that most deserves a look."""
    choices = [{"value": loaded.names[t], "label": clean(loaded.names[t])} for t in loaded.worst[:MAX_CHOICES]]
    if not choices:
        text = "Its exponents appear here after the first sampled step."
        return LayerPanel(message_card("No layer was sampled yet", text), None, [], None, _spans(None, None), "all")
    tensor = loaded.tensor_called(pin.layer)
    unknown = pin.layer is not None and tensor is None
    if tensor is None:
        tensor = loaded.worst[0]
    name, info = loaded.names[tensor], loaded.analysis.tensors[tensor]
    every = loaded.samples_of(tensor)
    worst = worst_step(loaded, tensor, every, pin.steps, view.metric)
    shown = every if pin.steps is None else every.select(every.step == worst)
    gathered = exponents.gather(shown)
    row = next((item for item in loaded.report.layers if item.tensor == tensor), None)
    head = [
        html.P(f"No gradient called {clean(pin.layer or '')} was sampled in this run; this one most deserves a look.",
               className="note warn") if unknown else None,
        _layer_facts(name, info, row, shown, pin, worst),
        html.P(recorded_note(info, gathered), className="note"),
    ]  # fmt: skip
    data = None
    if gathered.num_samples:
        meta = {**figures.histogram_meta(gathered), "name": name, "step": worst, "whole": _whole(gathered)}
        data = {"figure": figures.histogram(gathered, run=f"{loaded.run.name} {name}"), "meta": meta}
    else:
        head.append(message_card("Nothing to draw", "Every sample was taken at a loss scale of 0 or inf."))
    is_one = pin.steps is not None
    spans = _spans(len(every), worst, is_pinned=is_one)
    return LayerPanel(head, data, choices, name, spans, "one" if is_one else "all")


def worst_step(loaded: Loaded, tensor: int, samples: Samples, within: tuple[int, int] | None, metric: str) -> int:
    """The sampled step of a tensor with the highest badness; the nearest one where none lies within the steps asked."""
    steps = samples.step
    matrix = loaded.matrix(metric)
    codes = matrix.codes[np.searchsorted(matrix.tensors, tensor), np.searchsorted(matrix.steps, steps)]
    if within is not None:
        inside = (steps >= within[0]) & (steps <= within[1])
        if not inside.any():
            return int(steps[np.argmin(np.abs(steps - within[0]))])
        steps, codes = steps[inside], codes[inside]
    return int(steps[np.argmax(codes)])


def _spans(num_samples: int | None, step: int | None, *, is_pinned: bool = False) -> list[dict[str, str]]:
    if num_samples is None or step is None:
        return [{"value": "all", "label": "All samples"}]
    return [
        {"value": "all", "label": f"All {plural(num_samples, 'sample')}"},
        {"value": "one", "label": f"Step {step:,}" if is_pinned else f"Worst step: {step:,}"},
    ]


def _layer_facts(name: str, info: TensorInfo, row: LayerRow | None, shown: Samples, pin: Pin, worst: int) -> Any:
    where = f"{KIND_WORDS.get(info.kind, info.kind)}, {info.module or info.op or 'unknown module'}"
    shape = " x ".join(f"{size:,}" for size in info.shape) or "scalar"
    span = f"steps {shown.step[0]:,} to {shown.step[-1]:,}, {plural(len(shown), 'sample')}" if len(shown) else "none"
    if pin.steps is not None:
        asked = f"{pin.steps[0]:,}" if pin.steps[0] == pin.steps[1] else f"{pin.steps[0]:,} to {pin.steps[1]:,}"
        inside = pin.steps[0] <= worst <= pin.steps[1]
        rule = "" if pin.steps == (worst, worst) else f" (worst of {asked})" if inside else f" (nearest to {asked})"
        span = f"step {worst:,}{rule}"
    pairs: list[tuple[str, Any]] = [
        ("Layer", html.Code(clean(name))),
        ("What", where),
        ("Shape, dtype", f"{shape}, {info.dtype}"),
        ("Shown", span),
    ]
    if row is not None:
        known = row.sqnr_db is not None
        pairs.append(
            (
                "SQNR in 90 % of the samples",
                f"{format_db(row.sqnr_db)} at the scale in force" if known else "none to judge",
            )
        )
        pairs.append(("Scales that fit it", layer_window(row) or "every scale this run shows"))
    return facts(pairs)


def recorded_note(info: TensorInfo, gathered: exponents.Exponents) -> str:
    """At which scale the histogram was recorded and what it therefore cannot show."""
    if gathered.num_samples == 0:
        return ""
    low, high = gathered.scale_low, gathered.scale_high
    scale = format_scale(low) if low == high else f"scales {format_scale(low)} to {format_scale(high)}"
    if info.dtype in FP16_DTYPES:
        text = (
            f"Recorded in FP16 at {scale}. What was flushed there had already become an exact zero, so at that scale "
            "and above it no value shows as flushed and some zeros may once have been small values."
        )
    else:
        text = f"Recorded in {info.dtype} at {scale}, so values too small for FP16 are still here."
    if gathered.is_rounded:
        text += " That scale is not a power of two: positions are right to half a binade."
    if gathered.num_left_out:
        text += f" {plural(gathered.num_left_out, 'sample')} at a scale of 0 or inf left out."
    return text


def _whole(gathered: exponents.Exponents) -> str:
    return f"shares of all {plural(gathered.numel, 'element')} in {plural(gathered.num_samples, 'sample')}"
