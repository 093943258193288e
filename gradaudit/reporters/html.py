"""The report as one HTML file that opens from disk, offline and without JavaScript.

Charts are inline SVG, styles are inline, and the page's own Content-Security-Policy forbids everything else, so a
hostile layer name has nothing to load from and nothing to run in. Everything is escaped by jinja2 or by svg.py.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from gradaudit.analysis.report import AuditReport, Finding, LayerRow, Recommendation
from gradaudit.errors import GradauditError
from gradaudit.reporters.rows import (
    MAX_PLACES,
    NUM_WORST_LAYERS,
    advice,
    consequence_words,
    effect_rows,
    layer_rank,
    layer_window,
    leading_findings,
    passed_checks,
    run_facts,
    scale_position,
    setting_rows,
    sqnr_words,
    unfinished_checks,
    window_limits,
    window_words,
    worst_layers,
    zone_words,
)
from gradaudit.reporters.svg import WindowBar, scale_chart, swatch, window_chart, zone_bar
from gradaudit.reporters.words import (
    CAN_FIX_WORDS,
    LEVEL_WORDS,
    SEVERITY_WORDS,
    ZONE_MEANINGS,
    ZONE_WORDS,
    clean,
    format_evidence,
    format_scale,
    format_steps,
    glued,
    layer_label,
    place_detail,
    prose,
)

MAX_TABLE_ROWS = 2000
"""Rows of the table of all layers; more would make the page slow to open, and the JSON form holds every one."""


def render(report: AuditReport) -> str:
    """The report as one self-contained HTML page.

    Raises:
        GradauditError: jinja2 is not installed.
    """
    try:
        from jinja2 import Environment, PackageLoader, StrictUndefined
        from markupsafe import Markup
    except ImportError as error:
        raise GradauditError("The HTML report needs jinja2: pip install 'gradaudit[html]'.") from error

    environment = Environment(
        loader=PackageLoader("gradaudit.reporters"),
        autoescape=True,
        undefined=StrictUndefined,
        finalize=lambda value: glued(clean(value)) if type(value) is str else value,
        keep_trailing_newline=True,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters["drawing"] = Markup  # svg.py's output, escaped there
    return environment.get_template("report.html").render(_page(report))


def _page(report: AuditReport) -> dict[str, Any]:
    worst = worst_layers(report)
    by_rank = sorted(report.layers, key=lambda layer: (layer_rank(layer), layer.fqn, layer.tensor))
    recommendation = report.recommendation
    return {
        "name": report.run.name,
        "level": report.verdict.level,
        "level_word": LEVEL_WORDS[report.verdict.level],
        "summary": prose(report.verdict.summary),
        "facts": run_facts(report.run),
        "scale_chart": scale_chart(report.history),
        "num_skipped": report.run.num_skipped,
        "findings": [_finding(finding, consequences) for finding, consequences in leading_findings(report)],
        "recommendation": _recommendation(report, recommendation) if recommendation is not None else None,
        "legend": [(swatch(zone), word, ZONE_MEANINGS[zone]) for zone, word in ZONE_WORDS.items()],
        "worst": [_layer(layer) | {"bar": zone_bar(layer.zones)} for layer in worst],
        "layers": [_layer(layer) for layer in by_rank[:MAX_TABLE_ROWS]],
        "num_layers": len(report.layers),
        "passed": passed_checks(report),
        "unfinished": unfinished_checks(report),
    }


def _finding(finding: Finding, consequences: Sequence[Finding]) -> dict[str, Any]:
    certainty = f"{finding.confidence} confidence"
    if finding.severity != "info":
        certainty += f"; {CAN_FIX_WORDS[finding.scale_can_fix]}"
    return {
        "id": finding.id,
        "severity": finding.severity,
        "severity_word": SEVERITY_WORDS[finding.severity],
        "title": prose(finding.title),
        "summary": prose(finding.summary),
        "places": [(place.name, place_detail(place)) for place in finding.where[:MAX_PLACES]],
        "num_more": max(len(finding.where) - MAX_PLACES, 0),
        "when": format_steps(finding.steps),
        "evidence": [format_evidence(evidence) for evidence in finding.evidence],
        "certainty": certainty,
        "remedy": prose(finding.remedy),
        "consequences": [consequence_words(consequence) for consequence in consequences],
        "docs": finding.docs,
    }


def _recommendation(report: AuditReport, recommendation: Recommendation) -> dict[str, Any]:
    scale = report.run.scale_last
    return {
        "advice": advice(recommendation),
        "settings": setting_rows(recommendation) if recommendation.precision == "fp16" else [],
        "effects": effect_rows(recommendation),
        "change_needed": recommendation.change_needed,
        "window": window_words(recommendation.window),
        "is_empty": recommendation.window.is_empty,
        "position": scale_position(recommendation.window, scale),
        "limits": window_limits(recommendation.window),
        "reasons": [prose(reason) for reason in recommendation.reasons],
        "scale": format_scale(scale) if scale is not None else "",
        "chart": window_chart(_window_bars(report, recommendation), _run_bar(recommendation), scale),
    }


def _run_bar(recommendation: Recommendation) -> WindowBar:
    window = recommendation.window
    return WindowBar("run", window.low_log2, window.high_log2)


def _window_bars(report: AuditReport, recommendation: Recommendation) -> list[WindowBar]:
    """The tensors that limit the window, then the worst others."""
    window = recommendation.window
    limiting = (window.limited_low_by, window.limited_high_by)
    first = [layer for name in limiting for layer in report.layers if name in (layer.fqn, layer_label(layer))]
    bars = [
        WindowBar(layer_label(layer), layer.window_low_log2, layer.window_high_log2)
        for layer in (*first, *worst_layers(report))
        if layer.window_low_log2 is not None or layer.window_high_log2 is not None
    ]
    return list(dict.fromkeys(bars))[:NUM_WORST_LAYERS]


def _layer(layer: LayerRow) -> dict[str, str]:
    return {
        "label": layer_label(layer),
        "kind": layer.kind,
        "dtype": layer.dtype,
        "sqnr": sqnr_words(layer),
        "zones": zone_words(layer),
        "window": layer_window(layer),
    }
