"""Gradients that are finite while their norm is not: clipping by it multiplies them all by zero."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from gradaudit.analysis.checks.base import Facts, Outcome, Skipped
from gradaudit.analysis.checks.calls.call_places import detail, number, optimizers, row_of, share, sites, span, where_is
from gradaudit.analysis.observations import CLIPS, Event
from gradaudit.analysis.report import Evidence, Finding
from gradaudit.formats import FP16, FP16_DTYPES

USES = ("scaler.unscale_", "scaler.step", "optimizer.step")
"""Calls that use gradients; `gradients.changed` is written when one of them begins."""

NEW_GRADIENTS = ("backward", "optimizer.zero_grad", *CLIPS)
"""Calls after which the gradients of a clip before them are no longer what is used."""

SQUARES_OVERFLOW = 256.0
"""From this norm on the sum of squares leaves FP16's range."""


MIN_IN_A_ROW = 3
"""Steps at which nobody drops all gradients on purpose, one after the other."""


@dataclass(frozen=True, slots=True)
class _Zeroed:
    """One time that a norm was infinite; `norm` is the true one where it was measured."""

    event: Event
    norm: float | None


def gradient_norm_overflow(facts: Facts) -> Outcome:
    """An infinite norm of finite gradients."""
    changed = [event for event in facts.events if event["name"] == "gradients.changed"]
    if not changed and not any(event["name"] in CLIPS for event in facts.events):
        return Skipped("no gradient was clipped")
    by_function = [_Zeroed(event, None) for event in _infinite_norms(facts)]
    by_hand = _zeroed_by_hand(facts, changed)
    found = by_function or by_hand
    return [_finding(facts, found, by_hand=not by_function)] if found else []


def _infinite_norms(facts: Facts) -> list[Event]:
    """Clips whose norm was inf although no gradient was."""
    found = []
    for index, event in enumerate(facts.events):
        if event["name"] not in CLIPS or number(detail(event).get("norm")) != math.inf:
            continue
        before = detail(event).get("nonfinite_before")
        if before is False or (before is None and _used_finite(facts, index)):
            found.append(event)
    return found


def _used_finite(facts: Facts, index: int) -> bool:
    """Whether the gradients that a clip left were used, and finite: a norm of inf turns any inf among them into NaN."""
    passed = facts.events[index]["optimizers"]
    for event in facts.events[index + 1 :]:
        if event["name"] in (*USES, *NEW_GRADIENTS) and _concerns(event, passed):
            if event["name"] in NEW_GRADIENTS or event["raised"]:
                return False
            row = row_of(facts, event, optimizer=event["optimizer"])
            return row is not None and _is_finite(facts, row)
    return False


def _concerns(event: Event, passed: Sequence[int] | None) -> bool:
    """Whether a call was about some optimizers' gradients; all may be where a clip got those of none."""
    ids = event["optimizers"] if event["name"] in ("backward", *CLIPS) else [event["optimizer"]]
    return not passed or ids is None or not set(ids).isdisjoint(passed)


def _is_finite(facts: Facts, row: int) -> bool:
    steps = facts.analysis.steps
    return not len(steps.nonfinite[row]) and bool(np.isfinite(steps.param_amax[row]).all())


def _zeroed_by_hand(facts: Facts, changed: Sequence[Event]) -> list[_Zeroed]:
    """Changes by other means that left finite gradients as zeros, where a norm in half explains it."""
    by_optimizer: dict[int, list[tuple[Event, float, float]]] = {}
    for event in changed:
        said = detail(event)
        norm, factor = number(said.get("norm_before")), number(said.get("factor_max"))
        if norm is not None and factor is not None and said.get("nonfinite_before") is False:
            by_optimizer.setdefault(event["optimizer"], []).append((event, norm, factor))
    found = []
    for optimizer, changes in by_optimizer.items():
        zeroed = [(event, norm) for event, norm, factor in changes if factor == 0 and norm >= SQUARES_OVERFLOW]
        kept = [(norm, factor) for _, norm, factor in changes if factor > 0]
        if not zeroed or any(norm >= min(norm for _, norm in zeroed) for norm, _ in kept):
            continue
        # a script may drop gradients on purpose; where smaller ones were clipped, or all are lost, it means to clip
        clips_others = any(factor < 1 for _, factor in kept)
        loses_all = not kept and _without_gap(facts, changed, optimizer)
        if clips_others or loses_all or _has_half_gradients(facts, optimizer):
            found += [_Zeroed(event, norm) for event, norm in zeroed]
    return found


def _without_gap(facts: Facts, changed: Sequence[Event], optimizer: int) -> bool:
    """Whether gradients were changed at every step of an optimizer, from the first change on, and often enough."""
    steps = facts.analysis.steps
    hit = {event["step"] for event in changed if event["optimizer"] == optimizer}
    since = steps.step[(steps.optimizer == optimizer) & (steps.step >= min(hit))]
    return len(hit) >= MIN_IN_A_ROW and hit >= set(since.tolist())


def _has_half_gradients(facts: Facts, optimizer: int) -> bool:
    entries = facts.analysis.run.meta.get("optimizers", [])
    return any(entry["id"] == optimizer and FP16_DTYPES & set(entry.get("param_dtypes", ())) for entry in entries)


def _finding(facts: Facts, zeroed: Sequence[_Zeroed], *, by_hand: bool) -> Finding:
    first = zeroed[0].event
    steps = [int(one.event["step"]) for one in zeroed]
    num_steps = len(set(steps))
    norms = [one.norm for one in zeroed if one.norm is not None]
    limit = number(detail(first).get("limit"))
    what = "A hand-written clip" if by_hand else first["name"]
    measured = f" Measured in FP32 it was {norms[0]:.4g}." if norms else ""
    return Finding(
        id="gradient-norm-overflow",
        severity="error",
        confidence="medium" if by_hand else "high",
        title="The gradients are finite and their norm is infinite",
        summary=(
            f"{what} at {where_is(first)} computed a norm of inf from finite gradients, at "
            f"{share(num_steps, len(facts.analysis.steps))}: a norm taken in FP16 ends at 65,504.{measured} Dividing "
            "by it made every gradient zero, so that these steps trained nothing."
        ),
        scale_can_fix="no",
        where=(*sites(*(one.event for one in zeroed)), *optimizers(facts, [one.event["optimizer"] for one in zeroed])),
        steps=span(facts, steps),
        evidence=(
            Evidence("num_steps", num_steps, f"of {len(facts.analysis.steps)} steps"),
            Evidence("norm", norms[0] if norms else "inf", "in FP32" if norms else "", FP16.max_value),
            *([Evidence("limit", limit)] if limit is not None else []),
        ),
        remedy=(
            "Take the norm in FP32: keep the trained weights, and so their gradients, in FP32 and unscale before "
            "clipping; or copy the gradients to the FP32 masters first, divide by the scale, and clip those."
        ),
    )
