"""The report for a terminal or a log file: what is wrong, why that is known, what to do; short when all is well."""

from __future__ import annotations

from collections.abc import Sequence

from rich.text import Text

from gradaudit.analysis.report import AuditReport, Finding, Recommendation
from gradaudit.reporters.layout import paragraph, table, to_string
from gradaudit.reporters.rows import (
    MAX_PLACES,
    advice,
    consequence_words,
    effect_rows,
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
from gradaudit.reporters.words import (
    CAN_FIX_WORDS,
    LEVEL_WORDS,
    SEVERITY_WORDS,
    format_evidence,
    format_steps,
    layer_label,
    place_detail,
    plural,
    prose,
    unbroken,
)

LEVEL_STYLES = {"healthy": "bold green", "attention": "bold yellow", "failing": "bold red"}
SEVERITY_STYLES = {"error": "bold red", "warning": "bold yellow", "info": "bold cyan"}

LABEL_COLUMNS = 13


def render(report: AuditReport, *, width: int = 80, colour: bool = False) -> str:
    """The report in plain text.

    Args:
        report: What to show.
        width: Columns to stay within; only a single name longer than that runs over.
        colour: Whether to add ANSI colours; nothing is told by colour alone.
    """
    level = report.verdict.level
    first = Text.assemble((LEVEL_WORDS[level], LEVEL_STYLES[level]), "  ")
    lines = paragraph(prose(report.verdict.summary), width=width, first=first, indent=first.cell_len)
    lines += [Text(), *_run(report, width)]
    for finding, consequences in leading_findings(report):
        lines += [Text(), *_finding(finding, consequences, width)]
    if report.recommendation is not None:
        lines += [Text(), *recommendation_lines(report, report.recommendation, width=width)]
    lines += _layers(report, width)
    lines += _checks(report, width)
    return to_string(lines, colour=colour)


def _labelled(label: str, text: str, width: int, *, start: int = 0) -> list[Text]:
    first = Text.assemble(" " * start, (label, "dim"))
    return paragraph(text, width=width, first=first, indent=start + LABEL_COLUMNS)


def _run(report: AuditReport, width: int) -> list[Text]:
    lines = _labelled("Run", unbroken(report.run.name), width) if report.run.name else []
    for label, text in run_facts(report.run):
        lines += _labelled(label, text, width)
    return lines


def _finding(finding: Finding, consequences: Sequence[Finding], width: int) -> list[Text]:
    first = Text.assemble((SEVERITY_WORDS[finding.severity], SEVERITY_STYLES[finding.severity]), "  ")
    lines = paragraph(prose(finding.title), width=width, first=first, indent=first.cell_len, style="bold")
    lines += paragraph(prose(finding.summary), width=width, indent=2)
    for number, place in enumerate(finding.where[:MAX_PLACES]):
        label = "Where" if number == 0 else ""
        lines += _labelled(label, f"{unbroken(place.name)} ({place_detail(place)})", width, start=2)
    if len(finding.where) > MAX_PLACES:
        lines += _labelled("", f"and {len(finding.where) - MAX_PLACES:,} more", width, start=2)
    lines += _labelled("When", format_steps(finding.steps), width, start=2)
    for number, evidence in enumerate(finding.evidence):
        lines += _labelled("Evidence" if number == 0 else "", format_evidence(evidence), width, start=2)
    certainty = f"{finding.confidence} confidence; {CAN_FIX_WORDS[finding.scale_can_fix]}"
    if finding.severity == "info":
        certainty = f"{finding.confidence} confidence"
    lines += _labelled("Certainty", certainty, width, start=2)
    if finding.remedy:
        lines += _labelled("Do", prose(finding.remedy), width, start=2)
    for number, consequence in enumerate(consequences):
        lines += _labelled("Leads to" if number == 0 else "", consequence_words(consequence), width, start=2)
    lines += _labelled("Read", finding.docs, width, start=2)
    return lines


def recommendation_lines(report: AuditReport, recommendation: Recommendation, *, width: int) -> list[Text]:
    """Settings, predicted effect beside the current one, safe window and reasons; no tables where nothing changes."""
    first = Text.assemble(("Recommendation", "bold"), "  ")
    lines = paragraph(advice(recommendation), width=width, first=first, indent=first.cell_len)
    if recommendation.change_needed and recommendation.precision == "fp16":
        lines += [*table([("setting", "now", "use"), *setting_rows(recommendation)], header=True), Text()]
        effects = [("on this run", "now", "predicted"), *effect_rows(recommendation)]
        lines += [*table(effects, header=True), Text()]
    window = window_words(recommendation.window)
    position = scale_position(recommendation.window, report.run.scale_last)
    lines += _labelled("Safe window", f"{window}; {position}" if position else window, width, start=2)
    for what, name in window_limits(recommendation.window):
        lines += _labelled("", f"{what} {unbroken(name)}", width, start=2)
    for number, reason in enumerate(recommendation.reasons):
        lines += _labelled("Why" if number == 0 else "", prose(reason), width, start=2)
    return lines


def _layers(report: AuditReport, width: int) -> list[Text]:
    worst = worst_layers(report)
    if not worst:
        return []
    about_precision = any(item.name == "sqnr_db" for finding in report.findings for item in finding.evidence)
    if not about_precision:
        lowest = f"lowest SQNR {sqnr_words(worst[0])} in {unbroken(layer_label(worst[0]))} ({worst[0].kind})"
        return [Text(), *_labelled("Layers", f"{plural(len(report.layers), 'tensor')}, {lowest}", width)]
    lines = [Text(), Text("Worst layers", style="bold")]
    note = (
        f"Lowest SQNR first, {len(worst)} of {len(report.layers):,}; SQNR and shares of all sampled elements "
        "at the scale in force"
    )
    lines += paragraph(note, width=width, indent=2, style="dim")
    for layer in worst:
        first = f"  {sqnr_words(layer):>10}  "
        lines += paragraph(
            f"{unbroken(layer_label(layer))} ({layer.kind})", width=width, first=first, indent=len(first)
        )
        lines += paragraph(zone_words(layer), width=width, indent=len(first), style="dim")
        if window := layer_window(layer):
            lines += paragraph(f"safe window {window}", width=width, indent=len(first), style="dim")
    return lines


def _checks(report: AuditReport, width: int) -> list[Text]:
    if not report.checks:
        return []
    unfinished = unfinished_checks(report)
    skipped = [check for check in unfinished if check.status == "skipped"]
    counts = f"{len(passed_checks(report))} passed"
    lines = [
        Text(),
        *_labelled("Checks", f"{counts}, {len(skipped)} had nothing to look at" if skipped else counts, width),
    ]
    for check in unfinished:
        if check.status == "errored":
            lines += _labelled("", f"errored {check.id}: {prose(check.reason)}", width)
    return lines
