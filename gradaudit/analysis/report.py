"""The one object that everything which shows something takes: an `AuditReport`.

Plain frozen data; `to_dict` gives the versioned JSON form of design section 6. Reporters choose words and layout,
never thresholds.
"""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass
from typing import Any, Literal

REPORT_FORMAT = "gradaudit-report"
REPORT_VERSION = 1

Severity = Literal["error", "warning", "info"]
Confidence = Literal["high", "medium", "low"]
ScaleCanFix = Literal["yes", "partly", "no"]
Level = Literal["healthy", "attention", "failing"]


@dataclass(frozen=True, slots=True)
class Place:
    """Where a finding is: a module, parameter, operation, call site, optimizer, step or rank."""

    type: str
    name: str
    file: str | None = None
    line: int | None = None


@dataclass(frozen=True, slots=True)
class Evidence:
    """One number behind a finding, with its unit and, where one was crossed, the threshold."""

    name: str
    value: float | int | str
    unit: str = ""
    threshold: float | None = None


@dataclass(frozen=True, slots=True)
class Finding:
    """One thing that is wrong (or, as `info`, normal and worth knowing), with what to do about it.

    `consequence_of` is the id of the finding that explains this one: curing that one cures this. None for a root cause.
    """

    id: str
    severity: Severity
    confidence: Confidence
    title: str
    summary: str
    scale_can_fix: ScaleCanFix
    where: tuple[Place, ...]
    steps: tuple[int, int]
    evidence: tuple[Evidence, ...]
    remedy: str
    consequence_of: str | None = None

    @property
    def docs(self) -> str:
        """Where docs/findings.md explains this id."""
        return f"docs/findings.md#{self.id}"


@dataclass(frozen=True, slots=True)
class CheckResult:
    """What became of one check: passed, found, skipped (why) or errored (why)."""

    id: str
    status: Literal["passed", "found", "skipped", "errored"]
    reason: str = ""


@dataclass(frozen=True, slots=True)
class RunSummary:
    """The run in numbers. Steps are attempted optimizer updates."""

    num_steps: int
    num_applied: int
    num_skipped: int
    scale_first: float | None
    scale_last: float | None
    world_size: int
    complete: bool
    ended: str
    incomplete_because: tuple[str, ...]
    num_sampled: int
    loss_first: float | None
    loss_last: float | None
    name: str = ""
    exception: str | None = None


@dataclass(frozen=True, slots=True)
class Verdict:
    """Healthy, attention or failing, in one or two sentences."""

    level: Level
    summary: str


@dataclass(frozen=True, slots=True)
class Window:
    """The scales, as exponents of two, that neither overflow nor harmfully underflow; None where nothing bounds it."""

    low_log2: int | None
    high_log2: int | None
    limited_low_by: str | None
    limited_high_by: str | None

    @property
    def is_empty(self) -> bool:
        """Whether no single scale fits."""
        return self.low_log2 is not None and self.high_log2 is not None and self.low_log2 > self.high_log2


@dataclass(frozen=True, slots=True)
class Outlook:
    """What a setting does (current: measured) or would do (predicted: replayed) on the recorded run.

    `num_skipped` and `skip_rate` are of attempted updates; where the record leaves the count open,
    `num_skipped_low` and `num_skipped_high` bound it. `min_sqnr_db` is the lowest predicted layer SQNR, in dB.
    """

    num_skipped: int
    skip_rate: float
    min_sqnr_db: float | None
    num_skipped_low: int | None = None
    num_skipped_high: int | None = None


@dataclass(frozen=True, slots=True)
class Settings:
    """A GradScaler's settings."""

    init_scale: float
    growth_interval: int
    growth_factor: float
    backoff_factor: float


@dataclass(frozen=True, slots=True)
class Recommendation:
    """Settings to use, with their predicted effect beside the current one's."""

    change_needed: bool
    precision: Literal["fp16", "bf16", "fp32-modules"]
    init_scale: float
    growth_interval: int
    growth_factor: float
    backoff_factor: float
    min_scale: float
    window: Window
    predicted: Outlook
    current: Outlook
    reasons: tuple[str, ...]
    current_settings: Settings | None = None


@dataclass(frozen=True, slots=True)
class LayerRow:
    """One gradient tensor over the run, at the scale in force at each sampled step.

    `zones` are shares of all its elements; `sqnr_db` is the predicted signal to quantisation-noise ratio that 90 % of
    the sampled steps reach, noise inherited from the tensors between it and the loss included, `own_sqnr_db` without
    it; both are None where nothing passed through FP16. `amax_log2` is log2 of the largest unscaled magnitude; `dtype`
    is what the gradient was computed in.
    """

    fqn: str
    kind: str
    zones: dict[str, float]
    sqnr_db: float | None
    own_sqnr_db: float | None
    window_low_log2: int | None
    window_high_log2: int | None
    amax_log2: float | None
    op: str
    dtype: str
    tensor: int
    num_samples: int


@dataclass(frozen=True, slots=True)
class History:
    """The loss scale over the run, small enough to draw.

    `scale_points` are (step, scale) wherever the scale changed, first and last step included; `skipped_steps` every
    skipped step; `loss_points` at most a few hundred (step, unscaled loss), each bucket's largest.
    """

    scale_points: tuple[tuple[int, float], ...] = ()
    skipped_steps: tuple[int, ...] = ()
    loss_points: tuple[tuple[int, float], ...] = ()


@dataclass(frozen=True, slots=True)
class AuditReport:
    """Everything an audit says about one run."""

    run: RunSummary
    verdict: Verdict
    findings: tuple[Finding, ...]
    checks: tuple[CheckResult, ...]
    recommendation: Recommendation | None
    layers: tuple[LayerRow, ...]
    history: History = History()

    def to_dict(self) -> dict[str, Any]:
        """The JSON form: plain types, non-finite floats as the strings "inf", "-inf" and "nan"."""
        body = asdict(self)
        for finding, row in zip(self.findings, body["findings"], strict=True):
            row["docs"] = finding.docs
            row["where"] = [_without_none(place) for place in row["where"]]
            row["evidence"] = [_without_none(item) for item in row["evidence"]]
        plain_body = plain({"format": REPORT_FORMAT, "version": REPORT_VERSION, **body})
        assert isinstance(plain_body, dict)
        return plain_body


def plain(value: Any) -> Any:
    """Nested data as JSON has it: lists for tuples, strings for non-finite floats."""
    if isinstance(value, dict):
        return {key: plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [plain(item) for item in value]
    if isinstance(value, float) and not math.isfinite(value):
        return "nan" if math.isnan(value) else "inf" if value > 0 else "-inf"
    return value


def _without_none(row: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in row.items() if value is not None}
