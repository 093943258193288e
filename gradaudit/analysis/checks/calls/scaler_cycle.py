"""scale, backward, unscale_, step, update: calls of this cycle that are missing, doubled or out of place."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from gradaudit.analysis.checks.base import NO_SCALER, Check, Facts, Outcome, power
from gradaudit.analysis.checks.calls.call_places import (
    detail,
    finding_about,
    has_scaler,
    number,
    optimizer_class,
    scale_of,
    scaler_of,
    share,
    sites,
    stopped,
    where_is,
)
from gradaudit.analysis.observations import Calls, Event, Observation
from gradaudit.analysis.report import Evidence

SCALE_FREE = frozenset({"Adam", "AdamW", "Adamax", "NAdam", "RAdam", "RMSprop", "Adagrad", "Adadelta", "Rprop", "Lion"})
"""Optimizers whose update hardly depends on the size of the gradients."""

SAME = 0.01
"""A factor within 1 % of the scale is the scale: it may have gone through FP16."""


# step-bypasses-scaler


def _divided_by_hand(facts: Facts, calls: Calls) -> set[int]:
    """Optimizers whose script divides scaled gradients by the scale itself, or may: no number says otherwise."""
    by_hand: dict[int, bool] = {}
    for event in calls.named.get("gradients.changed", []):
        factor = number(detail(event).get("factor_max"))
        scale = scale_of(facts, event, scaler_of(calls, event), optimizer=event["optimizer"])
        divided = factor is None or scale is None or factor * scale <= 1 + SAME
        by_hand[event["optimizer"]] = by_hand.get(event["optimizer"], True) and divided
    return {optimizer for optimizer, divided in by_hand.items() if divided}


def _scaled_by_hand(calls: Calls) -> set[int]:
    """Optimizers whose loss is multiplied by a number that their gradients are divided by again."""
    changes = calls.named.get("gradients.changed", [])
    found = set()
    for event in changes:
        backward, divided = calls.last("backward", event), number(detail(event).get("factor_max"))
        factor = None if backward is None else number(detail(backward).get("factor"))
        if factor and divided and factor != 1.0 and abs(factor * divided - 1) <= SAME:
            found.add(event["optimizer"])
    return found


def _applied_nonfinite(facts: Facts, whose: frozenset[int]) -> list[Event]:
    """Direct steps of some optimizers on non-finite gradients."""
    steps = facts.analysis.steps
    bad = np.array([len(ids) > 0 for ids in steps.nonfinite], dtype=bool)
    rows = np.flatnonzero(bad & ~steps.skipped.astype(bool) & (steps.found_inf == -1))
    at = {(int(steps.optimizer[row]), int(steps.step[row])) for row in rows}
    direct = facts.calls().named.get("optimizer.step", []) if at else []
    return [e for e in direct if e["optimizer"] in whose and (e["optimizer"], e["step"]) in at]


def _step_bypasses_scaler(facts: Facts) -> Outcome:
    calls = facts.calls()
    by_hand = _divided_by_hand(facts, calls) if calls.of("bypass") else set()
    seen = [one for one in calls.of("bypass", "second step") if one.what != "bypass" or one.optimizer not in by_hand]
    broken = _applied_nonfinite(facts, calls.scaled | _scaled_by_hand(calls))
    told = {one.event["seq"] for one in seen}
    seen += [
        Observation("non-finite", event, calls.last("backward", event), event["optimizer"], None)
        for event in broken
        if event["seq"] not in told
    ]
    if not seen:
        return [] if has_scaler(calls) else NO_SCALER
    refused = calls.of("update after bypass")
    kinds = {one.what for one in seen}
    total = calls.used.get(seen[0].optimizer or 0, 0)
    title = "optimizer.step() is called past the GradScaler"
    remedy = "Replace optimizer.step() by scaler.step(optimizer), followed by scaler.update()."
    if "second step" in kinds:
        remedy = "Remove optimizer.step(): scaler.step(optimizer) calls it where the gradients are finite."
    if kinds == {"non-finite"}:
        title = "Non-finite gradients are applied: nobody looks for inf"
        remedy = "Let a GradScaler scale the loss and call scaler.step(optimizer): it leaves such steps out."
    return [
        finding_about(
            facts,
            seen,
            id="step-bypasses-scaler",
            title=title,
            summary=_how_bypassed(facts, seen, total, len(broken)) + "".join(stopped(o.event) for o in refused[:1]),
            evidence=(
                Evidence("num_direct_steps", len(seen), f"of {max(total, len(seen))} steps"),
                Evidence("num_nonfinite_applied", len(broken), "steps"),
            ),
            remedy=remedy,
        )
    ]


def _how_bypassed(facts: Facts, seen: Sequence[Observation], total: int, num_broken: int) -> str:
    first = seen[0]
    name = optimizer_class(facts, first.optimizer)
    num = len({one.step for one in seen if one.what == first.what and one.optimizer == first.optimizer})
    scale = scale_of(facts, first.other, first.scaler) if first.other is not None else None
    said = {
        "bypass": f"optimizer.step() of {name} is called directly on gradients that still carry the loss scale"
        f"{' ' + power(scale) if scale not in (None, 1.0) else ''}, in {share(num, total)}: scaler.step is left out.",
        "second step": f"optimizer.step() of {name} is called once more after scaler.step(): two updates per "
        "iteration, and the second one also where the scaler skipped the first.",
        "non-finite": f"optimizer.step() of {name} is called directly and ran on inf or NaN gradients, in "
        f"{share(num, total)}.",
    }
    summary = said[first.what]
    if name in SCALE_FREE and any(one.what == "bypass" for one in seen):
        summary += f" {name} hardly minds the size, but weight decay, clipping and inf do."
    if num_broken and first.what != "non-finite":
        summary += f" {num_broken} of these steps applied inf or NaN to the weights."
    return summary


# unscaled-backward


def _is_scaled_by_hand(facts: Facts, one: Observation) -> bool:
    factor = number(detail(one.event).get("factor"))
    scale = scale_of(facts, one.other or one.event, one.scaler, optimizer=one.optimizer)
    if scale is None:
        return factor is not None
    return scale == 1.0 or (factor is not None and abs(factor / scale - 1) <= SAME)


def _unscaled_backward(facts: Facts) -> Outcome:
    calls = facts.calls()
    if not has_scaler(calls):
        return NO_SCALER
    plain = [one for one in calls.of("plain backward") if not _is_scaled_by_hand(facts, one)]
    refused = calls.of("no scale")
    seen = plain + refused
    if not seen:
        return []
    first = seen[0]
    assert first.other is not None
    unused = calls.last("scaler.scale", first.event)
    before = calls.last("backward", first.event)
    if unused is not None and (unused["step"] != first.event["step"] or _ran_on(before, unused)):
        unused = None
    name = optimizer_class(facts, first.optimizer if first.optimizer is not None else first.other["optimizer"])
    if plain:
        scale = scale_of(facts, first.other, first.scaler, optimizer=first.optimizer)
        total = calls.used.get(first.optimizer or 0, 0)
        summary = (
            f"backward() ran on a loss that did not go through scaler.scale, yet {first.other['name']} of {name} "
            f"divides its gradients by the scale{' ' + power(scale) if scale else ''}: "
            f"they reach the optimizer that much too small, in {share(len({one.step for one in plain}), total)}."
        )
    else:
        summary = (
            f"{first.other['name']} was called although no loss ever went through scaler.scale: "
            f"{'backward() ran on the plain loss' if first.event['name'] == 'backward' else 'no backward had run'}."
            f"{stopped(first.other)}"
        )
    if unused is not None:
        summary += f" scaler.scale was called at {where_is(unused)}, but backward() did not run on its result."
    lines = [*(sites(one.event) for one in seen), sites(unused), *(sites(one.other) for one in seen)]
    return [
        finding_about(
            facts,
            seen,
            id="unscaled-backward",
            title="backward() runs on an unscaled loss",
            summary=summary,
            where=[place for some in lines for place in some],
            remedy="Call scaler.scale(loss).backward() for every loss whose optimizer steps through the scaler.",
        )
    ]


def _ran_on(backward: Event | None, scale: Event) -> bool:
    """Whether a backward is the one that a call of scaler.scale was for: then the plain one is of another loss."""
    return backward is not None and bool(backward["scaled"]) and backward["seq"] > scale["seq"]


# missing-update and double-unscale


def _missing_update(facts: Facts) -> Outcome:
    calls = facts.calls()
    if not has_scaler(calls):
        return NO_SCALER
    seen = calls.of("no update", "step again")
    if not seen:
        return []
    first, before = seen[0], seen[0].other
    name, updates = optimizer_class(facts, first.optimizer), len(calls.named.get("scaler.update", []))
    at = f" after {before['name']} at {where_is(before)}" if before is not None else ""
    if first.what == "step again":
        summary = f"scaler.step of {name} was called twice for one backward"
    elif before is not None and _is_early(calls, before):
        summary = f"scaler.update() runs before {before['name']} of {name} at {where_is(before)}, and not after it"
    elif updates:
        left_out = f" at step {before['step']}" if before is not None else ""
        times = f"{updates} time{'s' if updates > 1 else ''}"
        summary = f"scaler.update() was left out{left_out}{at}, though it ran {times} before"
    else:
        summary = f"scaler.update() is never called: it belongs{at or ' after scaler.step'}"
    return [
        finding_about(
            facts,
            seen,
            id="missing-update",
            title="scaler.update() is missing",
            summary=f"{summary}.{stopped(first.event, len(seen))}",
            evidence=(Evidence("num_updates", updates, "calls of scaler.update"),),
            remedy=(
                "Call scaler.update() once at the end of every iteration that called unscale_ or scaler.step, also "
                "where the script itself decides not to step."
            ),
        )
    ]


def _is_early(calls: Calls, step: Event) -> bool:
    """Whether the update of a step came between its backward and itself."""
    update, backward = calls.last("scaler.update", step), calls.last("backward", step)
    return update is not None and backward is not None and update["seq"] > backward["seq"]


def _double_unscale(facts: Facts) -> Outcome:
    calls = facts.calls()
    if not has_scaler(calls):
        return NO_SCALER
    seen = calls.of("unscale_ again")
    if not seen:
        return []
    first, before = seen[0], seen[0].other
    name = optimizer_class(facts, first.optimizer)
    at = f" at {where_is(before)}" if before is not None else ""
    if before is not None and before["name"] == "scaler.step":
        summary = f"unscale_ of {name} is called after scaler.step{at}, which had unscaled the gradients"
    elif first.num_backward > 1:
        summary = (
            f"unscale_ of {name} is called after each of {first.num_backward} backward calls of one step (gradient "
            f"accumulation), first{at or ' before'}"
        )
    else:
        summary = f"unscale_ of {name} is called twice in one iteration, first{at or ' before'}"
    return [
        finding_about(
            facts,
            seen,
            id="double-unscale",
            title="unscale_ is called twice on the same gradients",
            summary=f"{summary}.{stopped(first.event, len(seen))}",
            evidence=(Evidence("num_backward", first.num_backward, "backward calls of that step"),),
            remedy="Call unscale_ once per optimizer and step: after the last backward, before clipping and step.",
        )
    ]


SCALER_CYCLE: tuple[Check, ...] = (
    Check("step-bypasses-scaler", _step_bypasses_scaler),
    Check("unscaled-backward", _unscaled_backward),
    Check("missing-update", _missing_update),
    Check("double-unscale", _double_unscale),
)
