"""Hand-made AuditReports: what an audit may say, in the shapes that break reporters."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from gradaudit.analysis.report import (
    AuditReport,
    CheckResult,
    Evidence,
    Finding,
    History,
    LayerRow,
    Outlook,
    Place,
    Recommendation,
    RunSummary,
    Verdict,
    Window,
)

HOSTILE = "</style><script>alert('x')</script>\"'&|`*_[a](b)\x1b[31m\u202e\ud800\n# heading"
UNICODE = "\u7de8\u7801\u5668.\u5c42.0.\u03b1\u03b2"


def summary(**more: Any) -> RunSummary:
    values: dict[str, Any] = {
        "num_steps": 400, "num_applied": 396, "num_skipped": 4, "scale_first": 65536.0, "scale_last": 32768.0,
        "world_size": 1, "complete": True, "ended": "ok", "incomplete_because": (), "num_sampled": 40,
        "loss_first": 2.302, "loss_last": 0.4213, "name": "digits", "exception": None,
    }  # fmt: skip
    return RunSummary(**{**values, **more})


def layer(fqn: str, sqnr_db: float | None = 61.0, *, tensor: int = 0, **more: Any) -> LayerRow:
    values: dict[str, Any] = {
        "kind": "output_grad", "zones": zones(zero=0.31, subnormal=0.02, normal=0.67), "own_sqnr_db": sqnr_db,
        "window_low_log2": 6, "window_high_log2": 19, "amax_log2": -3.1, "op": "", "dtype": "float16",
        "num_samples": 40,
    }  # fmt: skip
    return LayerRow(fqn=fqn, sqnr_db=sqnr_db, tensor=tensor, **{**values, **more})


def zones(**shares: float) -> dict[str, float]:
    names = ("zero", "flushed", "subnormal", "normal", "near_max", "overflow", "nan")
    return {name: shares.get(name, 0.0) for name in names}


def recommendation(**more: Any) -> Recommendation:
    values: dict[str, Any] = {
        "change_needed": True, "precision": "fp16", "init_scale": 16384.0, "growth_interval": 500,
        "growth_factor": 2.0, "backoff_factor": 0.5, "min_scale": 1.0,
        "window": Window(8, 15, "blocks.3.mlp.fc1", "head"), "predicted": Outlook(1, 0.0025, 47.0, 0, 3),
        "current": Outlook(4, 0.01, 12.3),
        "reasons": (
            "the safe window is 2^8 to 2^15; the scale in force lies outside it for 310 of 400 steps",
            "at 500 steps between doublings about 0.14 % to 0.20 % of steps are skipped in the long run",
        ),
    }  # fmt: skip
    return Recommendation(**{**values, **more})


def finding(**more: Any) -> Finding:
    values: dict[str, Any] = {
        "id": "gradient-underflow", "severity": "error", "confidence": "high",
        "title": "Gradients of 2 layers are lost below FP16's range",
        "summary": "At the scale in force, 2^4 (16), the gradients of blocks.3.mlp.fc1 keep 12.3 dB of signal over "
                   "rounding noise; 41.2 % of its elements are flushed to zero.",
        "scale_can_fix": "yes",
        "where": (Place("module", "blocks.3.mlp.fc1"), Place("call_site", "backward", "train.py", 41)),
        "steps": (0, 399),
        "evidence": (Evidence("sqnr_db", 12.3, "dB", 40.0), Evidence("flushed_frac", 0.412, "of its elements")),
        "remedy": "Raise the loss scale: init_scale=2**14 keeps every layer above 40 dB.",
    }  # fmt: skip
    return Finding(**{**values, **more})


CHECKS = (
    CheckResult("gradient-underflow", "passed"),
    CheckResult("scale-collapse", "passed"),
    CheckResult("call-order", "passed"),
    CheckResult("rank-divergence", "skipped", "one rank only"),
)


def healthy(**more: Any) -> AuditReport:
    """400 steps, two start-up skips, every layer far above the target."""
    values: dict[str, Any] = {
        "run": summary(num_applied=398, num_skipped=2, scale_last=16384.0),
        "verdict": Verdict("healthy", "Nothing is wrong: 2 skipped steps at the start are normal."),
        "findings": (),
        "checks": CHECKS,
        "recommendation": recommendation(
            change_needed=False, predicted=Outlook(2, 0.005, 61.0), current=Outlook(2, 0.005, 61.0), reasons=()
        ),
        "layers": (layer("stem", 72.0, tensor=0), layer("blocks.0.mlp", 61.0, tensor=1), layer("head", 80.2, tensor=2)),
        "history": History(((0, 65536.0), (1, 32768.0), (2, 16384.0), (399, 16384.0)), (0, 1), ((0, 2.3), (399, 0.4))),
    }  # fmt: skip
    return AuditReport(**{**values, **more})


def underflow() -> AuditReport:
    """The scale is too low: two layers lose their gradient, another scale fixes it."""
    names = ("blocks.0.mlp.fc1", "blocks.1.mlp.fc1", "blocks.2.mlp.fc1", "blocks.3.mlp.fc1")
    lost = zones(zero=0.05, flushed=0.412, subnormal=0.338, normal=0.2)
    layers = tuple(layer(name, 54.9 - 14.2 * i, tensor=i, window_low_log2=4 + 2 * i) for i, name in enumerate(names))
    layers = (*layers[:-1], replace(layers[-1], zones=lost, window_low_log2=8, window_high_log2=18))
    skipped = (90, 180, 270, 360)
    points = [(0, 64.0), (91, 32.0), (181, 16.0), (271, 8.0), (361, 4.0), (399, 4.0)]
    return healthy(
        run=summary(scale_first=64.0, scale_last=4.0),
        verdict=Verdict("failing", "The loss scale is too low: the gradients of blocks.3.mlp.fc1 are mostly noise."),
        findings=(
            finding(id="healthy-overflow", severity="info", title="4 skipped steps are the scaler at work", evidence=(),
                    where=(), scale_can_fix="no", remedy="", summary="A skipped step now and then is normal."),
            finding(),
        ),
        checks=(CheckResult("gradient-underflow", "found"), *CHECKS[1:]),
        recommendation=recommendation(window=Window(8, 15, "blocks.3.mlp.fc1", "head")),
        layers=(*layers, layer("head", 70.0, tensor=4, window_low_log2=-2, window_high_log2=15)),
        history=History(tuple(points), skipped, ((0, 2.3), (399, 0.4))),
    )  # fmt: skip


def empty_window() -> AuditReport:
    """Two branches whose losses lie ten decades apart: no single scale fits both."""
    low, high = "branch_small.head", "branch_large.head"
    return healthy(
        verdict=Verdict("failing", "No single loss scale fits: branch_small.head and branch_large.head conflict."),
        findings=(
            finding(id="empty-window", title="No single loss scale fits two layers", scale_can_fix="no",
                    where=(Place("module", low), Place("module", high)),
                    evidence=(Evidence("low_edge_log2", 13), Evidence("high_edge_log2", 9))),
        ),
        checks=(CheckResult("empty-window", "found"), *CHECKS),
        recommendation=recommendation(precision="fp32-modules", window=Window(13, 9, low, high)),
        layers=(
            layer(low, 9.0, tensor=0, window_low_log2=13, window_high_log2=None,
                  zones=zones(flushed=0.7, subnormal=0.3)),
            layer(high, 64.0, tensor=1, window_low_log2=None, window_high_log2=9,
                  zones=zones(normal=0.9, near_max=0.1)),
        ),
    )  # fmt: skip


def collapse() -> AuditReport:
    """The forward pass gives NaN at every step: the scale falls to nothing and no scale can fix it."""
    points = tuple((i, 65536.0 * 0.5**i) for i in range(60))
    nan = zones(nan=1.0)
    return healthy(
        run=summary(num_steps=60, num_applied=0, num_skipped=60, scale_last=65536.0 * 0.5**59, complete=False,
                    ended="exception", incomplete_because=("12 sampled steps were dropped because the disk was slow",),
                    exception="FloatingPointError: loss is nan", loss_last=float("nan")),
        verdict=Verdict("failing", "Every step is skipped: the forward pass gives NaN, first in encoder.attn."),
        findings=(
            finding(id="scale-collapse", title="The loss scale collapsed", scale_can_fix="no", steps=(0, 59),
                    where=(Place("op", "softmax", "model.py", 88),), remedy="Mask with -1e4 instead of -inf.",
                    evidence=(Evidence("num_skipped", 60, "steps"), Evidence("skip_rate", 1.0, "of attempted steps"))),
            finding(id="call-order", severity="warning", confidence="low", scale_can_fix="partly",
                    title="Gradients were clipped before unscale_", steps=(3, 3), evidence=()),
        ),
        checks=(CheckResult("scale-collapse", "found"), CheckResult("call-order", "errored", "KeyError: 'seq'"),
                CHECKS[3]),
        recommendation=None,
        layers=tuple(layer(f"encoder.{i}", None, tensor=i, zones=nan, amax_log2=None, window_low_log2=None,
                           window_high_log2=None) for i in range(3)),
        history=History(points, tuple(range(60))),
    )  # fmt: skip


def no_steps() -> AuditReport:
    """A run that ended before its first optimizer update."""
    return healthy(
        run=summary(num_steps=0, num_applied=0, num_skipped=0, scale_first=None, scale_last=None, num_sampled=0,
                    loss_first=None, loss_last=None, complete=False, ended="killed"),
        verdict=Verdict("attention", "No optimizer step was recorded."),
        recommendation=None, layers=(), checks=(), history=History(),
    )  # fmt: skip


def one_step() -> AuditReport:
    return healthy(
        run=summary(num_steps=1, num_applied=1, num_skipped=0, num_sampled=1, scale_last=65536.0),
        history=History(((0, 65536.0),), (), ((0, 2.3),)),
    )


def one_tensor() -> AuditReport:
    return replace(underflow(), layers=(layer("fc", 3.0),))


def many_layers() -> AuditReport:
    return replace(underflow(), layers=tuple(layer(f"layers.{i}.mlp", 30.0 + i / 100, tensor=i) for i in range(2000)))


def named(name: str) -> AuditReport:
    """A failing report in which everything that has a name bears this one."""
    report = underflow()
    return replace(
        report,
        run=replace(report.run, name=name, exception=f"RuntimeError: {name}", incomplete_because=(name,)),
        verdict=Verdict("failing", f"The gradients of {name} are lost."),
        findings=(
            finding(title=f"{name} underflows", summary=f"{name}", remedy=f"Look at {name}.",
                    where=(Place("module", name, name, 3),), evidence=(Evidence("culprit", name),)),
        ),
        checks=(CheckResult("call-order", "skipped", name),),
        recommendation=recommendation(window=Window(8, 15, name, name), reasons=(name,)),
        layers=(
            layer(name, 20.0, tensor=0, kind="op_grad", op=name),
            layer(name, 21.0, tensor=1, kind="param_grad", op=name),
        ),
    )  # fmt: skip


def no_scaler() -> AuditReport:
    """A BF16 run: no GradScaler, nothing in FP16."""
    return healthy(
        run=summary(scale_first=None, scale_last=None, num_skipped=0, num_applied=400, world_size=8),
        verdict=Verdict("healthy", "Nothing passed through FP16."),
        recommendation=None,
        layers=(layer("fc", None, dtype="bfloat16", window_low_log2=None, window_high_log2=None),),
        history=History(),
    )


REPORTS = {
    "healthy": healthy(),
    "underflow": underflow(),
    "empty window": empty_window(),
    "collapse": collapse(),
    "no steps": no_steps(),
    "one step": one_step(),
    "one tensor": one_tensor(),
    "many layers": many_layers(),
    "unicode names": named(UNICODE),
    "hostile names": named(HOSTILE),
    "long names": named("encoder." + ".".join(f"stage_{i}" for i in range(20))),
    "no scaler": no_scaler(),
    "no recommendation": replace(underflow(), recommendation=None),
}
