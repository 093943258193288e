"""Cards and tables: words and layout from an AuditReport, never a threshold.

Text goes in as children, which Dash renders as text; no card takes HTML.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import dash_mantine_components as dmc
import numpy as np
from dash import html

from gradaudit.analysis.report import AuditReport, Finding, Place, Recommendation
from gradaudit.errors import GradauditError
from gradaudit.reporters.palette import ZONE_COLOURS
from gradaudit.reporters.rows import (
    consequence_words,
    effect_rows,
    leading_findings,
    passed_checks,
    run_facts,
    unfinished_checks,
    window_limits,
    window_words,
)
from gradaudit.reporters.snippets import torch_lines
from gradaudit.reporters.words import (
    CAN_FIX_WORDS,
    LEVEL_WORDS,
    PRECISION_WORDS,
    SEVERITY_WORDS,
    ZONE_MEANINGS,
    ZONE_WORDS,
    clean,
    format_evidence,
    format_number,
    format_scale,
    format_steps,
    place_detail,
    plural,
    prose,
)
from gradaudit_dashboard.colours import NO_VALUE_COLOUR, NOT_SAMPLED_COLOUR, ramp_colour
from gradaudit_dashboard.heat import FINE, METRIC_TABLE, WORST, share_codes
from gradaudit_dashboard.source import reason

logger = logging.getLogger(__name__)

MAX_PLACES = 6
"""A fault in one layer tends to show in all behind it; the rest is counted."""


def panel(title: str, children: Any, *, className: str = "", **more: Any) -> html.Section:
    """A titled card."""
    return html.Section([html.H2(title), children], className=f"card {className}".strip(), **more)


def error_card(what: str, error: Exception) -> html.Div:
    """Stands in place of a panel that could not be made; the log has the trace, the other panels go on."""
    is_expected = isinstance(error, GradauditError)  # a sentence about a file, not a bug
    logger.error("%s could not be shown: %s", what, error, exc_info=None if is_expected else error)
    return message_card(f"{what} could not be shown", reason(error), state="error")


def message_card(title: str, text: str, *, state: str = "empty") -> html.Div:
    """A designed picture for an empty, waiting or broken panel."""
    icon = html.Span(className=f"icon icon-{state}", **{"aria-hidden": "true"})
    return html.Div([icon, html.Div([html.Strong(title), html.P(text)])], className=f"message {state}", role="status")


def guarded(what: str, build: Callable[[], Any]) -> Any:
    """The panel, or an error card in its place."""
    try:
        return build()
    except Exception as error:  # whatever a run holds, the rest of the page must stay
        return error_card(what, error)


def facts(pairs: Sequence[tuple[str, Any]]) -> html.Dl:
    """Label and value pairs."""
    return html.Dl([html.Div([html.Dt(label), html.Dd(value)]) for label, value in pairs], className="facts")


def verdict_card(report: AuditReport) -> html.Section:
    """Is it healthy, in one sentence, with the run in numbers."""
    level = report.verdict.level
    return html.Section(
        [
            html.Div(
                [
                    html.Span(className=f"icon icon-{level}", **{"aria-hidden": "true"}),
                    html.Div([html.H2(LEVEL_WORDS[level], className="level"), html.P(prose(report.verdict.summary))]),
                ],
                className="verdict-head",
            ),
            facts(run_facts(report.run)),
        ],
        className=f"card verdict {level}",
        **{"aria-label": "Verdict"},
    )


def findings_card(report: AuditReport, row_of: Callable[[Place], str | None]) -> html.Section:
    """What is wrong, worst first; errors and warnings open, the rest folded.

    Args:
        report: The audit.
        row_of: Heatmap row of a place, None where there is none to pin.
    """
    found = leading_findings(report)
    count = {severity: sum(item.severity == severity for item in report.findings) for severity in SEVERITY_WORDS}
    said = ", ".join(plural(n, word) if word != "info" else f"{n:,} info" for word, n in count.items() if n)
    body: list[Any] = [_finding(item, consequences, row_of) for item, consequences in found]
    if not found:
        sampled = f"{plural(report.run.num_sampled, 'sampled step')}, {plural(len(report.layers), 'gradient tensor')}"
        text = f"{plural(len(passed_checks(report)), 'check')} looked at {sampled} and found nothing."
        body = [message_card("No findings", text, state="healthy")]
    title = f"Findings ({said})" if said else "Findings"
    return panel(title, html.Div([*body, _checks(report)], className="findings"), **{"aria-live": "polite"})


def _finding(finding: Finding, consequences: Sequence[Finding], row_of: Callable[[Place], str | None]) -> html.Details:
    head = html.Summary(
        [
            html.Span(
                [
                    html.Span(className=f"icon icon-{finding.severity}", **{"aria-hidden": "true"}),
                    SEVERITY_WORDS[finding.severity],
                ],
                className=f"severity {finding.severity}",
            ),
            html.Span(prose(finding.title), className="finding-title"),
        ]
    )
    certainty = f"{finding.confidence} confidence"
    if finding.severity != "info":
        certainty += f"; {CAN_FIX_WORDS[finding.scale_can_fix]}"
    pairs: list[tuple[str, Any]] = []
    if finding.where:
        pairs.append(("Where", _places(finding.where, row_of)))
    pairs.append(("When", format_steps(finding.steps)))
    if finding.evidence:
        pairs.append(("Evidence", html.Ul([html.Li(format_evidence(item)) for item in finding.evidence])))
    pairs.append(("Certainty", certainty))
    if finding.remedy:
        pairs.append(("Do", html.Strong(prose(finding.remedy), className="remedy")))
    if consequences:
        pairs.append(("Leads to", html.Ul([html.Li(consequence_words(item)) for item in consequences])))
    pairs.append(("Id", html.Code(finding.id)))
    return html.Details(
        [head, html.P(prose(finding.summary)), facts(pairs)],
        open=finding.severity != "info",
        className=f"finding {finding.severity}",
    )


def _places(where: Sequence[Place], row_of: Callable[[Place], str | None]) -> html.Ul:
    items = [html.Li([_place(place, row_of(place)), f" ({place_detail(place)})"]) for place in where[:MAX_PLACES]]
    if len(where) > MAX_PLACES:
        items.append(html.Li(f"and {len(where) - MAX_PLACES:,} more"))
    return html.Ul(items)


def _place(place: Place, row: str | None) -> Any:
    name = clean(place.name)
    if row is None:
        return html.Code(name)
    return html.Button(name, type="button", className="pin", title="Show its exponents", **{"data-pin": row})


def _checks(report: AuditReport) -> Any:
    if not report.checks:
        return None
    counts = {
        status: sum(check.status == status for check in report.checks)
        for status in ("passed", "found", "skipped", "errored")
    }
    said = ", ".join(f"{n:,} {status}" for status, n in counts.items() if n)
    passed = ", ".join(passed_checks(report)) or "none"
    open_ends = [html.Li(f"{check.status} {check.id}: {prose(check.reason)}") for check in unfinished_checks(report)]
    body = [html.P(f"Passed: {passed}."), html.Ul(open_ends) if open_ends else None]
    return html.Details([html.Summary(f"{plural(len(report.checks), 'check')}: {said}"), *body], className="checks")


def recommendation_card(
    report: AuditReport, meta: Mapping[str, Any], row_of: Callable[[Place], str | None]
) -> html.Section:
    """Settings now and recommended, their effect on this run, and the lines to paste.

    Args:
        report: The audit.
        meta: run.json, for the device and the scaler's class.
        row_of: Heatmap row of a place, None where there is none to pin.
    """
    advice = report.recommendation
    if advice is None:
        text = "There is nothing to recommend: the run used no loss scale, or too little of it was recorded."
        return panel("Recommendation", message_card("No recommendation", text))
    verdict = "Change the scaler's settings." if advice.change_needed else "Keep the scaler's settings."
    if advice.precision != "fp16":
        verdict = f"{PRECISION_WORDS[advice.precision]}."
    lines = torch_lines(advice, meta)
    body = [
        html.P(html.Strong(verdict[:1].upper() + verdict[1:])),
        _before_after("setting", "now", "recommended", _setting_rows(advice)),
        _code("\n".join(lines)) if lines else None,
        _before_after("effect on this run", "now", "predicted", effect_rows(advice)),
    ]
    pairs: list[tuple[str, Any]] = [("Safe window", window_words(advice.window))]
    for what, name in window_limits(advice.window):
        place = Place("tensor", name)
        pairs.append((what.capitalize(), _place(place, row_of(place))))
    body.append(facts(pairs))
    if advice.reasons:
        body.append(html.Ul([html.Li(prose(text)) for text in advice.reasons], className="reasons"))
    return panel("Recommendation", html.Div(body))


def _setting_rows(advice: Recommendation) -> list[tuple[str, str, str]]:
    """GradScaler's settings as (name, now, recommended)."""
    now = advice.current_settings
    names = ("init_scale", "growth_interval", "growth_factor", "backoff_factor")
    rows = []
    for name in names:
        current = getattr(now, name) if now is not None else None
        advised = getattr(advice, name) if advice.change_needed or current is None else current
        rows.append((name, _setting(name, current), _setting(name, advised)))
    return rows


def _setting(name: str, value: float | None) -> str:
    if value is None:
        return "none"
    if name.endswith("scale"):
        return format_scale(value)
    return plural(int(value), "step") if name == "growth_interval" else format_number(value)


def _code(code: str) -> html.Div:
    copy = dmc.CopyButton("Copy", value=code, copiedChildren="Copied", size="compact-xs", className="copy")
    return html.Div([html.Pre(html.Code(code)), copy], className="code")


def _before_after(what: str, now: str, then: str, rows: Sequence[tuple[str, str, str]]) -> html.Table:
    head = html.Thead(html.Tr([html.Th(text, scope="col") for text in (what, now, then)]))
    body = [
        html.Tr([html.Th(name, scope="row"), html.Td(a), html.Td(b, className="" if a == b else "changed")])
        for name, a, b in rows
    ]
    return html.Table([head, html.Tbody(body)], className="before-after")


def legend(metric: str, target_db: float) -> html.Div:
    """The heatmap's colours in words, for both themes; the style sheet shows one bar."""
    table = METRIC_TABLE[metric]
    if metric == "sqnr":
        marks = [(FINE, f"{target_db:.0f} dB"), ((FINE + WORST) // 2, f"{target_db / 2:.0f} dB"), (WORST, "0 dB")]
    else:
        shares = ((0.0, "0 %"), (1e-4, "0.01 %"), (0.01, "1 %"), (1.0, "100 %"))
        marks = [(int(share_codes(np.array([share]))[0]), text) for share, text in shares]
    codes = np.arange(FINE + 1, WORST + 1, 4)
    bars = []
    for theme in ("light", "dark"):
        colours = ", ".join(ramp_colour(theme, float(place)) for place in table.ramp(codes))
        bars.append(html.Div(className=f"ramp {theme}", style={"background": f"linear-gradient(90deg, {colours})"}))
    ticks = [
        html.Span(text, style={"left": f"{100 * (code - FINE) / (WORST - FINE):.1f}%"}, className="tick")
        for code, text in marks
    ]
    return html.Div(
        [
            html.Span([html.Span(className="swatch", style={"background": NOT_SAMPLED_COLOUR}), "not sampled"]),
            html.Span([html.Span(className="swatch", style={"background": NO_VALUE_COLOUR}), table.no_value]),
            html.Div([*bars, html.Div(ticks, className="ticks")], className="scale"),
        ],
        className="legend",
    )


def zone_swatch(zone: str) -> html.Span:
    """A zone's colour and word, with what it means on hover."""
    square = html.Span(className=f"swatch zone-{zone}", style={"background": ZONE_COLOURS[zone]})
    return html.Span([square, ZONE_WORDS[zone]], title=ZONE_MEANINGS[zone])
