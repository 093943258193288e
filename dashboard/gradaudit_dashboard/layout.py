"""The frame around every page and the pages themselves, as an explicit tuple."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any

import dash_mantine_components as dmc
from dash import dcc, html

from gradaudit.analysis.zones import ZONES
from gradaudit.errors import GradauditError
from gradaudit.reporters.palette import ZONE_COLOURS
from gradaudit.reporters.words import LEVEL_WORDS, clean, format_scale, format_share
from gradaudit_dashboard import ids
from gradaudit_dashboard.components import message_card, panel, zone_swatch
from gradaudit_dashboard.figures import GRAPH_CONFIG
from gradaudit_dashboard.source import RunRow, Source, Status, duration, reason
from gradaudit_dashboard.state import METRICS, SORTS, Route, run_href

POLL_MS = 2000
MAX_RUNS = 500
"""Runs listed; a longer table would be slow and nobody reads it."""

RECORD_A_RUN = "gradaudit run train.py"

INDEX = """<!DOCTYPE html>
<html lang="en">
<head>
{%metas%}
<title>{%title%}</title>
{%favicon%}
{%css%}
</head>
<body>
{%app_entry%}
<footer>{%config%}{%scripts%}{%renderer%}</footer>
</body>
</html>
"""

STATE_WORDS = {"ok": "ended", "exception": "exception", "killed": "killed", "running": "live"}


def shell() -> dmc.MantineProvider:
    """Header, page container and the stores that outlive a page."""
    toggle = dmc.ColorSchemeToggle(
        lightIcon=html.Span(className="icon icon-sun"),
        darkIcon=html.Span(className="icon icon-moon"),
        variant="subtle",
        color="gray",
        **{"aria-label": "Switch between light and dark"},
    )
    header = html.Header(
        [
            dcc.Link("gradaudit", href="/", className="brand"),
            html.Div(id=ids.STATUS, className="status"),
            toggle,
        ]
    )
    stores = [
        dcc.Location(id=ids.URL, refresh=False),
        dcc.Store(id=ids.THEME),
        dcc.Store(id=ids.WIDTH),
        dcc.Store(id=ids.VIEW),
        dcc.Store(id=ids.PIN),
        dcc.Store(id=ids.RUN),
        dcc.Store(id=ids.VERSION),
        dcc.Interval(id=ids.POLL, interval=POLL_MS),
    ]
    notice = html.Div(id=ids.NOTICE, role="alert")
    return dmc.MantineProvider(
        [*stores, header, notice, html.Main(skeleton("page"), id=ids.PAGE)],
        defaultColorScheme="auto",
        theme={"primaryColor": "blue", "defaultRadius": "sm"},
    )


def skeleton(kind: str) -> html.Div:
    """A grey shape where a panel is about to be; the style sheet shows it after 0.4 s only."""
    return html.Div(className=f"skeleton {kind}", **{"aria-label": "Loading"})


def page(source: Source, where: Route) -> tuple[str | None, list[Any]]:
    """The run a page shows, if it shows one, and what is on it."""
    return next(build for name, build in PAGES if name == where.page)(source, where)


def runs_page(source: Source, where: Route) -> tuple[str | None, list[Any]]:
    """The list of runs, or the run itself if there is only one."""
    only = source.only_name()
    if only is not None:
        return overview_page(source, Route("overview", only))
    return None, [html.H1("Runs"), html.Div(runs_table(source, source.rows(budget_s=0)), id=ids.RUNS)]


def overview_page(source: Source, where: Route) -> tuple[str | None, list[Any]]:
    """One run: verdict, findings, recommendation, everything over time, one layer's exponents."""
    name = where.run or ""
    try:
        source.load(name)
    except GradauditError as error:
        known = source.path_of(name) is not None
        title = "This run cannot be read" if known else "No such run"
        return None, [html.H1(clean(name)), problem(title, reason(error))]
    except Exception as error:  # a run may hold anything; the page says so
        return None, [html.H1(clean(name)), problem("This run cannot be read", reason(error))]
    return name, [
        html.H1(clean(name)),
        html.Div([skeleton("verdict"), skeleton("cards")], id=ids.SUMMARY),
        timeline_section(),
        layer_section(),
    ]


def missing_page(source: Source, where: Route) -> tuple[str | None, list[Any]]:
    """An address that means nothing."""
    return None, [html.H1("Not here"), problem("No such page", "This address belongs to no page of the dashboard.")]


PAGES: tuple[tuple[str, Callable[[Source, Route], tuple[str | None, list[Any]]]], ...] = (
    ("runs", runs_page),
    ("overview", overview_page),
    ("missing", missing_page),
)


def problem(title: str, text: str) -> html.Div:
    """A whole page that cannot be shown, with the way out."""
    return html.Div([message_card(title, text, state="error"), dcc.Link("All runs", href="/")], className="card")


def status_badge(status: Status) -> html.Span:
    """State of the run in the header: dot, word and step."""
    return html.Span(
        [html.Span(className="dot", **{"aria-hidden": "true"}), status.text], className=f"badge {status.state}"
    )


def runs_table(source: Source, rows: Sequence[RunRow]) -> Any:
    """Newest first; a run that cannot be read keeps its line and says why."""
    if not rows:
        return panel("No runs yet", html.Div([
            html.P(f"There is no run in {source.root}. Record one with:"), html.Pre(html.Code(RECORD_A_RUN)),
            html.P("It appears here while it trains.")]))  # fmt: skip
    columns = ("Run", "Verdict", "State", "Started", "Steps", "Sampled", "Skipped", "Scale at the end")
    head = html.Thead(html.Tr([html.Th(text, scope="col") for text in columns]))
    now = source.clock()
    body = html.Tbody([_run_line(row, now) for row in rows[:MAX_RUNS]])
    note = f"The newest {MAX_RUNS:,} of {len(rows):,} runs." if len(rows) > MAX_RUNS else None
    return html.Div([html.Table([head, body], className="runs"), html.P(note, className="note") if note else None],
                    className="card")  # fmt: skip


def _run_line(row: RunRow, now: float) -> html.Tr:
    name = html.Th(dcc.Link(clean(row.name), href=run_href(row.name)), scope="row")
    if row.problem:
        cell = [html.Span(className="icon icon-error", **{"aria-hidden": "true"}), f"unreadable: {row.problem}"]
        return html.Tr([name, html.Td(cell, colSpan=7, className="unreadable")])
    level = html.Span("not judged yet", className="dim")
    if row.level is not None:
        icon = html.Span(className=f"icon icon-{row.level}", **{"aria-hidden": "true"})
        level = html.Span([icon, LEVEL_WORDS[row.level]], className=f"level-word {row.level}", title=row.summary)
    elif row.ended == "running":
        level = html.Span("open to see", className="dim")
    skipped = f"{row.num_skipped:,} ({format_share(row.num_skipped / row.num_steps)})" if row.num_steps else "0"
    cells: list[tuple[Any, str]] = [
        (level, "Verdict"),
        (html.Span(STATE_WORDS.get(row.ended, row.ended), className=f"state {row.ended}"), "State"),
        (_started(row.started_at, now), "Started"),
        (f"{row.num_steps:,}", "Steps"),
        (f"{row.num_sampled:,}", "Sampled"),
        (skipped, "Skipped"),
        (format_scale(row.scale_last), "Scale at the end"),
    ]
    return html.Tr([name, *(html.Td(text, **{"data-label": label}) for text, label in cells)])


def _started(at: float | None, now: float) -> str:
    if at is None:
        return "unknown"
    try:
        when = time.strftime("%Y-%m-%d %H:%M", time.localtime(at))
    except (OverflowError, ValueError, OSError):
        return "unknown"
    return f"{when} ({duration(now - at)} ago)" if 0 <= now - at < 86400 else when


def timeline_section() -> html.Section:
    """Controls, loss scale and heatmap."""
    controls = html.Div(
        [
            dmc.Select(id=ids.METRIC, label="Heatmap shows", data=_options(METRICS), allowDeselect=False),
            dmc.Select(id=ids.SORT, label="Order", data=_options(SORTS), allowDeselect=False),
            dmc.TextInput(id=ids.FILTER, label="Only layers with", placeholder="all words, any case", debounce=250),
        ],
        className="controls",
    )
    body = [
        controls,
        html.Div(id=ids.LEGEND),
        graph(ids.TIMELINE, "Loss scale and heatmap of layers over steps", tip=True),
        html.Div(skeleton("chart"), id=ids.TIMELINE_NOTE),
        html.P("Click a cell to see that layer's exponents below. Drag to zoom, double-click to zoom out.",
               className="note pointer"),
        dcc.Store(id=ids.TIMELINE_DATA),
    ]  # fmt: skip
    return panel("Over time", html.Div(body))


def layer_section() -> html.Section:
    """The pinned layer: histogram, scale slider, zone shares."""
    rows = [
        html.Tr([
            html.Th(zone_swatch(zone), scope="row"),
            html.Td(id=ids.share(zone), className="share"),
            html.Td(html.Div(id=ids.share_bar(zone), className=f"bar zone-{zone}"), style=_zone_colour(zone)),
        ])
        for zone in ZONES
    ]  # fmt: skip
    slider = html.Div(
        [
            html.Label("What if the loss scale were", id="scale-label"),
            html.Output(id=ids.SCALE_TEXT, className="scale-text"),
            dmc.Slider(id=ids.SCALE, min=-4, max=24, step=1, value=0, label=None, updatemode="drag",
                       thumbLabel="Loss scale as a power of two", marks=[]),
            html.Button("Back to the scale in force", id=ids.SCALE_BACK, type="button", className="quiet"),
        ],
        className="slider",
    )  # fmt: skip
    side = [slider, html.P(id=ids.SHARES, className="whole"), html.Table(html.Tbody(rows), className="zones")]
    body = [
        html.Div(
            [
                dmc.Select(id=ids.LAYER_SELECT, label="Layer", data=[], searchable=True, limit=100, allowDeselect=False,
                           nothingFoundMessage="No layer matches"),
                dmc.SegmentedControl(id=ids.SPAN, data=[{"value": "all", "label": "All samples"}], value="all",
                                     **{"aria-label": "Which samples"}),
            ],
            className="controls",
        ),
        html.Div(skeleton("line"), id=ids.LAYER_HEAD),
        html.Div([graph(ids.HISTOGRAM, "Histogram of the layer's exponents"), html.Div(side, className="side")],
                 className="histogram", id=ids.LAYER_BODY),
        dcc.Store(id=ids.HISTOGRAM_DATA),
        dcc.Store(id=ids.SINK),
    ]  # fmt: skip
    return panel("Exponents of one layer", html.Div(body), id=ids.LAYER)


def graph(id: str, label: str, *, tip: bool = False) -> html.Div:
    """A plotly figure with the one configuration every graph has, and words at the pointer where asked for."""
    figure = {"data": [], "layout": {"paper_bgcolor": "rgba(0,0,0,0)", "plot_bgcolor": "rgba(0,0,0,0)"}}
    plot = dcc.Graph(id=id, figure=figure, config=GRAPH_CONFIG, clear_on_unhover=True)
    words = (
        dcc.Tooltip(
            id=ids.TIMELINE_TIP,
            direction="bottom",
            className="tip",
            show=False,
            background_color="var(--ga-card)",
            border_color="var(--ga-line)",
        )
        if tip
        else None
    )
    return html.Div([plot, words], className="graph", role="group", **{"aria-label": label})


def _zone_colour(zone: str) -> dict[str, str]:
    return {"--zone": ZONE_COLOURS[zone]}


def _options(words: dict[str, str]) -> list[dict[str, str]]:
    return [{"value": value, "label": label} for value, label in words.items()]
