"""Wiring: read the inputs, clamp them, call a function of panels.py or layout.py, return.

What only moves what is already in the browser is wired to functions of assets/gradaudit.js.
"""

from __future__ import annotations

import logging
from typing import Any

from dash import ClientsideFunction, Dash, Input, Output, State, no_update, set_props

from gradaudit.analysis.zones import ZONES
from gradaudit.errors import GradauditError
from gradaudit_dashboard import ids, panels, state
from gradaudit_dashboard.components import error_card, message_card
from gradaudit_dashboard.layout import page, runs_table, status_badge
from gradaudit_dashboard.source import Loaded, Source, Status, reason

logger = logging.getLogger(__name__)

VERDICT_BUDGET_S = 0.5
"""Time per poll for working out verdicts of the list of runs, so that the page stays responsive meanwhile."""


def register(app: Dash, source: Source) -> None:
    """Register every callback of every page."""
    _server(app, source)
    _clientside(app)


def _server(app: Dash, source: Source) -> None:
    app.callback(
        Output(ids.RUN, "data"),
        Output(ids.PAGE, "children"),
        Output(ids.VERSION, "data"),
        Output(ids.POLL, "disabled"),
        Input(ids.URL, "pathname"),
    )(lambda pathname: (*page(source, state.route(pathname)), None, False))
    app.callback(
        Output(ids.VERSION, "data", allow_duplicate=True),
        Output(ids.STATUS, "children"),
        Output(ids.POLL, "disabled", allow_duplicate=True),
        Input(ids.POLL, "n_intervals"),
        Input(ids.RUN, "data"),
        State(ids.VERSION, "data"),
        prevent_initial_call=True,
    )(lambda n, run, version: poll(source, run, version))
    app.callback(Output(ids.RUNS, "children"), Input(ids.VERSION, "data"), prevent_initial_call=True)(
        lambda version: runs_table(source, source.rows(budget_s=0))
    )
    app.callback(Output(ids.SUMMARY, "children"), Input(ids.VERSION, "data"), State(ids.RUN, "data"))(
        lambda version, run: show_summary(source, version, run)
    )
    app.callback(
        Output(ids.TIMELINE_DATA, "data"),
        Output(ids.TIMELINE_NOTE, "children"),
        Output(ids.LEGEND, "children"),
        Input(ids.VERSION, "data"),
        Input(ids.VIEW, "data"),
        Input(ids.WIDTH, "data"),
        State(ids.RUN, "data"),
    )(lambda version, view, width, run: show_timeline(source, version, view, width, run))
    app.callback(
        Output(ids.HISTOGRAM_DATA, "data"),
        Output(ids.LAYER_HEAD, "children"),
        Output(ids.LAYER_SELECT, "data"),
        Output(ids.LAYER_SELECT, "value"),
        Output(ids.SPAN, "data"),
        Output(ids.SPAN, "value"),
        Input(ids.VERSION, "data"),
        Input(ids.PIN, "data"),
        State(ids.VIEW, "data"),
        State(ids.RUN, "data"),
    )(lambda version, pin, view, run: show_layer(source, version, pin, view, run))


def poll(source: Source, run: Any, version: Any) -> tuple[Any, Any, bool]:
    """What changed since the page last looked: version, badge, and whether to stop asking."""
    if not isinstance(run, str):
        now = f"{hash(tuple(source.rows(budget_s=VERDICT_BUDGET_S)))}"
        return (now if now != version else no_update), "", False
    try:
        loaded = source.load(run)
        status = source.status(loaded)
    except Exception as error:  # the last data stays on the page, the badge says what happened
        return no_update, status_badge(Status("unreadable", f"unreadable: {reason(error)}")), False
    done = loaded.run.ended != "running"
    return (loaded.key if loaded.key != version else no_update), status_badge(status), done


def show_summary(source: Source, version: Any, run: Any) -> Any:
    """Verdict, findings, recommendation."""
    loaded = _loaded(source, version, run)
    return no_update if loaded is None else panels.summary(loaded)


def show_timeline(source: Source, version: Any, view: Any, width: Any, run: Any) -> tuple[Any, Any, Any]:
    """Loss scale and heatmap."""
    loaded = _loaded(source, version, run)
    if loaded is None or not width:
        return no_update, no_update, no_update
    try:
        shown = panels.timeline(loaded, state.view(view), state.columns(width))
    except Exception as error:
        return None, error_card("This panel", error), None
    return shown.data, shown.note, shown.legend


def show_layer(source: Source, version: Any, pin: Any, view: Any, run: Any) -> tuple[Any, ...]:
    """The pinned layer's exponents."""
    loaded = _loaded(source, version, run)
    if loaded is None:
        return (no_update,) * 6
    try:
        shown = panels.layer(loaded, state.pin(pin), state.view(view))
    except Exception as error:
        return None, error_card("This layer", error), no_update, no_update, no_update, no_update
    return shown.data, shown.head, shown.choices, shown.chosen, shown.spans, shown.span


def on_error(error: Exception) -> None:
    """A callback failed in a way no panel caught: the log has the trace, the page a small card."""
    logger.error("A callback failed", exc_info=error)
    set_props(ids.NOTICE, {"children": message_card("Something went wrong", reason(error), state="error")})


def _loaded(source: Source, version: Any, run: Any) -> Loaded | None:
    """The run a page shows; None before the first poll, and when it went away (the badge says so)."""
    if not isinstance(run, str) or not isinstance(version, str):
        return None
    try:
        return source.load(run)
    except GradauditError:
        return None


def _clientside(app: Dash) -> None:
    def wire(function: str, *arguments: Any, **more: Any) -> None:
        app.clientside_callback(ClientsideFunction("gradaudit", function), *arguments, **more)

    wire("browser", Output(ids.THEME, "data"), Output(ids.WIDTH, "data"), Input(ids.URL, "pathname"))
    wire(
        "readUrl", Output(ids.VIEW, "data"), Output(ids.PIN, "data"), Input(ids.URL, "search"),
        State(ids.VIEW, "data"), State(ids.PIN, "data"),
    )  # fmt: skip
    wire(
        "controls", Output(ids.METRIC, "value"), Output(ids.SORT, "value"), Output(ids.FILTER, "value"),
        Input(ids.VIEW, "data"),
    )  # fmt: skip
    wire(
        "writeUrl", Output(ids.SINK, "data"),
        Input(ids.METRIC, "value"), Input(ids.SORT, "value"), Input(ids.FILTER, "value"),
        Input(ids.LAYER_SELECT, "value"), Input(ids.SPAN, "value"), Input(ids.TIMELINE, "clickData"),
        State(ids.TIMELINE_DATA, "data"), State(ids.HISTOGRAM_DATA, "data"), prevent_initial_call=True,
    )  # fmt: skip
    wire(
        "paintTimeline", Output(ids.TIMELINE, "figure"), Output(ids.TIMELINE, "style"),
        Input(ids.TIMELINE_DATA, "data"), Input(ids.THEME, "data"), Input(ids.WIDTH, "data"), Input(ids.PIN, "data"),
        Input(ids.HISTOGRAM_DATA, "data"), State(ids.TIMELINE, "figure"), prevent_initial_call=True,
    )  # fmt: skip
    wire(
        "tip", Output(ids.TIMELINE_TIP, "show"), Output(ids.TIMELINE_TIP, "bbox"), Output(ids.TIMELINE_TIP, "children"),
        Output(ids.TIMELINE_TIP, "direction"),
        Input(ids.TIMELINE, "hoverData"), State(ids.TIMELINE_DATA, "data"), prevent_initial_call=True,
    )  # fmt: skip
    wire(
        "paintHistogram", Output(ids.HISTOGRAM, "figure"), Output(ids.LAYER_BODY, "style"),
        Output(ids.SCALE, "min"), Output(ids.SCALE, "max"), Output(ids.SCALE, "marks"), Output(ids.SCALE, "value"),
        Output(ids.SCALE_TEXT, "children"), Output(ids.SHARES, "children"),
        *(Output(ids.share(zone), "children") for zone in ZONES),
        *(Output(ids.share_bar(zone), "style") for zone in ZONES),
        Input(ids.HISTOGRAM_DATA, "data"), Input(ids.SCALE, "value"), Input(ids.SCALE_BACK, "n_clicks"),
        Input(ids.URL, "search"), Input(ids.WIDTH, "data"), State(ids.HISTOGRAM, "figure"), prevent_initial_call=True,
    )  # fmt: skip
