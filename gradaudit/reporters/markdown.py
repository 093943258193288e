"""The report for a pull request or an issue: GitHub's Markdown, in which no layer name can become markup."""

from __future__ import annotations

import re
from collections.abc import Sequence

from gradaudit.analysis.report import AuditReport, Finding, Recommendation
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
    clean,
    format_evidence,
    format_steps,
    layer_label,
    place_detail,
    prose,
)

# an underscore inside a word is no markup in GitHub's Markdown, and init_scale should stay readable unrendered
_MARKUP = re.compile(r"[\\`*\[\]<>|~#$&!]|(?<![A-Za-z0-9])_|_(?![A-Za-z0-9])")


def render(report: AuditReport) -> str:
    """The report in Markdown."""
    blocks = [f"## gradaudit: {LEVEL_WORDS[report.verdict.level]}", escaped(prose(report.verdict.summary))]
    name = [("Run", code(report.run.name))] if report.run.name else []
    blocks.append(
        _table(("Run in numbers", ""), [*name, *((label, escaped(text)) for label, text in run_facts(report.run))])
    )
    if report.findings:
        blocks.append("### Findings")
        for finding, consequences in leading_findings(report):
            blocks += _finding(finding, consequences)
    if report.recommendation is not None:
        blocks += _recommendation(report, report.recommendation)
    blocks += _layers(report)
    blocks += _checks(report)
    return "\n\n".join(blocks) + "\n"


def escaped(text: str) -> str:
    """Text in which every character that Markdown would act on is taken literally."""
    return _MARKUP.sub(lambda match: "\\" + match.group(), text)


def code(name: str) -> str:
    """A name as a code span, whatever it holds; safe inside a table cell."""
    text = clean(name).replace("|", "\\|")
    fence = "`" * (max((len(run) for run in re.findall("`+", text)), default=0) + 1)
    pad = " " if text.startswith("`") or text.endswith("`") else ""
    return f"{fence}{pad}{text}{pad}{fence}"


def _table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = [header, ["---"] * len(header), *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def _finding(finding: Finding, consequences: Sequence[Finding]) -> list[str]:
    items = [f"- Where: {code(place.name)} ({escaped(place_detail(place))})" for place in finding.where[:MAX_PLACES]]
    if len(finding.where) > MAX_PLACES:
        items.append(f"- and {len(finding.where) - MAX_PLACES:,} more places")
    items.append(f"- When: {format_steps(finding.steps)}")
    items += [f"- Evidence: {escaped(format_evidence(evidence))}" for evidence in finding.evidence]
    certainty = f"{finding.confidence} confidence"
    if finding.severity != "info":
        certainty += f"; {CAN_FIX_WORDS[finding.scale_can_fix]}"
    items.append(f"- Certainty: {certainty}")
    if finding.remedy:
        items.append(f"- **Do:** {escaped(prose(finding.remedy))}")
    items += [f"- Leads to: {escaped(consequence_words(consequence))}" for consequence in consequences]
    items.append(f"- Read: `{finding.docs}`")
    title = f"#### {SEVERITY_WORDS[finding.severity]}: {escaped(prose(finding.title))}"
    return [title, escaped(prose(finding.summary)), "\n".join(items)]


def _recommendation(report: AuditReport, recommendation: Recommendation) -> list[str]:
    blocks = ["### Recommendation", f"**{escaped(advice(recommendation))}**"]
    if recommendation.change_needed:
        if recommendation.precision == "fp16":
            rows = [(code(name), now, use) for name, now, use in setting_rows(recommendation)]
            blocks.append(_table(("setting", "now", "use"), rows))
        blocks.append(_table(("on this run", "now", "predicted"), effect_rows(recommendation)))
    window = window_words(recommendation.window)
    position = scale_position(recommendation.window, report.run.scale_last)
    items = [f"- Safe window: {window}; {position}" if position else f"- Safe window: {window}"]
    items += [f"- {what.capitalize()} {code(name)}" for what, name in window_limits(recommendation.window)]
    items += [f"- Why: {escaped(prose(reason))}" for reason in recommendation.reasons]
    return [*blocks, "\n".join(items)]


def _layers(report: AuditReport) -> list[str]:
    worst = worst_layers(report)
    if not worst:
        return []
    count = f"{len(worst)} of {len(report.layers):,}"
    note = f"{count}, lowest SQNR first; shares of all sampled elements at the scale in force."
    rows = [
        (code(layer_label(layer)), code(layer.kind), sqnr_words(layer), zone_words(layer), layer_window(layer))
        for layer in worst
    ]
    return ["### Worst layers", note, _table(("layer", "kind", "SQNR", "zones", "safe window"), rows)]


def _checks(report: AuditReport) -> list[str]:
    if not report.checks:
        return []
    passed = passed_checks(report)
    items = [f"- {len(passed)} passed" + (f": {', '.join(code(name) for name in passed)}" if passed else "")]
    items += [
        f"- {check.status} {code(check.id)}: {escaped(prose(check.reason))}" for check in unfinished_checks(report)
    ]
    return ["### Checks", "\n".join(items)]
