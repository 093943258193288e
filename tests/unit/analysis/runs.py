"""Synthetic runs of a few tensors, for tests of the analysis on one thing at a time."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from gradaudit.analysis.context import Analysis, analyse
from gradaudit.store import open_run
from gradaudit.store.reader import Run
from tests import factory

LOSS, HIDDEN, WEIGHT = 0, 1, 2
"""The gradient of the loss in FP32, of a hidden layer in FP16, and of a weight in FP32 that FP16 made."""


def tensors() -> list[dict[str, Any]]:
    return [
        factory.tensor(LOSS, "loss", "op_grad", dtype="float32", module="", op="Mean"),
        factory.tensor(HIDDEN, "hidden", parents=[LOSS]),
        factory.tensor(WEIGHT, "hidden.weight", "param_grad", dtype="float32", module="", parents=[HIDDEN]),
    ]


def steps(count: int, *, exponent: int = -2, **more: Any) -> list[dict[str, Any]]:
    """Steps at 2^16 whose largest parameter gradient is 1.5 times 2^exponent, unscaled."""
    scale = float(more.get("scale", 65536.0))
    return [factory.step(i, **{"param_amax": [1.5 * 2.0**exponent * scale], **more}) for i in range(count)]


def samples(step: int, exponents: dict[int, int], *, scale: float = 65536.0, **hidden: Any) -> list[dict[str, Any]]:
    """One sampled step: the hidden gradient has these elements per exponent at the recorded scale."""
    return [
        factory.sample(step, LOSS, {0: 4}, scale=scale),
        factory.sample(step, HIDDEN, exponents, scale=scale, **hidden),
        factory.sample(step, WEIGHT, exponents or {0: 1}, scale=scale),
    ]


def run_of(
    path: Path,
    step_rows: list[dict[str, Any]],
    sample_rows: list[dict[str, Any]] | None = None,
    *,
    table: list[dict[str, Any]] | None = None,
    **meta: Any,
) -> Run:
    run_meta = factory.meta(table if table is not None else tensors(), **meta)
    return open_run(factory.write_run(path / "run", run_meta=run_meta, steps=step_rows, samples=sample_rows))


def analysis_of(path: Path, *args: Any, **more: Any) -> Analysis:
    return analyse(run_of(path, *args, **more))


def scaled_steps(scales: list[float], found: set[int], **more: Any) -> list[dict[str, Any]]:
    """One step per scale; those in `found` overflowed and were skipped."""
    rows = []
    for i, scale in enumerate(scales):
        bad = i in found
        amax = [float("inf")] if bad else [1.5 * scale * 2.0**-2]
        rows.append(factory.step(i, scale=scale, found_inf=bad, skipped=bad, param_amax=amax, **more))
    return rows
