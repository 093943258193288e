"""What every reporter shows, chosen and put into words once: facts, rows and orders. Layout is up to each of them."""

from __future__ import annotations

import math

from gradaudit.analysis.report import (
    AuditReport,
    CheckResult,
    Finding,
    LayerRow,
    Recommendation,
    RunSummary,
    Window,
)
from gradaudit.reporters.words import (
    ENDED_WORDS,
    PRECISION_WORDS,
    SEVERITY_ORDER,
    SEVERITY_WORDS,
    UNKNOWN,
    ZONE_WORDS,
    format_db,
    format_log2,
    format_number,
    format_scale,
    format_share,
    format_skipped,
    plural,
    prose,
)

NUM_WORST_LAYERS = 10
"""As many as fit on a screen beside the findings; the JSON form holds all of them."""

MAX_PLACES = 5
"""Places listed per finding: a fault in one layer tends to show in all behind it, and the JSON form has them."""

ZONES_BY_HARM = ("nan", "overflow", "flushed", "subnormal", "near_max", "normal", "zero")


def leading_findings(report: AuditReport) -> list[tuple[Finding, list[Finding]]]:
    """Root causes, those that lead to the worst first, each with the findings that follow from it."""
    leads = [finding for finding in report.findings if finding.consequence_of is None]
    known = {finding.id for finding in leads}
    orphans = [f for f in report.findings if f.consequence_of is not None and f.consequence_of not in known]
    grouped, taken = [], set()
    for lead in [*leads, *orphans]:
        mine = [f for f in report.findings if f.consequence_of == lead.id] if lead.id not in taken else []
        taken.add(lead.id)
        grouped.append((lead, mine))
    return sorted(grouped, key=lambda group: min(SEVERITY_ORDER.index(f.severity) for f in (group[0], *group[1])))


def consequence_words(finding: Finding) -> str:
    """A finding that follows from another, in one line: `scale-collapse (error): The loss scale collapses`."""
    return f"{finding.id} ({SEVERITY_WORDS[finding.severity].lower()}): {prose(finding.title)}"


def run_facts(run: RunSummary) -> list[tuple[str, str]]:
    """The run in numbers, as (label, text)."""
    if run.num_steps == 0:
        facts = [("Steps", "none attempted")]
    else:
        share = format_share(run.num_skipped / run.num_steps)
        facts = [
            ("Steps", f"{run.num_steps:,} attempted: {run.num_applied:,} applied, {run.num_skipped:,} skipped "
                      f"({share} of attempted)"),
            ("Loss scale", _scale_fact(run)),
        ]  # fmt: skip
    if run.loss_first is not None and run.loss_last is not None:
        first, last = format_number(run.loss_first), format_number(run.loss_last)
        facts.append(("Loss", f"{first} first, {last} last (unscaled)"))
    if run.num_steps:
        share = format_share(run.num_sampled / run.num_steps)
        facts.append(("Sampled", f"{plural(run.num_sampled, 'step')} with histograms ({share} of attempted)"))
    if run.world_size > 1:
        facts.append(("Ranks", f"{run.world_size:,}"))
    ended = ENDED_WORDS.get(run.ended, prose(run.ended))
    facts.append(("Ended", f"{ended}: {prose(run.exception)}" if run.exception else ended))
    if run.incomplete_because:
        facts.append(("Incomplete", "; ".join(prose(reason) for reason in run.incomplete_because)))
    elif not run.complete:
        facts.append(("Incomplete", "the record does not cover the whole run"))
    return facts


def _scale_fact(run: RunSummary) -> str:
    if run.scale_first is None or run.scale_last is None:
        return "none: no GradScaler was in use"
    if run.scale_first == run.scale_last:
        return f"{format_scale(run.scale_first)} at the first and at the last step"
    return f"{format_scale(run.scale_first)} at the first step, {format_scale(run.scale_last)} at the last"


def advice(recommendation: Recommendation) -> str:
    """What to do with the settings, in half a sentence."""
    if recommendation.precision != "fp16":
        return PRECISION_WORDS[recommendation.precision]
    return "change the scaler's settings" if recommendation.change_needed else "keep the scaler's settings"


def setting_rows(recommendation: Recommendation) -> list[tuple[str, str, str]]:
    """The scaler settings in force and the ones to use, as (name, now, use)."""
    now = recommendation.current_settings
    return [
        ("init_scale", format_scale(now.init_scale) if now else "-", format_scale(recommendation.init_scale)),
        (
            "growth_interval",
            plural(now.growth_interval, "step") if now else "-",
            plural(recommendation.growth_interval, "step"),
        ),
        (
            "growth_factor",
            format_number(now.growth_factor) if now else "-",
            format_number(recommendation.growth_factor),
        ),
        (
            "backoff_factor",
            format_number(now.backoff_factor) if now else "-",
            format_number(recommendation.backoff_factor),
        ),
        ("min_scale", "-", format_scale(recommendation.min_scale)),
    ]


def effect_rows(recommendation: Recommendation) -> list[tuple[str, str, str]]:
    """What the settings in force did and what the recommended ones would do: (name, now, predicted)."""
    now, predicted = recommendation.current, recommendation.predicted
    return [
        ("skipped steps", format_skipped(now), format_skipped(predicted)),
        ("skip rate", format_share(now.skip_rate), format_share(predicted.skip_rate)),
        ("lowest SQNR", format_db(now.min_sqnr_db), format_db(predicted.min_sqnr_db)),
    ]


def window_words(window: Window) -> str:
    """The scales that fit every tensor, in words."""
    low, high = format_log2(window.low_log2), format_log2(window.high_log2)
    if window.is_empty:
        return f"empty: values are lost below {low}, and overflow begins above {high}"
    if window.low_log2 is None and window.high_log2 is None:
        return "unbounded: no recorded gradient limits it"
    if window.low_log2 is None:
        return f"up to {high}"
    return f"{low} and up" if window.high_log2 is None else f"{low} to {high}"


def scale_position(window: Window, scale: float | None) -> str:
    """Where the last scale in force lies against the window: `the last scale, 2^2 (4), is 6 binades below it`."""
    if scale is None or not math.isfinite(scale) or scale <= 0 or window.is_empty:
        return ""
    exponent = math.log2(scale)
    distance, side = 0.0, "inside it"
    if window.low_log2 is not None and exponent < window.low_log2:
        distance, side = window.low_log2 - exponent, "below it"
    elif window.high_log2 is not None and exponent > window.high_log2:
        distance, side = exponent - window.high_log2, "above it"
    binades = f"{distance:.3g} binade{'' if distance == 1 else 's'} " if distance else ""
    return f"the last scale, {format_scale(scale)}, is {binades}{side}"


def window_limits(window: Window) -> list[tuple[str, str]]:
    """Which tensor sets which edge of the window, as (what, name)."""
    limits = (("low edge set by", window.limited_low_by), ("high edge set by", window.limited_high_by))
    return [(what, name) for what, name in limits if name is not None]


def worst_layers(report: AuditReport, count: int = NUM_WORST_LAYERS) -> list[LayerRow]:
    """Layers by SQNR, lowest first, those full of NaN or inf before all; only where something went through FP16."""
    ranked = sorted(
        ((layer_rank(layer), layer.fqn, layer.tensor, layer) for layer in report.layers), key=lambda item: item[:3]
    )
    return [layer for rank, _, _, layer in ranked if rank < math.inf][:count]


def layer_rank(layer: LayerRow) -> float:
    """The SQNR to sort by, in dB: -inf where only NaN or inf is left, inf where nothing was lost or is known."""
    if layer.sqnr_db is not None and not math.isnan(layer.sqnr_db):
        return layer.sqnr_db
    broken = layer.zones.get("nan", 0.0) + layer.zones.get("overflow", 0.0)
    return -math.inf if broken > 0 or layer.sqnr_db is not None else math.inf


def sqnr_words(layer: LayerRow) -> str:
    """A layer's SQNR, or why it has none."""
    if math.isfinite(layer_rank(layer)):
        return format_db(layer.sqnr_db)
    return "non-finite" if layer_rank(layer) < 0 else UNKNOWN


def zone_shares(layer: LayerRow) -> list[tuple[str, str]]:
    """The zones that hold anything, most harmful first, as (zone, share of the layer's sampled elements)."""
    return [(zone, format_share(layer.zones[zone])) for zone in ZONES_BY_HARM if layer.zones.get(zone, 0.0) > 0]


def zone_words(layer: LayerRow) -> str:
    """`flushed 41.2 %, normal 58.8 %`."""
    return ", ".join(f"{ZONE_WORDS[zone]} {share}" for zone, share in zone_shares(layer)) or "no elements"


def layer_window(layer: LayerRow) -> str:
    """The scales that fit this one tensor, in words; empty where it gives no edge."""
    if layer.window_low_log2 is None and layer.window_high_log2 is None:
        return ""
    return window_words(Window(layer.window_low_log2, layer.window_high_log2, None, None))


def passed_checks(report: AuditReport) -> list[str]:
    """Ids of the checks that looked and found nothing."""
    return [check.id for check in report.checks if check.status == "passed"]


def unfinished_checks(report: AuditReport) -> list[CheckResult]:
    """Checks that could not look: skipped or errored, each with its reason."""
    return [check for check in report.checks if check.status in ("skipped", "errored")]
