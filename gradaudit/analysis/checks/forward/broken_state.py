"""Weights and buffers that hold NaN or inf: which, since when, and what step made them so."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from gradaudit.analysis.checks.base import NUM_NAMED, Facts, Outcome, Skipped, power
from gradaudit.analysis.checks.calls.call_places import span
from gradaudit.analysis.checks.precision.half_weights import is_eps_flushed
from gradaudit.analysis.op_words import INPUT
from gradaudit.analysis.origin import clean_steps
from gradaudit.analysis.report import Evidence, Finding, Place
from gradaudit.formats import FP16_DTYPES
from gradaudit.store.tables import OpRow, Steps

RUNNING = ("running_mean", "running_var")
"""Statistics of a norm: nobody puts inf into these on purpose."""

CAME_WITH = "had been so before the first step: a checkpoint, or the initialisation, brought it"

DIVIDES_TO_INF = 2.0**-128
"""A scale from here down has no finite reciprocal in FP32, by which gradients are unscaled."""


@dataclass(frozen=True, slots=True)
class _Broken:
    """What was non-finite at a look.

    `seen` is the row of the step table at which it was first seen, None if only a traced forward showed it; `clean` the
    last row before at which it was looked at and finite.
    """

    names: tuple[str, ...]
    dtypes: frozenset[str]
    seen: int | None
    clean: int | None
    step: int


def _first_bad(facts: Facts, column: Sequence[np.ndarray | None], *, per_optimizer: bool) -> _Broken | None:
    steps, tensors = facts.analysis.steps, facts.analysis.tensors
    looked = [(row, ids) for row, ids in enumerate(column) if ids is not None]
    for row, ids in looked:
        if not len(ids):
            continue
        same = [
            other
            for other, _ in looked
            if other < row and (not per_optimizer or steps.optimizer[other] == steps.optimizer[row])
        ]
        infos = [tensors[int(i)] for i in ids if int(i) < len(tensors)]
        names, dtypes = tuple(info.fqn for info in infos), frozenset(info.dtype for info in infos)
        return _Broken(names, dtypes, row, same[-1] if same else None, int(steps.step[row]))
    return None


def _given(facts: Facts, source: str) -> _Broken | None:
    """Parameters or buffers that a traced forward began with and that held NaN or +inf, at a step that failed."""
    clean = clean_steps(facts.analysis.steps)
    bad = [row for row in facts.ops if _holds_bad(row, source) and row.step not in clean]
    if not bad:
        return None
    first = [row for row in bad if row.step == bad[0].step]
    names = tuple(dict.fromkeys(row.module for row in first))
    return _Broken(names, frozenset(row.dtype for row in first), None, None, bad[0].step)


def _holds_bad(row: OpRow, source: str) -> bool:
    return row.op == INPUT and row.module_class == source and row.num_nan + row.num_posinf > 0


def _listed(names: Sequence[str]) -> str:
    more = f" and {len(names) - NUM_NAMED} more" if len(names) > NUM_NAMED else ""
    return ", ".join(names[:NUM_NAMED]) + more


def nonfinite_buffer(facts: Facts) -> Outcome:
    """Buffers that were finite at first sight and no longer are, or came with NaN."""
    steps = facts.analysis.steps
    if all(ids is None for ids in steps.buffers_nonfinite) and not facts.ops:
        return Skipped("no buffer was looked at")
    broken = _first_bad(facts, steps.buffers_nonfinite, per_optimizer=False)
    if broken is None:
        given = _given(facts, "buffer")
        return [] if given is None else [_buffer_finding(facts, given, None)]
    assert broken.seen is not None
    start = broken.clean + 1 if broken.clean is not None else 0
    failed = [row for row in range(start, broken.seen + 1) if _has_failed(steps, row)]
    if not failed and not any(name.rpartition(".")[2] in RUNNING for name in broken.names):
        return []  # the script itself filled it anew, as masks are for another length
    return [_buffer_finding(facts, broken, failed[0] if failed else None)]


def _has_failed(steps: Steps, row: int) -> bool:
    return bool(steps.skipped[row]) or steps.loss_finite[row] == 0 or len(steps.nonfinite[row]) > 0


def _buffer_finding(facts: Facts, broken: _Broken, failed: int | None) -> Finding:
    steps = facts.analysis.steps
    owners = list(dict.fromkeys(name.rpartition(".")[0] or name for name in broken.names))
    classes = {info.fqn: info.module for info in facts.analysis.tensors if info.module and info.kind == "output"}
    described = [f"{owner} ({classes[owner]})" if owner in classes else owner for owner in owners]
    first = last = broken.step
    if broken.seen is None:
        when = f"held NaN or inf when the forward of step {broken.step} began, and had so from the start"
    else:
        first = int(steps.step[broken.clean + 1]) if broken.clean is not None else int(steps.step[0])
        when = f"became inf or NaN {'at step' if first == last else f'between steps {first} and'} {last}"
    why = ""
    if failed is not None:
        protected = "was skipped: that protects the weights, and the forward had changed the buffer by then"
        reason = protected if steps.skipped[failed] else "had a loss or gradients that were not finite"
        why = f"; step {int(steps.step[failed])} {reason}"
    return Finding(
        id="nonfinite-buffer",
        severity="error",
        confidence="high" if failed is not None else "medium",
        title="A buffer holds NaN or inf for good, and evaluation will return NaN",
        summary=(
            f"{_listed(broken.names)} of {', '.join(described[:NUM_NAMED])} {when}{why}. Training may look fine, since "
            "batches are normalised by their own statistics; model.eval() uses these."
        ),
        scale_can_fix="no",
        where=tuple(Place("module", owner) for owner in owners[:NUM_NAMED]),
        steps=span(facts, (first, last)),
        evidence=(Evidence("num_buffers", len(broken.names), "buffers that are not finite", 0),),
        remedy=(
            f"Restore them from a checkpoint from before step {first}, or call reset_running_stats() on the module. "
            "Keep what feeds the norm in range: compute it in FP32, or leave batches out that overflow."
        ),
    )


def nonfinite_weight(facts: Facts) -> Outcome:
    """Weights that hold NaN or inf."""
    steps = facts.analysis.steps
    if all(ids is None for ids in steps.weights_nonfinite) and not facts.ops:
        return Skipped("no weight was looked at")
    broken = _first_bad(facts, steps.weights_nonfinite, per_optimizer=True)
    given = _given(facts, "param")
    if broken is None or (given is not None and given.step < broken.step):
        return [] if given is None else [_unowned_finding(facts, given)]
    assert broken.seen is not None
    applied = _applied_before(steps, broken)
    if not applied:
        if not any(_has_failed(steps, row) for row in range(broken.seen, len(steps))):
            return []  # nothing uses them
        return [_weight_finding(facts, broken, None, CAME_WITH)]
    row, how = _how(facts, broken, applied)
    return [_weight_finding(facts, broken, row, how)]


def _unowned_finding(facts: Facts, given: _Broken) -> Finding:
    """About parameters whose optimizer, if they have one, never looked at them: frozen ones, most often."""
    steps = facts.analysis.steps
    earlier = steps.step < given.step
    failed = steps.step[earlier & (steps.loss_finite == 0)]
    start = replace(given, step=int(failed[0]) if len(failed) else given.step)
    if (earlier & (steps.loss_finite == 1)).any():
        how = f"was so when the forward of step {given.step} began; no optimizer changes it, so the script did"
        return _weight_finding(facts, start, None, how)
    return _weight_finding(facts, start, None, f"{CAME_WITH}; no optimizer changes it")


def _applied_before(steps: Steps, broken: _Broken) -> list[int]:
    """Rows of the steps that may have broken weights: applied, by their optimizer, since the last clean look."""
    assert broken.seen is not None
    start, optimizer = broken.clean or 0, steps.optimizer[broken.seen]
    rows = range(start, broken.seen)
    return [row for row in rows if steps.optimizer[row] == optimizer and not steps.skipped[row]]


def _how(facts: Facts, broken: _Broken, applied: Sequence[int]) -> tuple[int, str]:
    """The row of the step that broke weights, as far as the record says, and how."""
    steps = facts.analysis.steps
    assert broken.seen is not None
    for row in applied:
        if len(steps.nonfinite[row]):
            whose = "" if steps.scaler[row] >= 0 else ", with no scaler to skip it"
            return row, f"broke at step {int(steps.step[row])}: the optimizer stepped on non-finite gradients{whose}"
    for row in applied:
        if steps.scaler[row] >= 0 and steps.scale[row] <= DIVIDES_TO_INF:
            scale = power(float(steps.scale[row]))
            return row, f"broke at step {int(steps.step[row])}: its gradients were divided by a scale of {scale}"
    bad_loss = [row for row in range(applied[0], broken.seen + 1) if steps.loss_finite[row] == 0]
    before = [row for row in applied if not bad_loss or row < bad_loss[0]] or [applied[0]]
    row = before[-1]
    at = f"broke {'at' if bad_loss or len(applied) == 1 else 'by'} step {int(steps.step[row])}"
    entries: list[dict[str, Any]] = facts.analysis.run.meta.get("optimizers", [])
    if any(entry["id"] == int(steps.optimizer[row]) and is_eps_flushed(entry) for entry in entries):
        return row, f"{at}, whose gradients were finite: the optimizer divided by an eps that is 0 in FP16"
    if broken.dtypes & FP16_DTYPES:
        return row, f"{at}, whose gradients were finite: the update left the range of these FP16 weights"
    return row, f"{at}, whose gradients were finite: the update itself, or the script, made them so"


def _weight_finding(facts: Facts, broken: _Broken, row: int | None, how: str) -> Finding:
    steps = facts.analysis.steps
    at = broken.step if row is None else int(steps.step[row])
    last = int(steps.step[-1]) if len(steps) else at
    clean = None if broken.clean is None else int(steps.step[broken.clean])
    seen = f" Last seen finite when step {clean} began, first seen broken when step {broken.step} did."
    return Finding(
        id="nonfinite-weight",
        severity="error",
        confidence="high",
        title="Weights hold NaN or inf: whatever comes after is an echo",
        summary=f"{_listed(broken.names)} {how}.{seen if row is not None and clean is not None else ''}",
        scale_can_fix="no",
        where=(*_params(broken.names), Place("step", str(at))),
        steps=span(facts, (at, max(at, last))),
        evidence=(Evidence("num_params", len(broken.names), "parameters that are not finite", 0),),
        remedy=(
            "Load a checkpoint without NaN, and look for NaN before saving one: all(p.isfinite().all() for p in "
            "model.parameters())."
            if row is None
            else f"Go back to a checkpoint from before step {at}, and cure what made that step."
        ),
    )


def _params(names: Iterable[str]) -> tuple[Place, ...]:
    return tuple(Place("param", name) for name in list(names)[:NUM_NAMED])
