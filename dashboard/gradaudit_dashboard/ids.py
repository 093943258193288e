"""Component ids, one name each, used by the layout, the callbacks and the browser tests."""

from __future__ import annotations

URL = "url"
"""dcc.Location; its search string is the one place where the state of a page lives."""

PAGE = "page"
STATUS = "status"
NOTICE = "notice"
POLL = "poll"

RUN = "run"
"""dcc.Store: name of the run a page shows, null on the list."""

VERSION = "version"
"""dcc.Store: what of the run the page shows; a new value makes every panel refresh."""

THEME = "theme"
WIDTH = "width"
"""dcc.Stores: what only the browser knows: its colour scheme and its width class."""

VIEW = "view"
"""dcc.Store: sort, metric and filter of the heatmap, read from the URL."""

PIN = "pin"
"""dcc.Store: pinned layer and step, read from the URL."""

RUNS = "runs"
SUMMARY = "summary"

SORT = "sort"
METRIC = "metric"
FILTER = "filter"
TIMELINE = "timeline"
TIMELINE_DATA = "timeline-data"
TIMELINE_NOTE = "timeline-note"
TIMELINE_TIP = "timeline-tip"
LEGEND = "legend"

LAYER = "layer"
LAYER_HEAD = "layer-head"
LAYER_SELECT = "layer-select"
SPAN = "span"
HISTOGRAM = "histogram"
HISTOGRAM_DATA = "histogram-data"
SCALE = "scale"
SCALE_BACK = "scale-back"
SHARES = "shares"
SINK = "sink"
"""Output of clientside callbacks that only write the URL."""

SCALE_TEXT = "scale-text"
LAYER_BODY = "layer-body"


def share(zone: str) -> str:
    """Cell with a zone's share of elements."""
    return f"share-{zone}"


def share_bar(zone: str) -> str:
    """Bar behind a zone's share."""
    return f"share-bar-{zone}"
