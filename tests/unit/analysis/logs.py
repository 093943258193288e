"""Call-order logs written by hand, and what a check says of a run that holds one."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from gradaudit.analysis.calls import read_calls
from gradaudit.analysis.checks.base import Facts, Skipped
from gradaudit.analysis.checks.calls.order_of_calls import ORDER_OF_CALLS
from gradaudit.analysis.context import analyse
from gradaudit.analysis.report import Finding
from gradaudit.analysis.windows import windows
from gradaudit.store import open_run
from tests import factory
from tests.unit.analysis.runs import tensors

Call = tuple[str, dict[str, Any]]

LOOKS = {check.id: check.look for check in ORDER_OF_CALLS}


def looked(path: Path, name: str, events: Sequence[dict[str, Any]], **run: Any) -> Sequence[Finding] | Skipped:
    steps = run.pop("steps", None) or [factory.step(i, param_amax=[1.0]) for i in range(20)]
    meta = factory.meta(tensors(), **run)
    analysis = analyse(open_run(factory.write_run(path / "run", run_meta=meta, steps=steps, events=list(events))))
    stored = tuple(analysis.run.events())
    return LOOKS[name](Facts(analysis, windows(analysis), (), stored, (), lambda: read_calls(stored)))


def found(path: Path, name: str, events: Sequence[dict[str, Any]], **run: Any) -> Finding:
    outcome = looked(path, name, events, **run)
    assert not isinstance(outcome, Skipped)
    (finding,) = outcome
    return finding


def numbers(finding: Finding) -> dict[str, Any]:
    return {item.name: item.value for item in finding.evidence}


def lines(finding: Finding) -> list[tuple[str, int | None]]:
    return [(place.name, place.line) for place in finding.where if place.type == "call_site"]


def log(*iterations: Sequence[Call]) -> list[dict[str, Any]]:
    """One iteration per step; a call's line is its position in the iteration."""
    rows: list[dict[str, Any]] = []
    for step, calls in enumerate(iterations):
        for line, (name, more) in enumerate(calls):
            given = {"optimizer": 0, "scaler": 0, "optimizers": [0], "scaled": True, "step": step, "line": line, **more}
            if isinstance(given.get("detail"), dict):
                given["detail"] = json.dumps(given["detail"])
            rows.append(factory.event(len(rows), name, **given))
    return rows


ZERO: Call = ("optimizer.zero_grad", {})
BACKWARD: Call = ("backward", {})
UNSCALE: Call = ("scaler.unscale_", {})
STEP: Call = ("scaler.step", {})
UPDATE: Call = ("scaler.update", {})
DIRECT: Call = ("optimizer.step", {})
SCALE: Call = ("scaler.scale", {})
CYCLE = (ZERO, BACKWARD, STEP, UPDATE)


def steps_at(*scales: float, **more: Any) -> list[dict[str, Any]]:
    return [factory.step(i, scale=scale, param_amax=[1.0], **more) for i, scale in enumerate(scales)]


def clip(limit: float | None, norm: float | None = 1e6, **more: Any) -> Call:
    said = {"limit": limit, "limit_is_tensor": limit is None, "norm": norm, "nonfinite_before": False,
            "nonfinite_after": False, **more}  # fmt: skip
    return "clip_grad_norm_", {"detail": said}


def changed(**said: Any) -> Call:
    return "gradients.changed", {
        "detail": {"kind": "in-place", "nonfinite_before": False, "nonfinite_after": False, **said}
    }
