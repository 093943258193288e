"""What a request may say, clamped: addresses and the values that callbacks receive from the browser.

Everything here comes from outside. Values of a wrong type, unknown words and numbers out of range fall back to the
default; nothing raises.
"""

from __future__ import annotations

from dataclasses import dataclass
from urllib.parse import quote, unquote

SORTS = {"worst": "Worst first", "recent": "Worst lately first", "model": "Model order"}
METRICS = {
    "sqnr": "SQNR below target",
    "small": "Flushed + subnormal",
    "broken": "Overflow + NaN",
    "zero": "Exact zeros",
}

MAX_TEXT = 300
"""Longer names and filters are cut: no layer of a real model has one."""

COLUMNS = {"narrow": 220, "medium": 560, "wide": 900}
"""Heatmap columns per width class, each no more than the pixels of the plot, so that no column is lost in rendering."""

MAX_STEP = 2**53
"""Largest integer a browser's number holds exactly."""


@dataclass(frozen=True, slots=True)
class Route:
    """Which page an address means: "runs", "overview" or "missing", and of which run."""

    page: str
    run: str | None = None


@dataclass(frozen=True, slots=True)
class View:
    """How the heatmap is shown."""

    sort: str = "worst"
    metric: str = "sqnr"
    q: str = ""


@dataclass(frozen=True, slots=True)
class Pin:
    """Which layer the histogram shows, by row name, and within which steps (both included).

    Without a layer it is the one that most deserves a look, without steps all sampled ones together.
    """

    layer: str | None = None
    steps: tuple[int, int] | None = None


def route(pathname: object) -> Route:
    """Read an address; the run's name is one percent-encoded segment."""
    path = pathname if isinstance(pathname, str) else "/"
    if path in ("", "/"):
        return Route("runs")
    segments = path.strip("/").split("/")
    if segments[0] == "r" and len(segments) == 2:
        return Route("overview", unquote(segments[1], errors="replace"))
    return Route("missing")


def run_href(name: str) -> str:
    """Address of a run's overview."""
    return f"/r/{quote(name, safe='')}"


def view(data: object) -> View:
    """Heatmap settings from a store."""
    body = data if isinstance(data, dict) else {}
    sort, metric, q = body.get("sort"), body.get("metric"), body.get("q")
    return View(
        sort if isinstance(sort, str) and sort in SORTS else "worst",
        metric if isinstance(metric, str) and metric in METRICS else "sqnr",
        _text(q) or "",
    )


def pin(data: object) -> Pin:
    """Pinned layer and steps from a store."""
    body = data if isinstance(data, dict) else {}
    first, last = _step(body.get("from")), _step(body.get("to"))
    if first is None and last is None:
        return Pin(_text(body.get("layer")))
    ends = [end for end in (first, last) if end is not None]
    return Pin(_text(body.get("layer")), (min(ends), max(ends)))


def columns(width: object) -> int:
    """How many heatmap columns the browser has pixels for, by its width class."""
    return COLUMNS.get(width, COLUMNS["medium"]) if isinstance(width, str) else COLUMNS["medium"]


def _step(value: object) -> int | None:
    return value if isinstance(value, int) and not isinstance(value, bool) and 0 <= value <= MAX_STEP else None


def _text(value: object) -> str | None:
    return value[:MAX_TEXT] if isinstance(value, str) and value else None
