"""Traced forwards written by hand, and what a check says of a run that holds one."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from gradaudit.analysis.checks.base import Facts, Skipped
from gradaudit.analysis.checks.forward.forward_values import FORWARD_VALUES
from gradaudit.analysis.context import analyse
from gradaudit.analysis.origin import clean_steps, find_origins
from gradaudit.analysis.overflows import unexplained
from gradaudit.analysis.report import Finding
from gradaudit.analysis.windows import windows
from gradaudit.store import open_run
from gradaudit.store.tables import OpRow
from tests import factory

LOOKS = {check.id: check.look for check in FORWARD_VALUES}

INF: dict[str, Any] = {"num_posinf": 4, "amax": 100.0, "amax_fp32": 80_000.0}
"""A result that left the range."""

LOW: dict[str, Any] = {"num_neginf": 4, "amax": 0.0, "amax_fp32": float("inf")}
"""A result that holds -inf."""

NAN: dict[str, Any] = {"num_nan": 64, "amax": 0.0, "amax_fp32": float("nan")}
FLOWS: dict[str, Any] = {"num_posinf": 4, "amax_fp32": float("inf")}
"""A result that merely received an inf."""

Op = tuple[str, tuple[int, ...], dict[str, Any]]


def made(name: str, *inputs: int, **more: Any) -> Op:
    return name, inputs, more


def param(name: str = "fc.weight") -> Op:
    return made("input", module=name, module_class="param", dtype="float32", amax_fp32=None)


def batch(**more: Any) -> Op:
    return made("input", module="batch", module_class="batch", dtype="float32", amax_fp32=None, **more)


def forward(*ops: Op, step: int = 0, **more: Any) -> list[dict[str, Any]]:
    """Operations in order, each on a line of its own; all but inputs have an autograd node."""
    rows = []
    for order, (name, inputs, own) in enumerate(ops):
        node = None if name == "input" else order
        given = {"step": step, "line": None if name == "input" else order, "sequence": node, **more, **own}
        rows.append(factory.op(order, name, inputs=inputs, **given))
    return rows


def mean_loss(at: int, **more: Any) -> Op:
    """The loss, in FP32."""
    return made("mean.default", at, module="loss", module_class="", dtype="float32", numel=1, shape=[], **more)


def op_rows(rows: Sequence[dict[str, Any]]) -> tuple[OpRow, ...]:
    plain = [{**row, **{key: tuple(row[key]) for key in ("shape", "inputs", "constants")}} for row in rows]
    return tuple(OpRow(**row) for row in plain)


def looked(
    path: Path, name: str, ops: Sequence[dict[str, Any]] = (), *, steps: Sequence[dict[str, Any]] = (), **run: Any
) -> Sequence[Finding] | Skipped:
    """What a check says of a run with these operations; its steps had an infinite loss and were skipped unless said."""
    bad = {"loss": float("inf"), "loss_finite": False, "found_inf": True, "skipped": True}
    rows = list(steps) or [factory.step(step, **bad) for step in sorted({row["step"] for row in ops})]
    tensors, more = run.pop("tensors", []), {key: run.pop(key) for key in ("samples", "events") if key in run}
    meta = factory.meta(tensors, **run)
    stored = open_run(factory.write_run(path / "run", run_meta=meta, steps=rows, ops=list(ops), **more))
    analysis = analyse(stored)
    read = stored.ops()
    origins = find_origins(read, clean_steps(analysis.steps))
    bad_updates = tuple(unexplained(analysis, history) for history in analysis.histories)
    facts = Facts(
        analysis, windows(analysis), bad_updates, tuple(stored.events()), read, origins=lambda: origins
    )  # fmt: skip
    return LOOKS[name](facts)


def found(path: Path, name: str, ops: Sequence[dict[str, Any]] = (), **run: Any) -> Finding:
    outcome = looked(path, name, ops, **run)
    assert not isinstance(outcome, Skipped)
    (finding,) = outcome
    return finding


def lines(finding: Finding) -> list[int | None]:
    return [place.line for place in finding.where if place.type == "call_site"]


def numbers(finding: Finding) -> dict[str, Any]:
    return {item.name: item.value for item in finding.evidence}
