"""Figures as plain dicts, from arrays to what plotly.js draws; no plotly object, no I/O.

Arrays travel as typed base64, names are escaped, and colours that depend on the theme are sent for both themes:
assets/gradaudit.js picks one, so switching themes or moving the scale asks nothing of the server.
"""

from __future__ import annotations

import base64
import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from gradaudit.analysis.zones import NEAR_MAX_BINADES
from gradaudit.formats import FP16
from gradaudit.reporters.palette import ZONE_COLOURS
from gradaudit.reporters.words import clean, format_scale, format_share
from gradaudit_dashboard.colours import RAMPS, colourscale
from gradaudit_dashboard.exponents import Exponents
from gradaudit_dashboard.heat import FINE, METRIC_TABLE, WORST, Pooled

Figure = dict[str, Any]

GRAPH_CONFIG = {
    "displaylogo": False,
    "showSendToCloud": False,
    "plotlyServerURL": "",
    "showTips": False,
    "responsive": True,
    "scrollZoom": False,
    "modeBarButtonsToRemove": ["select2d", "lasso2d", "autoScale2d"],
}
"""Of every graph on every page: nothing may leave this machine."""

ACCENT = "#1f8fd6"
"""Readable on a light and on a dark page."""

SCALE_HEIGHT = 150
PANEL_GAP = 34
MARGIN = {"t": 24, "b": 40, "r": 16}
MAX_SKIP_MARKS = 2000
"""More than this many marks are one blur and slow to draw."""

MAX_LINE_POINTS = 4000
MAX_LABEL = 30
NARROW_LABEL = 17
FRAME = {"showline": True, "mirror": True, "linecolor": "rgba(128,128,128,0.4)", "linewidth": 1}
"""A heatmap without anything bad is an empty box, and should look like one."""

FONT = "system-ui, -apple-system, 'Segoe UI', Roboto, 'DejaVu Sans', sans-serif"


def escape(name: str) -> str:
    """A name for plotly, which renders some HTML: & < > become entities."""
    return name.replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;")


def typed(array: np.ndarray) -> dict[str, str]:
    """An array as plotly's typed form; 64-bit integers become float64, which is exact up to 2^53."""
    if array.dtype.kind in "iu" and array.dtype.itemsize == 8:
        array = array.astype(np.float64)
    array = np.ascontiguousarray(array)
    code = f"{'f' if array.dtype.kind == 'f' else array.dtype.kind}{array.dtype.itemsize}"
    body = {"dtype": code, "bdata": base64.b64encode(array.tobytes()).decode()}
    if array.ndim > 1:
        body["shape"] = ",".join(str(size) for size in array.shape)
    return body


def timeline(
    scale_points: Sequence[tuple[int, float]],
    skipped_steps: Sequence[int],
    heat: Pooled | None,
    *,
    names: Sequence[str] = (),
    metric: str = "sqnr",
    run: str = "",
    rows_key: str = "",
) -> Figure:
    """The loss scale over the layers x steps heatmap, on one step axis.

    Args:
        scale_points: (step, scale) wherever the scale changed, first and last step included.
        skipped_steps: Every skipped step.
        heat: The pooled heatmap, or None to draw the scale alone.
        names: Row names by matrix row.
        metric: Which of heat.METRIC_TABLE the codes are of.
        run: Zoom is kept as long as this stays the same.
        rows_key: Vertical zoom is kept as long as this stays the same: it names order and filter.
    """
    plot = _heat_height(heat)
    shown = _row_labels(heat, names) if heat is not None else []
    height = SCALE_HEIGHT + (PANEL_GAP + plot if heat is not None else 0) + MARGIN["t"] + MARGIN["b"]
    inner = height - MARGIN["t"] - MARGIN["b"]
    split = plot / inner if heat is not None else 0.0
    layout: Figure = {
        **_base_layout(height),
        "uirevision": run,
        "hovermode": "closest",
        "dragmode": "zoom",
        "margin": {**MARGIN, "l": _label_margin(shown)},
        "xaxis": {
            "anchor": "y" if heat is not None else "y2", "title": {"text": "step", "standoff": 6}, "zeroline": False,
            **_whole(_step_range(scale_points, heat)), "uirevision": run, "tickformat": ",~f", "showgrid": False,
            **FRAME,
        },
        "yaxis2": {
            "domain": [(split + PANEL_GAP / inner) if heat is not None else 0.0, 1.0], "uirevision": run,
            "zeroline": False, "fixedrange": True, "tickprefix": "2^", "tickformat": "d", **_scale_axis(scale_points),
        },
        "annotations": [_heading(_scale_heading(scale_points, skipped_steps), 1.0)],
    }  # fmt: skip
    data = [*_scale_traces(scale_points, skipped_steps)]
    if heat is not None:
        data.append(_heat_trace(heat, shown, metric))
        layout["yaxis"] = {
            "domain": [0.0, split], "type": "category", "autorange": "reversed", "uirevision": rows_key,
            "labelalias": {name: short(name, MAX_LABEL) for name in shown}, "showgrid": False, "ticks": "",
            "ticklabelstandoff": 6, **FRAME,
        }  # fmt: skip
        layout["annotations"].append(_heading(f"layers: {METRIC_TABLE[metric].title}", split))
    return {"data": data, "layout": layout}


def histogram(exponents: Exponents, *, run: str = "") -> Figure:
    """Elements per power of two of the unscaled gradient; the page draws FP16's limits over it at the chosen scale."""
    exponent = _shown_exponents(exponents)
    counts = exponents.counts[exponent - exponents.lowest]
    numel = max(exponents.numel, 1)
    share = counts / numel
    nothing = {
        "text": "no element is finite and non-zero", "xref": "paper", "yref": "paper", "x": 0.5, "y": 0.5,
        "showarrow": False, "font": {"size": 14},
    }  # fmt: skip
    low, high = _exponent_range(exponents)
    texts = [
        f"2^{e} to 2^{e + 1}: {int(n):,} elements ({format_share(float(s))} of all)"
        for e, n, s in zip(exponent, counts, share, strict=True)
    ]
    layout = {
        **_base_layout(320),
        "uirevision": run,
        "margin": {"t": 46, "b": 44, "l": 56, "r": 16},
        "bargap": 0.08,
        "showlegend": False,
        "xaxis": {
            "title": {"text": "size of the unscaled gradient", "standoff": 8}, **_whole([low, high]), "uirevision": run,
            "tickprefix": "2^",
            "tickformat": "d", "zeroline": False, "showgrid": False, "dtick": _dtick(high - low, 8),
        },
        "yaxis": {
            "title": {"text": "% of all elements", "standoff": 8}, "rangemode": "tozero", "fixedrange": True,
            "zeroline": False, "nticks": 5, "range": [0, float(share.max(initial=0.0)) * 108 or 100],
        },
        "annotations": [] if len(exponent) else [nothing],
    }  # fmt: skip
    bars = {
        "type": "bar", "x": typed(exponent + 0.5), "y": typed(share * 100), "customdata": texts,
        "hovertemplate": "%{customdata}<extra></extra>", "marker": {"color": ZONE_COLOURS["normal"]},
    }  # fmt: skip
    return {"data": [bars], "layout": layout}


def histogram_meta(exponents: Exponents) -> Figure:
    """What the slider needs: every scale's name and zone shares in words, FP16's limits and which bar is where."""
    total = max(exponents.numel, 1)
    return {
        "low": exponents.scales_log2.start,
        "high": exponents.scales_log2.stop - 1,
        "start": exponents.scale_log2,
        "scales": [format_scale(math.ldexp(1.0, k)) for k in exponents.scales_log2],
        "shares": [[format_share(n / total) for n in row] for row in exponents.zones.tolist()],
        "widths": [[round(100 * n / total, 2) for n in row] for row in exponents.zones.tolist()],
        "exponents": _shown_exponents(exponents).tolist(),
        "range": _exponent_range(exponents),
        "limits": fp16_limits(),
        "bands": fp16_bands(),
    }


def fp16_limits() -> list[Figure]:
    """FP16's limits as lines, at scale 1; a scale of 2^k moves them left by k."""
    return [
        {"log2": FP16.flush_log2, "text": f"2^{FP16.flush_log2} flush", "colour": ZONE_COLOURS["flushed"]},
        {"log2": FP16.min_normal_log2, "text": f"2^{FP16.min_normal_log2} normal", "colour": ZONE_COLOURS["subnormal"]},
        {"log2": math.log2(FP16.max_value), "text": f"{FP16.max_value:,.0f} max", "colour": ZONE_COLOURS["overflow"]},
    ]  # fmt: skip


def fp16_bands() -> list[Figure]:
    """Zones from small to large as (upper exponent at scale 1, colour): what colours a bar."""
    uppers = {
        "flushed": FP16.flush_log2,
        "subnormal": FP16.min_normal_log2,
        "normal": FP16.max_exponent - NEAR_MAX_BINADES + 1,
        "near_max": FP16.max_exponent + 1,
        "overflow": None,
    }
    return [{"zone": zone, "below": upper, "colour": ZONE_COLOURS[zone]} for zone, upper in uppers.items()]


def short(name: str, length: int) -> str:
    """An escaped name in at most `length` characters: `model.layers.0.mlp` becomes `m.layers.0.mlp`, `m.l.0.mlp`.

    What tells layers apart is their numbers and their end, so parts shrink to their first letter from the front.
    """
    plain = name.replace("&lt;", "<").replace("&gt;", ">").replace("&amp;", "&")
    parts = plain.split(".")
    for index in range(len(parts) - 1):
        if len(".".join(parts)) <= length:
            break
        if not parts[index].isdigit():
            parts[index] = parts[index][:1]
    plain = ".".join(parts)
    return escape(plain if len(plain) <= length else "..." + plain[-(length - 3) :].lstrip("."))


def thin_line(points: Sequence[tuple[int, float]], max_points: int = MAX_LINE_POINTS) -> list[tuple[int, float]]:
    """A line with at most `max_points` points that keeps first, last and every bucket's extremes."""
    if len(points) <= max_points:
        return list(points)
    keep = {0, len(points) - 1}
    for bucket in np.array_split(np.arange(1, len(points) - 1), (max_points - 2) // 2):
        values = [points[i][1] for i in bucket]
        keep |= {int(bucket[int(np.argmin(values))]), int(bucket[int(np.argmax(values))])}
    return [points[i] for i in sorted(keep)]


def _shown_exponents(exponents: Exponents) -> np.ndarray:
    present = np.flatnonzero(exponents.counts)
    return np.arange(present[0], present[-1] + 1) + exponents.lowest if len(present) else np.zeros(0, dtype=np.int64)


def _exponent_range(exponents: Exponents) -> list[int]:
    """Exponents to show: all that occur and FP16's limits at the scale in force, with some room."""
    shown = _shown_exponents(exponents)
    edges = [FP16.flush_log2 - exponents.scale_log2, FP16.max_exponent + 1 - exponents.scale_log2]
    edges += [*shown[:1].tolist(), *(shown[-1:] + 1).tolist()]
    return [min(edges) - 3, max(edges) + 3]


def _whole(limits: Sequence[float]) -> Figure:
    """An axis that shows exactly this until the user zooms, which sets autorange to false."""
    return {"autorange": True, "autorangeoptions": {"minallowed": limits[0], "maxallowed": limits[1]}}


def _base_layout(height: int) -> Figure:
    return {
        "height": height, "paper_bgcolor": "rgba(0,0,0,0)", "plot_bgcolor": "rgba(0,0,0,0)",
        "font": {"family": FONT, "size": 12, "color": "#444"}, "autosize": True,
        "modebar": {"bgcolor": "rgba(0,0,0,0)", "color": "#888", "activecolor": ACCENT},
    }  # fmt: skip


def _heading(text: str, y: float) -> Figure:
    return {
        "text": text, "xref": "paper", "yref": "paper", "x": 0, "y": y, "xanchor": "left", "yanchor": "bottom",
        "showarrow": False, "font": {"size": 12},
    }  # fmt: skip


def _scale_heading(points: Sequence[tuple[int, float]], skipped: Sequence[int]) -> str:
    if not points:
        return "no loss scale: no GradScaler was in use"
    return f"loss scale; x = skipped step ({len(skipped):,})" if skipped else "loss scale; no step was skipped"


def _log2(scale: float) -> float | None:
    return math.log2(scale) if math.isfinite(scale) and scale > 0 else None


def _dtick(span: float, most: int) -> int:
    return next((step for step in (1, 2, 4, 8, 16, 32) if span / step <= most), 64)


def _scale_axis(points: Sequence[tuple[int, float]]) -> Figure:
    values = [value for _, scale in points if (value := _log2(scale)) is not None] or [0.0]
    low, high = math.floor(min(values)) - 1, math.ceil(max(values)) + 1
    return {"range": [low, high], "dtick": _dtick(high - low, 5)}


def _scale_traces(points: Sequence[tuple[int, float]], skipped: Sequence[int]) -> list[Figure]:
    line = thin_line(points)
    steps = np.array([step for step, _ in line], dtype=np.float64)
    texts = [format_scale(scale) for _, scale in line]
    traces = [
        {
            "type": "scatter", "mode": "lines" if len(line) > 1 else "markers", "name": "loss scale", "yaxis": "y2",
            "x": typed(steps), "y": [_log2(scale) for _, scale in line], "text": texts,
            "line": {"shape": "hv", "width": 2, "color": ACCENT}, "marker": {"color": ACCENT, "size": 8},
            "hovertemplate": "scale %{text} from step %{x}<extra></extra>", "showlegend": False,
        }
    ]  # fmt: skip
    marks = skip_marks(points, skipped)
    if marks:
        traces.append(
            {
                "type": "scatter", "mode": "markers", "name": "skipped", "yaxis": "y2", "showlegend": False,
                "x": typed(np.array([step for step, _, _ in marks], dtype=np.float64)),
                "y": [value for _, value, _ in marks], "text": [text for _, _, text in marks],
                "marker": {"symbol": "x", "size": 8, "color": ZONE_COLOURS["overflow"]},
                "hovertemplate": "%{text}<extra></extra>",
            }
        )  # fmt: skip
    return traces


def skip_marks(
    points: Sequence[tuple[int, float]], skipped: Sequence[int], max_marks: int = MAX_SKIP_MARKS
) -> list[tuple[int, float | None, str]]:
    """Marks of skipped steps as (step, log2 of the scale in force, text); neighbours share one where too many."""
    if not skipped or not points:
        return []
    at = np.array([step for step, _ in points])
    marks = []
    for group in np.array_split(np.asarray(sorted(skipped)), min(len(skipped), max_marks)):
        first, last = int(group[0]), int(group[-1])
        scale = points[max(int(np.searchsorted(at, first, side="right")) - 1, 0)][1]
        text = f"step {first:,} skipped at scale {format_scale(scale)}"
        if len(group) > 1:
            many = f"{len(group):,} of the steps {first:,} to {last:,}"
            text = f"{many} skipped, the first at scale {format_scale(scale)}"
        marks.append((first, _log2(scale), text))
    return marks


def _heat_height(heat: Pooled | None) -> int:
    rows = len(heat.codes) if heat is not None else 0
    return int(min(max(rows * 24, 72), 640)) if rows else 0


def _label_margin(labels: Sequence[str]) -> int:
    longest = max((len(short(label, MAX_LABEL)) for label in labels), default=0)
    return min(max(52, 18 + 7 * longest), 220)


def _step_range(points: Sequence[tuple[int, float]], heat: Pooled | None) -> list[float]:
    ends = [float(step) for step, _ in points]
    if heat is not None:
        ends += [float(heat.edges[0]), float(heat.edges[-1])]
    low, high = (min(ends), max(ends)) if ends else (0.0, 1.0)
    return [low, high] if high > low else [low - 0.5, high + 0.5]


def _row_labels(heat: Pooled, names: Sequence[str]) -> list[str]:
    labels = []
    for group in heat.groups:
        more = f" +{len(group) - 1}" if len(group) > 1 else ""
        labels.append(escape(clean(names[group[0]])) + more)
    return labels


def _heat_trace(heat: Pooled, labels: list[str], metric: str) -> Figure:
    return {
        "type": "heatmap", "name": "layers", "xaxis": "x", "yaxis": "y", "x": typed(heat.edges), "y": labels,
        "z": typed(heat.codes), "zmin": 0, "zmax": WORST, "showscale": False, "hoverinfo": "none",
        "colorscale": colourscale(metric, "light"),
    }  # fmt: skip


def timeline_meta(heat: Pooled, names: Sequence[str], metric: str, target_db: float) -> Figure:
    """What the page needs beside the heatmap: words for the pointer, colours for both themes, the rows' plain names.

    Args:
        heat: The pooled heatmap.
        names: Row names by matrix row.
        metric: Which of heat.METRIC_TABLE the codes are of.
        target_db: SQNR that counts as fine, for the words.
    """
    table = METRIC_TABLE[metric]
    scales: dict[str, int] = {}  # few different ones, so columns hold an index
    scale_of = []
    for low, high in zip(heat.scale_low.tolist(), heat.scale_high.tolist(), strict=True):
        text = format_scale(low) if low == high else f"{format_scale(low)} to {format_scale(high)}"
        scale_of.append(scales.setdefault(text, len(scales)))
    columns = [
        f"step {first:,}" if count == 1 else f"worst of {count:,} sampled steps {first:,} to {last:,}"
        for first, last, count in zip(heat.first.tolist(), heat.last.tolist(), heat.num_steps.tolist(), strict=True)
    ]
    return {
        "members": [[names[row] for row in group] for group in heat.groups],
        "columns": columns,
        "scales": list(scales),
        "scaleOf": scale_of,
        "edges": np.round(heat.edges, 2).tolist(),
        "steps": list(zip(heat.first.tolist(), heat.last.tolist(), strict=True)),
        "levels": ["not sampled", table.no_value, *(table.text(c, target_db) for c in range(FINE, WORST + 1))],
        "ramps": {theme: colourscale(metric, theme) for theme in RAMPS},
        "narrow": {name: short(name, NARROW_LABEL) for name in _row_labels(heat, names)},
    }
