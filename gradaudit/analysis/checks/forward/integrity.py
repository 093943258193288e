"""Findings about numbers that went bad outside the forward: in the batch, in buffers and weights, or by divergence."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from gradaudit.analysis.checks.base import Check, Facts, Outcome, Skipped
from gradaudit.analysis.checks.forward.broken_state import nonfinite_buffer, nonfinite_weight
from gradaudit.analysis.checks.forward.divergence import divergence
from gradaudit.analysis.checks.forward.last_step import stopped_by_input
from gradaudit.analysis.op_words import INPUT
from gradaudit.analysis.origin import BAD, badness
from gradaudit.analysis.report import Evidence, Finding, Place
from gradaudit.formats import FP16_DTYPES
from gradaudit.store.tables import OpRow

GIVEN = ("batch", "other")
"""Tensors that a traced forward began with and that are neither parameters nor buffers: the batch, its targets."""

MAY_BE_FP16 = (
    "The tensor is FP16: it came so from the data, or overflowed in a cast or in a frozen model that ran before, "
    "without gradients, and whose operations are not on record."
)


def _nonfinite_input(facts: Facts) -> Outcome:
    steps = facts.analysis.steps
    given, traced = _given(facts), _traced(facts)
    if not (steps.input_finite >= 0).any() and not given:
        return stopped_by_input(facts) or Skipped("no module was called with floating-point inputs")
    hit = np.array([len(ids) > 0 for ids in steps.nonfinite], dtype=bool)
    failed = (steps.loss_finite == 0) | hit
    blamed = np.array([_is_blamed(facts, given.get(int(step), ())) for step in steps.step], dtype=bool) & failed
    whole = np.isin(steps.step, list(traced))
    bad = (steps.input_finite == 0) & ~whole
    unknown = bad & (steps.loss_finite == 0)
    if (blamed & (steps.input_finite != 0)).any():  # what the model itself is not given, as targets are
        unknown = (steps.loss_finite == 0) & ~whole
    if blamed.any():
        return [_finding(facts, np.flatnonzero(blamed | unknown), given)]
    # a traced forward that began with finite numbers: another model's output, or features, went in
    upstream = bool((whole & (steps.input_finite == 0) & failed).any())
    # where it does no harm elsewhere it is there on purpose: -inf in a mask, NaN for what is missing
    on_purpose = bool((bad & ~failed).any())
    if upstream or on_purpose:
        return []
    if not unknown.any():
        return stopped_by_input(facts)
    return [_finding(facts, np.flatnonzero(unknown), given)]


def _traced(facts: Facts) -> set[int]:
    return {row.step for row in facts.ops if row.op == INPUT}


def _given(facts: Facts) -> dict[int, list[OpRow]]:
    """By step, what a traced forward began with that was not finite, in the part of it that was used."""
    used = {(row.step, order) for row in facts.ops if not row.is_finite for order in row.inputs}
    found: dict[int, list[OpRow]] = {}
    for row in facts.ops:
        is_given = row.op == INPUT and row.module_class in GIVEN
        if is_given and not row.is_finite and (row.step, row.order) in used:
            found.setdefault(row.step, []).append(row)
    return found


def _is_blamed(facts: Facts, rows: Sequence[OpRow]) -> bool:
    """NaN and +inf are; -inf only where nothing else of that forward went wrong: masks are made of it."""
    if any(badness(row) == BAD for row in rows):
        return True
    return bool(rows) and not any(birth.row.step == rows[0].step for o in facts.origins() for birth in o.births)


def _finding(facts: Facts, rows: np.ndarray, given: dict[int, list[OpRow]]) -> Finding:
    steps = facts.analysis.steps
    first, last = int(steps.step[rows[0]]), int(steps.step[rows[-1]])
    seen = [row for step in steps.step[rows].tolist() for row in given.get(int(step), ())]
    worst = max(seen, key=badness, default=None)
    held, places = "", [Place("step", str(first))]
    evidence = [Evidence("num_steps", len(rows), f"of {len(steps)} steps", 0)]
    if worst is not None:
        num_inf = worst.num_posinf + worst.num_neginf
        held = (
            f" At step {worst.step} a {worst.dtype} tensor of shape {list(worst.shape)} held {worst.num_nan:,} NaN and "
            f"{num_inf:,} inf before the forward began."
        )
        user = next((row for row in facts.ops if row.step == worst.step and worst.order in row.inputs), None)
        if user is not None and user.file is not None:
            places.append(Place("call_site", user.name, user.file, user.line))
        evidence += [
            Evidence("num_nan", worst.num_nan, f"of {worst.numel} elements", 0),
            Evidence("num_inf", num_inf, f"of {worst.numel} elements", 0),
        ]
    known = bool((steps.input_finite[rows] == 0).all())
    what = "the inputs of the model were not finite, and neither was the loss or a gradient"
    if not known:
        what = (
            "the loss or a gradient was not finite, and the targets or something else made before the forward were not"
        )
    is_half = worst is not None and worst.dtype in FP16_DTYPES
    why = MAY_BE_FP16 if is_half else "Precision has nothing to do with it: FP32 gives NaN as well."
    return Finding(
        id="nonfinite-input",
        severity="error",
        confidence="high" if known and not is_half else "medium",
        title="What the model is given holds NaN or inf already" if is_half else "The batch itself holds NaN or inf",
        summary=f"At {len(rows)} of {len(steps)} steps, the first of them {first}, {what}.{held} {why}",
        scale_can_fix="no",
        where=tuple(places),
        steps=(first, last),
        evidence=tuple(evidence),
        remedy=(
            "Look at what made that tensor: compute it in FP32 or BF16 if it is a model's output, or clean the data."
            if is_half
            else "Look at the data of that step (--save-batch keeps it): drop or repair such samples where they are "
            "loaded, with torch.isfinite(x).all() as the test."
        ),
    )


INTEGRITY: tuple[Check, ...] = (
    Check("nonfinite-input", _nonfinite_input),
    Check("nonfinite-buffer", nonfinite_buffer),
    Check("nonfinite-weight", nonfinite_weight),
    Check("divergence", divergence),
)
