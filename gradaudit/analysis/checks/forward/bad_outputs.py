"""Where no forward was traced: the first module output of a sampled step that was not finite."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from gradaudit.analysis.checks.base import Facts
from gradaudit.analysis.checks.forward.forward_places import NO_SCALE_HELPS
from gradaudit.analysis.checks.forward.last_step import stopped_itself
from gradaudit.analysis.origin import clean_steps
from gradaudit.analysis.report import Evidence, Finding, Place
from gradaudit.formats import FP16_DTYPES
from gradaudit.store.tables import TensorInfo


class _First(NamedTuple):
    """The first bad output of a step, and the last good one before it."""

    step: int
    row: int
    info: TensorInfo
    before: TensorInfo | None


def bad_outputs(facts: Facts) -> list[Finding]:
    """The modules whose outputs were the first to be non-finite, as far as modules alone can tell."""
    by_module: dict[str, list[_First]] = {}
    for first in _first_bad(facts):
        by_module.setdefault(first.info.fqn, []).append(first)
    return [_finding(facts, seen) for seen in by_module.values()]


def _first_bad(facts: Facts) -> list[_First]:
    outputs, tensors, steps = facts.analysis.outputs, facts.analysis.tensors, facts.analysis.steps
    clean = clean_steps(facts.analysis.steps)  # there a bad output was a mask, or nothing that mattered
    weights = {
        int(s) for s, ids in zip(steps.step, steps.weights_nonfinite, strict=True) if ids is not None and len(ids)
    }
    inputs = set(steps.step[steps.input_finite == 0].tolist())
    found = []
    bad = (outputs.num_nan + outputs.num_inf) > 0
    for step in np.unique(outputs.step[bad]).tolist():
        if step in clean or step in weights or step in inputs:
            continue
        rows = np.flatnonzero(outputs.step == step)
        if step not in steps.step and not outputs.num_nan[rows].any() and not stopped_itself(facts):
            continue  # no step of training, as far as is known: -inf may be there on purpose
        rows = rows[np.argsort(outputs.order[rows], kind="stable")]
        at = int(np.argmax(bad[rows]))
        before = tensors[outputs.tensor[rows[at - 1]]] if at else None
        found.append(_First(step, int(rows[at]), tensors[outputs.tensor[rows[at]]], before))
    return found


def _finding(facts: Facts, seen: list[_First]) -> Finding:
    outputs, tensors = facts.analysis.outputs, facts.analysis.tensors
    first = seen[0]
    name = f"{first.info.fqn} ({first.info.module})" if first.info.fqn else first.info.module
    inside = {info.fqn for info in tensors if info.kind == "output" and _is_inside(info.fqn, first.info.fqn)}
    after = f", after {first.before.fqn} ({first.before.module})" if first.before is not None else ""
    if inside:
        whence = f"its parts were finite, so its own code made it{after}"
    else:
        whence = f"itself or what its caller gave it made it{after}: the forward of that step could not be traced"
    row = first.row
    num_bad = int(outputs.num_nan[row] + outputs.num_inf[row])
    return Finding(
        id="forward-overflow",
        severity="error",
        confidence="medium",
        title="A module's output is not finite, and no output before it was",
        summary=f"{name} is the first whose output was not finite at step {first.step}; {whence}. {NO_SCALE_HELPS}",
        scale_can_fix="no",
        where=(Place("module", first.info.fqn or first.info.module),),
        steps=(seen[0].step, seen[-1].step),
        evidence=(
            Evidence("num_nonfinite", num_bad, f"of {int(outputs.numel[row])} elements"),
            Evidence("amax", float(outputs.amax[row]), "largest finite"),
        ),
        remedy=(
            "Compute this module in FP32, scale its inputs down, or train in BF16. Record again with --origin always "
            "to see the operation and its line."
            if first.info.dtype in FP16_DTYPES
            else "Its output is not FP16: look at what it computes. Record again with --origin always to see the line."
        ),
    )


def _is_inside(name: str, of: str) -> bool:
    return name != of and (not of or name.startswith(f"{of}."))
