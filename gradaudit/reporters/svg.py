"""Charts as inline SVG: pure functions from numbers to markup, without JavaScript and without a fixed width.

Positions across are percentages of the drawing's width, so that one drawing serves a wide screen and a phone; heights
are pixels. Colours of zones come from the palette, all others from CSS classes of the page, so that a dark page needs
no second drawing. Every text is escaped here.
"""

from __future__ import annotations

import html
import math
from bisect import bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from gradaudit.analysis.report import History
from gradaudit.reporters.palette import NAN_OUTLINE, ZONE_COLOURS
from gradaudit.reporters.words import ZONE_WORDS, clean, format_scale, format_share, plural

PLOT_HEIGHT = 190
AXIS_HEIGHT = 26
ROW_HEIGHT = 40
MAX_COLUMNS = 400
"""Points and marks closer than 1/400 of the width fall on the same pixels; a long run is thinned to that."""

MAX_NAME = 46
"""Characters of a layer name that fit beside each other on a phone; the whole name is in the tables."""


@dataclass(frozen=True, slots=True)
class WindowBar:
    """One tensor's safe window as exponents of two; None where nothing bounds it."""

    name: str
    low_log2: int | None
    high_log2: int | None


def scale_chart(history: History) -> str:
    """The loss scale over the steps on a log2 axis as a step line, with a mark at each skipped step.

    Returns an empty string where no scale was recorded.
    """
    scales = [(step, scale) for step, scale in history.scale_points if scale > 0 and math.isfinite(scale)]
    points = [(step, math.log2(scale)) for step, scale in scales]
    if not points:
        return ""
    first, last = points[0][0], max(points[-1][0], points[0][0] + 1)
    low = math.floor(min(exponent for _, exponent in points)) - 1
    high = math.ceil(max(exponent for _, exponent in points)) + 1

    def x(step: float) -> float:
        return 100 * (step - first) / (last - first)

    def y(exponent: float) -> float:
        return PLOT_HEIGHT * (high - exponent) / (high - low)

    parts = [_grid_line(y(exponent), f"2^{exponent}") for exponent in _ticks(low, high, 6)]
    parts.append(_step_line([(x(step), y(exponent)) for step, exponent in _thinned(points, first, last)]))
    steps = [step for step, _ in points]
    marks = {round(x(step) / 100 * MAX_COLUMNS): step for step in history.skipped_steps if first <= step <= last}
    for step in marks.values():
        scale = scales[bisect_right(steps, step) - 1][1]
        label = _text(f"step {step:,} skipped at {format_scale(scale)}")
        centre = f'cx="{x(step):.2f}%" cy="{y(math.log2(scale)):.1f}"'
        parts.append(f'<circle class="skip" {centre} r="4"><title>{label}</title></circle>')
    for step, anchor in ((first, "start"), (last, "end")) if points[-1][0] > first else ((first, "start"),):
        parts.append(_axis_text(x(step), PLOT_HEIGHT + 18, f"step {step:,}", anchor))
    title = f"Loss scale over {plural(last - first + 1, 'step')}, {len(history.skipped_steps):,} skipped"
    return _drawing(PLOT_HEIGHT + AXIS_HEIGHT, title, parts)


def window_chart(bars: Sequence[WindowBar], run: WindowBar, scale: float | None) -> str:
    """Safe windows in binades: a bar per tensor, the run's window shaded behind them, the scale in force as a line.

    Args:
        bars: The tensors to show, top to bottom.
        run: The run's own window; where its edges cross, the gap that no scale can close is shaded instead.
        scale: Loss scale in force, or None.

    Returns:
        The drawing, or an empty string where no tensor has an edge.
    """
    edges = [edge for bar in (*bars, run) for edge in (bar.low_log2, bar.high_log2) if edge is not None]
    if not edges or not bars:
        return ""
    exponent = math.log2(scale) if scale is not None and scale > 0 and math.isfinite(scale) else None
    shown = [*edges, exponent] if exponent is not None else edges
    low, high = math.floor(min(shown)) - 2, math.ceil(max(shown)) + 2

    def x(value: float | None, unbounded: float) -> float:
        return unbounded if value is None else 100 * (value - low) / (high - low)

    height = ROW_HEIGHT * len(bars) + 6
    left, right = x(run.low_log2, 0.0), x(run.high_log2, 100.0)
    kind = "safe" if left <= right else "conflict"
    parts = [
        f'<rect class="{kind}" x="{min(left, right):.2f}%" y="0" width="{abs(right - left):.2f}%" height="{height}"/>'
    ]
    for tick in _ticks(low, high, 7):
        parts.append(f'<line class="grid" x1="{x(tick, 0):.2f}%" x2="{x(tick, 0):.2f}%" y1="0" y2="{height}"/>')
        parts.append(_axis_text(x(tick, 0), height + 18, f"2^{tick}", "middle"))
    if exponent is not None:
        at = x(exponent, 0.0)
        label = _text(f"scale in force {format_scale(scale)}")
        parts.append(
            f'<line class="force" x1="{at:.2f}%" x2="{at:.2f}%" y1="0" y2="{height}"><title>{label}</title></line>'
        )
    for row, bar in enumerate(bars):
        parts += _window_row(bar, row * ROW_HEIGHT, x(bar.low_log2, 0.0), x(bar.high_log2, 100.0))
    return _drawing(height + AXIS_HEIGHT, f"Safe windows of {plural(len(bars), 'tensor')} in powers of two", parts)


def _window_row(bar: WindowBar, top: int, left: float, right: float) -> list[str]:
    low = "unbounded" if bar.low_log2 is None else f"2^{bar.low_log2}"
    high = "unbounded" if bar.high_log2 is None else f"2^{bar.high_log2}"
    kind = "bar" if left <= right else "bar crossed"
    name = clean(bar.name)
    # the end of a module path tells layers apart, its beginning is shared
    short = name if len(name) <= MAX_NAME else "..." + name[-(MAX_NAME - 3) :]
    label = _text(f"{name}: {low} to {high}")
    return [
        f'<rect class="{kind}" x="{min(left, right):.2f}%" y="{top + 22}" width="{max(abs(right - left), 0.5):.2f}%" '
        f'height="10" rx="2"><title>{label}</title></rect>',
        f'<text class="name" x="2" y="{top + 16}">{_text(short)}</text>',
    ]


def zone_bar(zones: Mapping[str, float], *, height: int = 16) -> str:
    """One layer's zone shares as a stacked bar over the whole width; each piece says its zone and share."""
    parts, words, left = [], [], 0.0
    for zone, colour in ZONE_COLOURS.items():
        share = zones.get(zone, 0.0)
        if not share > 0:
            continue
        outline = f' stroke="{NAN_OUTLINE}" stroke-width="2"' if zone == "nan" else ""
        words.append(f"{ZONE_WORDS[zone]} {format_share(share)}")
        parts.append(
            f'<rect x="{100 * left:.3f}%" y="0" width="{100 * share:.3f}%" height="{height}" fill="{colour}"{outline}>'
            f"<title>{_text(words[-1])}</title></rect>"
        )
        left += share
    return _drawing(height, ", ".join(words) or "no elements", parts)


def swatch(zone: str) -> str:
    """A small square in a zone's colour, for legends."""
    outline = f' stroke="{NAN_OUTLINE}" stroke-width="2"' if zone == "nan" else ""
    square = f'<rect width="12" height="12" fill="{ZONE_COLOURS[zone]}"{outline}/>'
    return f'<svg class="swatch" width="12" height="12" aria-hidden="true">{square}</svg>'


def _drawing(height: int, title: str, parts: Sequence[str]) -> str:
    return f'<svg role="img" width="100%" height="{height}"><title>{_text(title)}</title>{"".join(parts)}</svg>'


def _grid_line(y: float, label: str) -> str:
    return (
        f'<line class="grid" x1="0" x2="100%" y1="{y:.1f}" y2="{y:.1f}"/>'
        f'<text class="axis" x="-8" y="{y + 4:.1f}" text-anchor="end">{_text(label)}</text>'
    )


def _axis_text(x: float, y: float, label: str, anchor: str) -> str:
    return f'<text class="axis" x="{x:.2f}%" y="{y:.0f}" text-anchor="{anchor}">{_text(label)}</text>'


def _step_line(points: Sequence[tuple[float, float]]) -> str:
    # stretched over the width, which percentages in a path cannot express; the stroke keeps its own thickness
    path = f"M{points[0][0]:.2f} {points[0][1]:.1f}"
    for x, y in points[1:]:
        path += f"H{x:.2f}V{y:.1f}"
    if len(points) == 1:
        path += "H100"
    return (
        f'<svg viewBox="0 0 100 {PLOT_HEIGHT}" preserveAspectRatio="none" width="100%" height="{PLOT_HEIGHT}">'
        f'<path class="line" vector-effect="non-scaling-stroke" d="{path}"/></svg>'
    )


def _thinned(points: Sequence[tuple[int, float]], first: int, last: int) -> list[tuple[int, float]]:
    """Per column of pixels the first, lowest, highest and last point, so that no peak is lost."""
    if len(points) <= MAX_COLUMNS:
        return list(points)
    columns: dict[int, list[tuple[int, float]]] = {}
    for point in points:
        columns.setdefault((point[0] - first) * MAX_COLUMNS // (last - first), []).append(point)
    kept = []
    for column in columns.values():
        extremes = {
            column[0],
            min(column, key=lambda point: point[1]),
            max(column, key=lambda point: point[1]),
            column[-1],
        }
        kept += sorted(extremes)
    return kept


def _ticks(low: int, high: int, count: int) -> range:
    spacing = next((size for size in (1, 2, 4, 8, 16) if (high - low) / size <= count), 32)
    return range(-(-low // spacing) * spacing, high + 1, spacing)


def _text(text: str) -> str:
    return html.escape(clean(text))
