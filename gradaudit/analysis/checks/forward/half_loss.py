"""The loss in FP16: made by a criterion there, times something, or times the loss scale."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from gradaudit.analysis.checks.base import NUM_NAMED, Facts, Outcome, Skipped, power
from gradaudit.analysis.checks.forward.birth_ids import identify
from gradaudit.analysis.checks.forward.forward_places import (
    NO_SCALE_HELPS,
    against_limit,
    line_of,
    magnitude,
    magnitude_evidence,
    op_places,
    sentence,
    span,
    what,
)
from gradaudit.analysis.op_words import CRITERIA, REDUCTIONS, in_loss, is_half
from gradaudit.analysis.origin import Origin
from gradaudit.analysis.report import Evidence, Finding, Place
from gradaudit.formats import FP16
from gradaudit.store.tables import OpRow

REMEDY = "Put .float() on the predictions before the loss, or on the loss before scaler.scale."

TITLE = "The loss is computed in FP16"


def loss_in_half(facts: Facts) -> Outcome:
    """The loss left FP16's range, alone or times the scale, or a criterion ran in FP16 outside autocast."""
    scaled = _scaled_overflows(facts)
    if not facts.ops and not len(scaled):
        return Skipped("neither an operation of a forward nor a scaled loss in FP16 was seen")
    found = [_scaled(facts, scaled)] if len(scaled) else []
    made_by_scale = set(facts.analysis.steps.step[scaled].tolist())
    origins = [origin for origin in facts.origins() if identify(origin.first) == "loss-in-half"]
    found += [_overflow(facts, o) for o in origins if not _is_scaling(o, made_by_scale)]
    told = {(place.file, place.line) for finding in found for place in finding.where if place.file}
    plain = [row for row in _criteria(facts) if (row.file, row.line) not in told]
    return [*found, _criterion(facts, plain)] if plain else found


def _scaled_overflows(facts: Facts) -> np.ndarray:
    steps = facts.analysis.steps
    return np.flatnonzero((steps.scaled_loss_finite == 0) & (steps.loss_finite != 0))


def _is_scaling(origin: Origin, steps: set[int]) -> bool:
    return origin.row.name == "mul" and origin.row.numel == 1 and all(b.row.step in steps for b in origin.births)


def _scaled(facts: Facts, rows: np.ndarray) -> Finding:
    steps = facts.analysis.steps
    first = int(rows[0])
    loss, scale = float(steps.loss[first]), float(steps.scale[first])
    call = _scale_call(facts, int(steps.step[first]))
    product = abs(loss) * scale
    size = f": {magnitude(abs(loss))} times {power(scale)} is {against_limit(product)}" if np.isfinite(product) else ""
    where = [Place("op", "mul in loss")]
    if call is not None and call["file"]:
        where.insert(0, Place("call_site", "scaler.scale", call["file"], call["line"]))
    return Finding(
        id="loss-in-half",
        severity="error",
        confidence="high",
        title="The scaled loss overflows because the loss is FP16",
        summary=(
            f"The loss was finite and scaler.scale made inf of it in {len(rows)} step(s){size}. A 0-dimensional FP16 "
            "loss becomes FP32 when it is scaled; one with a dimension stays FP16. A smaller scale only hides it until "
            "the scale grows again."
        ),
        scale_can_fix="no",
        where=tuple(where),
        steps=(int(steps.step[first]), int(steps.step[rows[-1]])),
        evidence=(
            Evidence("loss", loss, "in FP16"),
            Evidence("scale", scale, ""),
            Evidence("scaled_loss", product, "in FP32", FP16.max_value),
        ),
        remedy=REMEDY,
    )


def _scale_call(facts: Facts, step: int) -> dict[str, Any] | None:
    calls = [event for event in facts.events if event["name"] == "scaler.scale"]
    before = [event for event in calls if event["step"] <= step]
    return before[-1] if before else calls[0] if calls else None


def _overflow(facts: Facts, origin: Origin) -> Finding:
    row = origin.row
    size = f": {against_limit(row.amax_fp32)}" if row.amax_fp32 is not None else " and is inf"
    return Finding(
        id="loss-in-half",
        severity="error",
        confidence="high" if row.amax_fp32 is not None else "medium",
        title="The loss is computed in FP16 and leaves its range",
        summary=f"{sentence(what(row))} makes the loss go out of range{size}. {NO_SCALE_HELPS}",
        scale_can_fix="no",
        where=op_places(row, origin.modules),
        steps=span(facts, *origin.steps),
        evidence=magnitude_evidence(origin),
        remedy=REMEDY,
    )


def _criteria(facts: Facts) -> list[OpRow]:
    """Operations of criteria that ran in FP16 outside autocast, each line once."""
    found: dict[tuple[object, ...], OpRow] = {}
    for row in facts.ops:
        if is_half(row) and not row.autocast and row.sequence is not None and _is_criterion(row):
            found.setdefault((row.file, row.line) if row.file else (row.module, row.name), row)
    return list(found.values())


def _is_criterion(row: OpRow) -> bool:
    if row.name in CRITERIA or row.module_class.endswith(("Loss", "Criterion")):
        return True
    return in_loss(row) and (row.name == "log_softmax" or (row.name in REDUCTIONS and row.numel == 1))


def _criterion(facts: Facts, rows: Sequence[OpRow]) -> Finding:
    first = rows[0]
    lines = ", ".join(dict.fromkeys(line_of(row) for row in rows[1:NUM_NAMED] if row.file))
    places = dict.fromkeys(place for row in rows[:NUM_NAMED] for place in op_places(row))
    return Finding(
        id="loss-in-half",
        severity="error",
        confidence="high",
        title=TITLE,
        summary=(
            f"{sentence(what(first))}, ran in FP16 outside autocast{f'; also {lines}' if lines else ''}. Inside "
            "autocast torch computes a criterion in FP32; here its sums and squares keep 11 bits and end at 65,504."
        ),
        scale_can_fix="no",
        where=tuple(places),
        steps=span(facts, first.step, max(row.step for row in rows)),
        evidence=(Evidence("num_ops", len(rows), "operations of the loss in FP16"),),
        remedy=REMEDY,
    )
