"""What changed between two audited runs: numbers side by side, findings new, fixed or still there, SQNR per layer."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from typing import Any, Literal

from gradaudit.analysis.report import AuditReport, Finding, LayerRow, Level, Severity

COMPARISON_FORMAT = "gradaudit-comparison"
COMPARISON_VERSION = 1

SEVERITIES: tuple[Severity, ...] = ("error", "warning", "info")


@dataclass(frozen=True, slots=True)
class Side:
    """One run of the two. `skip_rate` is of attempted updates; `min_sqnr_db` the lowest layer's, in dB."""

    name: str
    level: Level
    num_steps: int
    num_skipped: int
    skip_rate: float
    scale_first: float | None
    scale_last: float | None
    scale_min: float | None
    scale_max: float | None
    min_sqnr_db: float | None
    loss_first: float | None
    loss_last: float | None


@dataclass(frozen=True, slots=True)
class FindingChange:
    """One finding id over both runs: new in B, fixed in B, or in both. Severities are the worst of that id."""

    id: str
    status: Literal["new", "fixed", "same"]
    severity_a: Severity | None
    severity_b: Severity | None
    title: str


@dataclass(frozen=True, slots=True)
class LayerChange:
    """One gradient tensor that both runs have, with its SQNR in each, in dB; `change_db` is B minus A."""

    fqn: str
    kind: str
    op: str
    sqnr_db_a: float
    sqnr_db_b: float
    change_db: float


@dataclass(frozen=True, slots=True)
class Comparison:
    """Run A against run B. `layers` come with the largest change first."""

    a: Side
    b: Side
    findings: tuple[FindingChange, ...]
    layers: tuple[LayerChange, ...]
    num_layers_only_a: int
    num_layers_only_b: int

    def to_dict(self) -> dict[str, Any]:
        """Plain data, versioned."""
        return {"format": COMPARISON_FORMAT, "version": COMPARISON_VERSION, **asdict(self)}


def compare(report_a: AuditReport, report_b: AuditReport) -> Comparison:
    """Put two audits side by side.

    Findings are matched by id, layers by (fqn, kind, op); where a module has several operations of one name, the
    first is matched with the first and so on.
    """
    layers_a, layers_b = _by_key(report_a.layers), _by_key(report_b.layers)
    changes = []
    for key in layers_a.keys() & layers_b.keys():
        sqnr_a, sqnr_b = layers_a[key].sqnr_db, layers_b[key].sqnr_db
        if sqnr_a is None or sqnr_b is None or not (math.isfinite(sqnr_a) and math.isfinite(sqnr_b)):
            continue
        fqn, kind, op, _ = key
        changes.append(LayerChange(fqn, kind, op, sqnr_a, sqnr_b, sqnr_b - sqnr_a))
    return Comparison(
        a=_side(report_a),
        b=_side(report_b),
        findings=_findings(report_a.findings, report_b.findings),
        layers=tuple(sorted(changes, key=lambda change: (-abs(change.change_db), change.fqn, change.kind, change.op))),
        num_layers_only_a=len(layers_a.keys() - layers_b.keys()),
        num_layers_only_b=len(layers_b.keys() - layers_a.keys()),
    )


def _side(report: AuditReport) -> Side:
    run = report.run
    scales = [scale for _, scale in report.history.scale_points]
    sqnrs = [layer.sqnr_db for layer in report.layers if layer.sqnr_db is not None and not math.isnan(layer.sqnr_db)]
    return Side(
        name=run.name,
        level=report.verdict.level,
        num_steps=run.num_steps,
        num_skipped=run.num_skipped,
        skip_rate=run.num_skipped / run.num_steps if run.num_steps else 0.0,
        scale_first=run.scale_first,
        scale_last=run.scale_last,
        scale_min=min(scales, default=run.scale_first),
        scale_max=max(scales, default=run.scale_first),
        min_sqnr_db=min(sqnrs, default=None),
        loss_first=run.loss_first,
        loss_last=run.loss_last,
    )


def _findings(findings_a: Iterable[Finding], findings_b: Iterable[Finding]) -> tuple[FindingChange, ...]:
    worst_a, worst_b = _worst_by_id(findings_a), _worst_by_id(findings_b)
    changes = []
    for id in dict.fromkeys((*worst_b, *worst_a)):
        a, b = worst_a.get(id), worst_b.get(id)
        shown = b or a
        assert shown is not None
        status: Literal["new", "fixed", "same"] = "new" if a is None else "fixed" if b is None else "same"
        changes.append(FindingChange(id, status, a.severity if a else None, b.severity if b else None, shown.title))
    order = ("new", "fixed", "same")
    return tuple(sorted(changes, key=lambda change: (order.index(change.status), change.id)))


def _worst_by_id(findings: Iterable[Finding]) -> dict[str, Finding]:
    worst: dict[str, Finding] = {}
    for finding in sorted(findings, key=lambda finding: SEVERITIES.index(finding.severity)):
        worst.setdefault(finding.id, finding)
    return worst


def _by_key(layers: Iterable[LayerRow]) -> dict[tuple[str, str, str, int], LayerRow]:
    seen: Counter[tuple[str, str, str]] = Counter()
    keyed = {}
    for layer in sorted(layers, key=lambda layer: layer.tensor):
        key = (layer.fqn, layer.kind, layer.op)
        keyed[(*key, seen[key])] = layer
        seen[key] += 1
    return keyed
