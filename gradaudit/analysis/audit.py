"""`audit`: a run in, an `AuditReport` out."""

from __future__ import annotations

from collections.abc import Sequence
from fnmatch import fnmatchcase
from functools import cache, partial

import numpy as np

from gradaudit.analysis.calls import read_calls
from gradaudit.analysis.causes import with_causes
from gradaudit.analysis.checks import CHECKS, Check, Facts, Skipped
from gradaudit.analysis.context import Analysis, analyse, fp16_gradients, listed_tensors
from gradaudit.analysis.history import drawable
from gradaudit.analysis.origin import clean_steps, find_origins
from gradaudit.analysis.overflows import unexplained
from gradaudit.analysis.recommend import recommend
from gradaudit.analysis.report import (
    AuditReport,
    CheckResult,
    Finding,
    LayerRow,
    Level,
    RunSummary,
    Verdict,
)
from gradaudit.analysis.windows import Windows, windows
from gradaudit.analysis.zones import ZONES, zone_fractions
from gradaudit.store.reader import Run

CHECK_IDS = tuple(check.id for check in CHECKS)

_EXPLANATIONS = frozenset({"scale-never-grew", "static-scale-unsafe"})
"""Findings about the settings that say why another one happens: that other one leads."""

_RANK = {"error": 0, "warning": 1, "info": 2}
_CONFIDENCE = {"high": 0, "medium": 1, "low": 2}


def audit(run: Run, *, analysis: Analysis | None = None, ignore: Sequence[str] = ()) -> AuditReport:
    """Judge a recorded run.

    Args:
        run: Finished or still being written; without FP16, scaler or steps as well.
        analysis: The run's analysis, if it is at hand.
        ignore: Findings to leave out before the verdict, as ID or ID:GLOB; the glob is matched against the names of
            the finding's places.

    Raises:
        RunCorrupt: A table cannot be read.
    """
    analysis = analyse(run) if analysis is None else analysis
    found_windows = windows(analysis)
    events, ops = tuple(run.events()), run.ops()
    facts = Facts(
        analysis,
        found_windows,
        tuple(unexplained(analysis, history) for history in analysis.histories),
        events,
        ops,
        cache(partial(read_calls, events)),
        cache(partial(find_origins, ops, clean_steps(analysis.steps))),
    )
    findings: list[Finding] = []
    results = []
    for check in CHECKS:
        found, result = _run_check(check, facts)
        findings += found
        results.append(result)
    kept = _ordered([finding for finding in findings if not _is_ignored(finding, ignore)])
    return AuditReport(
        run=summarise(analysis),
        verdict=_verdict(facts, kept),
        findings=tuple(kept),
        checks=tuple(results),
        recommendation=recommend(analysis, found_windows, kept),
        layers=layer_rows(analysis, found_windows),
        history=drawable(analysis.steps),
    )


def _run_check(check: Check, facts: Facts) -> tuple[Sequence[Finding], CheckResult]:
    try:
        outcome = check.look(facts)
    except Exception as error:  # one check that fails costs its own result, not the report
        return [], CheckResult(check.id, "errored", f"{type(error).__name__}: {error}")
    if isinstance(outcome, Skipped):
        return [], CheckResult(check.id, "skipped", outcome.reason)
    return outcome, CheckResult(check.id, "found" if outcome else "passed")


def _ordered(findings: Sequence[Finding]) -> list[Finding]:
    """Root causes by the worst they lead to, each followed by its consequences."""
    findings = with_causes(sorted(findings, key=_urgency))
    led: dict[str, list[Finding]] = {}
    for finding in findings:
        if finding.consequence_of is not None:
            led.setdefault(finding.consequence_of, []).append(finding)
    leads = [finding for finding in findings if finding.consequence_of is None]
    leads.sort(key=lambda lead: min(_RANK[f.severity] for f in (lead, *led.get(lead.id, ()))))
    ordered = []
    for lead in leads:
        ordered += [lead, *led.pop(lead.id, ())]
    return ordered


def _urgency(finding: Finding) -> tuple[int, int, bool, int]:
    rank, confidence = _RANK[finding.severity], _CONFIDENCE[finding.confidence]
    return rank, confidence, finding.id in _EXPLANATIONS, finding.steps[0]


def _is_ignored(finding: Finding, ignore: Sequence[str]) -> bool:
    for pattern in ignore:
        name, _, glob = pattern.partition(":")
        if finding.id == name and (not glob or any(fnmatchcase(place.name, glob) for place in finding.where)):
            return True
    return False


def _verdict(facts: Facts, findings: Sequence[Finding]) -> Verdict:
    analysis = facts.analysis
    alarming = [finding for finding in findings if finding.severity != "info"]
    if alarming:
        level: Level = "failing" if any(finding.severity == "error" for finding in alarming) else "attention"
        lead, *others = alarming
        follow = [finding for finding in others if finding.consequence_of == lead.id]
        num_more = len(others) - len(follow)
        summary = f"{lead.title}. {lead.summary}"
        if follow:
            summary += f" From it follows: {', '.join(finding.id for finding in follow)}."
        if num_more:
            summary += f" {num_more} more finding{'s' if num_more > 1 else ''} below."
        return Verdict(level, summary)
    steps = analysis.steps
    num_steps, num_skipped = len(steps), int(steps.skipped.sum())
    if not num_steps:
        why = "recording failed, see below" if analysis.run.meta.get("errors") else "no optimizer step was recorded"
        return Verdict("healthy", f"Nothing to judge: {why}.")
    if num_skipped == num_steps:
        return Verdict("healthy", f"Nothing to judge yet: all {num_steps} steps were skipped, as a start may.")
    if not analysis.ran_fp16:
        return Verdict("healthy", f"No FP16 gradient in {num_steps} steps, so nothing of FP16 to go wrong.")
    num_unexplained = sum(int(updates.sum()) for updates in facts.unexplained)
    num_left = int((steps.skipped.astype(bool) & (steps.found_inf == 0)).sum())
    skips = f"{num_skipped} of {num_steps} steps were skipped, as the scaler's rule implies"
    if num_left:
        by_rule = f", {num_skipped - num_left} by the scaler's rule" if num_skipped > num_left else ""
        skips = f"{num_left} of {num_steps} attempts were left out by the script itself{by_rule}"
    if num_unexplained:
        why = "because the loss or a gradient was not finite at any scale"
        skips = f"{num_skipped} of {num_steps} steps were skipped, {num_unexplained} of them {why}"
    elif not num_skipped:
        skips = "no step was skipped"
    return Verdict("healthy", f"Healthy: {num_steps} steps, {skips}; every FP16 gradient keeps its precision.")


def summarise(analysis: Analysis) -> RunSummary:
    """The run in numbers."""
    run, steps = analysis.run, analysis.steps
    meta = run.meta
    num_skipped = int(steps.skipped.sum())
    scaled = steps.scale[steps.scaler >= 0]
    because = list(meta.get("errors", []))
    dropped = meta.get("drops", {}).get("sampled_steps", 0)
    if dropped:
        because.append(f"{dropped} sampled steps were dropped because the disk could not keep up")
    if run.ended == "killed":
        because.append("the process was killed; up to the last few seconds are missing")
    if run.ended == "running":
        because.append("the run is still being recorded")
    losses = steps.loss[~np.isnan(steps.loss) | (steps.loss_finite == 0)]
    exception = meta.get("exception")
    return RunSummary(
        num_steps=len(steps),
        num_applied=len(steps) - num_skipped,
        num_skipped=num_skipped,
        scale_first=float(scaled[0]) if len(scaled) else None,
        scale_last=float(scaled[-1]) if len(scaled) else None,
        world_size=int(meta.get("world_size", 1)),
        complete=not because,
        ended=run.ended,
        incomplete_because=tuple(because),
        num_sampled=int(steps.sampled.sum()),
        loss_first=float(losses[0]) if len(losses) else None,
        loss_last=float(losses[-1]) if len(losses) else None,
        name=run.name,
        exception=f"{exception['type']}: {exception['message']}" if exception else None,
    )


def layer_rows(analysis: Analysis, found_windows: Windows) -> tuple[LayerRow, ...]:
    """One row per gradient tensor, at the scale in force, in the order of backward.

    A parameter's FP32 gradient and the FP16 one that autocast computed it in hold the same values: they share a row,
    whose dtype is that of the computation.
    """
    samples, rows = analysis.samples, []
    casts = fp16_gradients(analysis)
    for t in listed_tensors(analysis):
        info = analysis.tensors[t]
        computed = casts.get(t, t)
        mine = analysis.rows_of(t)
        used = mine if len(mine) else analysis.rows_of(t, applied_only=False)
        fractions = zone_fractions(analysis.zones[used].sum(axis=0, keepdims=True))[0]
        with np.errstate(divide="ignore"):
            amax_log2 = np.log2(samples.amax[used]) - analysis.scale_log2[used]
        largest = float(amax_log2.max())
        window = found_windows.tensors.get(computed)
        rows.append(
            (
                float(np.median(samples.order[used])),
                LayerRow(
                    fqn=info.fqn,
                    kind=info.kind,
                    zones=dict(zip(ZONES, (float(f) for f in fractions), strict=True)),
                    sqnr_db=analysis.layer_db(analysis.sqnr_db, t),
                    own_sqnr_db=analysis.layer_db(analysis.own_db, computed),
                    window_low_log2=window.low_log2 if window else None,
                    window_high_log2=window.high_log2 if window else None,
                    amax_log2=largest if np.isfinite(largest) else None,
                    op=info.op,
                    dtype=analysis.tensors[computed].dtype,
                    tensor=t,
                    num_samples=len(used),
                ),
            )
        )
    return tuple(row for _, row in sorted(rows, key=lambda entry: entry[0]))
