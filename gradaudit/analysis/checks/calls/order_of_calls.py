"""Order of calls: all of the group, and those about who steps, which scaler, and what the schedule does meanwhile."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from gradaudit.analysis.checks.base import NO_SCALER, NUM_NAMED, Check, Facts, Outcome, Skipped, percent, power
from gradaudit.analysis.checks.calls.accumulation import ACCUMULATION
from gradaudit.analysis.checks.calls.call_places import (
    detail,
    has_scaler,
    optimizer_class,
    optimizers,
    scale_of,
    scaler_of,
    sites,
    span,
    stopped,
)
from gradaudit.analysis.checks.calls.clipping import CLIPPING
from gradaudit.analysis.checks.calls.scaler_cycle import SCALER_CYCLE
from gradaudit.analysis.observations import Calls, Event, Observation
from gradaudit.analysis.report import Evidence, Finding, Place

MIN_NEVER_APPLIED = 20
"""Skipped steps in a row from the first on: sixteen bring torch's initial scale down to 1."""

SEARCH_END = 1.0
"""A start that is still coming down is no failure; below 1 no finite gradient of an ordinary loss overflows."""

MIN_AHEAD = 5
"""Schedule steps on skipped updates that are worth a word."""

MIN_AHEAD_SHARE = 0.1
"""Share of the schedule that has to be lost on skipped steps to matter."""


def _scaler_recreated(facts: Facts) -> Outcome:
    calls = facts.calls()
    if not has_scaler(calls):
        return NO_SCALER
    made = {event["scaler"]: event for event in calls.named.get("GradScaler", [])}
    again: list[tuple[int, int, Event]] = []
    for optimizer, handled in calls.scalers.items():
        ids = [scaler for scaler, _ in handled]
        for i, (scaler, used) in enumerate(handled[1:], start=1):
            if scaler in ids[:i] or _is_loaded(calls, scaler, used):
                continue
            if scaler not in made or made[scaler]["seq"] > handled[0][1]["seq"]:
                again.append((optimizer, scaler, used))
    if not again:
        return []
    num = len({scaler for _, scaler, _ in again})
    wasted = sum(_overflows_at_start(facts, scaler) for scaler in {scaler for _, scaler, _ in again})
    first_used = again[0][2]
    lines = [place for _, scaler, used in again for place in sites(made.get(scaler, used))]
    total = calls.used.get(again[0][0], 0)
    return [
        Finding(
            id="scaler-recreated",
            severity="error",
            confidence="high" if num > 1 else "medium",
            title="A new GradScaler is made inside the loop",
            summary=(
                f"The gradients of {optimizer_class(facts, again[0][0])} went through {num + 1} GradScalers one after "
                f"the other in {total} steps: each starts again at its init_scale and forgets what the last one learnt"
                f"{f'; {wasted} steps were skipped for it' if wasted else ''}."
            ),
            scale_can_fix="no",
            where=(*dict.fromkeys(lines), *optimizers(facts, [optimizer for optimizer, _, _ in again])),
            steps=span(facts, [int(first_used["step"]), int(again[-1][2]["step"])]),
            evidence=(
                Evidence("num_scalers", num + 1, "scalers for one optimizer", 1.0),
                Evidence("num_overflows", wasted, "updates right after a new scaler"),
            ),
            remedy="Make one GradScaler before the loop; on resume load its state_dict.",
        )
    ]


def _is_loaded(calls: Calls, scaler: int, used: Event) -> bool:
    loads = calls.named.get("scaler.load_state_dict", [])
    return any(event["scaler"] == scaler and event["seq"] < used["seq"] for event in loads)


def _overflows_at_start(facts: Facts, scaler: int) -> int:
    found = facts.analysis.steps.found_inf[facts.analysis.steps.scaler == scaler] == 1
    return int(np.argmin(found)) if len(found) and not found.all() else len(found)


def _several_scalers(facts: Facts) -> Outcome:
    calls = facts.calls()
    if not has_scaler(calls):
        return NO_SCALER
    seen = calls.of("other scaler")
    places: list[Place] = [place for one in seen for place in (*sites(one.event), *sites(one.other))]
    ids, steps = [one.optimizer for one in seen], [one.step for one in seen]
    for optimizer, handled in calls.scalers.items():
        scalers = [scaler for scaler, _ in handled]
        if len(scalers) > len(set(scalers)):
            ids.append(optimizer)
            steps += [int(event["step"]) for _, event in handled]
            places += [place for _, event in handled for place in sites(event)]
    if not ids:
        return []
    name = optimizer_class(facts, ids[0])
    if seen:
        summary = (
            f"The loss of {name} is scaled by one GradScaler and its gradients are unscaled by another, in "
            f"{len({one.step for one in seen})} steps: they are wrong by the ratio of the two scales."
        )
    else:
        summary = f"Several GradScalers take turns on the gradients of {name}: each sees a part of the overflows."
    return [
        Finding(
            id="several-scalers",
            severity="warning",
            confidence="high",
            title="One optimizer's gradients go through more than one GradScaler",
            summary=summary,
            scale_can_fix="no",
            where=(*dict.fromkeys(places), *optimizers(facts, ids)),
            steps=span(facts, steps),
            evidence=(Evidence("num_steps", len(set(steps)), "steps"),),
            remedy="Use one GradScaler for everything, or one per optimizer with scale, step and update of the same.",
        )
    ]


def _optimizer_without_gradients(facts: Facts) -> Outcome:
    calls = facts.calls()
    if not has_scaler(calls):
        return NO_SCALER
    seen = calls.of("no gradients")
    if not seen:
        return []
    first = seen[0]
    entries = {entry["id"]: entry for entry in facts.analysis.run.meta.get("optimizers", [])}
    params = [int(t) for t in entries.get(first.optimizer, {}).get("params", []) if t is not None and t >= 0]
    names = [facts.analysis.tensors[t].fqn for t in params if t < len(facts.analysis.tensors)]
    reason, remedy = _why_none(first)
    listed = ", ".join(names[:NUM_NAMED]) + (f" and {len(names) - NUM_NAMED} more" if len(names) > NUM_NAMED else "")
    return [
        Finding(
            id="optimizer-without-gradients",
            severity="error",
            confidence="high",
            title="An optimizer steps and none of its parameters has a gradient",
            summary=(
                f"scaler.step of {optimizer_class(facts, first.optimizer)} found no gradient"
                f"{f' for {listed}' if listed else ''}: {reason}.{stopped(first.event)}"
            ),
            scale_can_fix="no",
            where=(
                *sites(first.event, first.other),
                *optimizers(facts, [first.optimizer]),
                *(Place("param", name) for name in names[:NUM_NAMED]),
            ),
            steps=span(facts, [one.step for one in seen]),
            evidence=(
                Evidence("num_params", len(names), "parameters without gradient"),
                Evidence("num_steps", len({one.step for one in seen}), "steps"),
            ),
            remedy=remedy,
        )
    ]


def _why_none(one: Observation) -> tuple[str, str]:
    """Why nothing had a gradient, and what to do."""
    said, other = detail(one.event), one.other
    num = int(said.get("num_params") or 0)
    if other is not None and other["name"] == "optimizer.zero_grad":
        return "zero_grad was called between backward and step", "Call zero_grad before backward, or after step."
    if num and said.get("num_frozen") == num:
        return "all of them are frozen (requires_grad is False)", "Unfreeze them, or drop this optimizer."
    if num and said.get("num_unowned") == num:
        return (
            "no module that ran holds them, so the model was copied or its parameters replaced after the optimizer was "
            "built",
            "Build the optimizer after the model is in its final place (moved, wrapped, copied).",
        )
    if other is None:
        return "no backward ran before", "Call backward before scaler.step."
    if detail(other).get("no_grad_fn"):
        return (
            "the loss of the last backward has no graph (a constant, or computed under no_grad)",
            "Leave the iteration out (no backward, no step) where the loss is a constant.",
        )
    idle = [str(name) for name in said.get("modules_not_run") or ()]
    if num and idle and not said.get("modules_run"):
        return (
            f"their modules never ran in the forward ({', '.join(idle[:NUM_NAMED])})",
            "Use these modules in the forward, or step their optimizer only where they are used.",
        )
    return (
        "the loss of the last backward does not depend on them (a detach, a no_grad, or another network's loss)",
        "Remove the detach or no_grad between these modules and the loss, or step another optimizer on this loss.",
    )


def _never_applied(facts: Facts) -> Outcome:
    steps, calls = facts.analysis.steps, facts.calls()
    handled = np.unique(steps.optimizer[steps.scaler >= 0])
    if not len(handled):
        return NO_SCALER
    found = []
    for optimizer in handled.tolist():
        rows = np.flatnonzero(steps.optimizer == optimizer)
        refused = (steps.found_inf[rows] == 1) & steps.skipped[rows].astype(bool)
        if len(rows) < MIN_NEVER_APPLIED or not refused.all() or _is_searching(steps.scale[rows]):
            continue
        bad: dict[int, int] = {}
        for row in rows:
            for t in steps.nonfinite[row].tolist():
                bad[t] = bad.get(t, 0) + 1
        names = [facts.analysis.tensors[t].fqn for t in sorted(bad, key=lambda t: -bad[t])[:NUM_NAMED]]
        others = int(np.isin(steps.optimizer, [optimizer], invert=True).sum())
        others_applied = int((~steps.skipped.astype(bool) & (steps.optimizer != optimizer)).sum())
        call = next((e for e in calls.named.get("scaler.step", []) if e["optimizer"] == optimizer), None)
        name = optimizer_class(facts, optimizer)
        beside = f"; the other optimizers applied {others_applied} of {others}" if others else ""
        found.append(
            Finding(
                id="never-applied",
                severity="error",
                confidence="high",
                title=f"{name} has never applied a step",
                summary=(
                    f"All {len(rows)} steps of {name} were skipped because a gradient was inf or NaN"
                    f"{' (' + ', '.join(names) + ')' if names else ''}{beside}: its weights are those of the start."
                ),
                scale_can_fix="no",
                where=(*sites(call), *optimizers(facts, [optimizer]), *(Place("param", n) for n in names)),
                steps=(int(steps.step[rows[0]]), int(steps.step[rows[-1]])),
                evidence=(
                    Evidence("num_skipped", len(rows), f"of {len(rows)} steps"),
                    Evidence("scale", float(steps.scale[rows[-1]])),
                ),
                remedy=(
                    "Find where its first non-finite gradient comes from; a smaller scale has been tried already."
                    if steps.scale[rows].min() <= steps.scale[rows[0]] / 2
                    else "Let the GradScaler lower the scale (backoff_factor 0.5): it was held where it started."
                ),
            )
        )
    return found


def _is_searching(scale: np.ndarray) -> bool:
    """Whether the scale is still on its way down from its start, by more than a token amount."""
    fell = bool((np.diff(scale) < 0).all()) and scale[-1] <= scale[0] / 2
    return fell and float(scale[-1]) >= SEARCH_END


def _scheduler_ahead(facts: Facts) -> Outcome:
    calls, steps = facts.calls(), facts.analysis.steps
    if not calls.schedules:
        return Skipped("no learning-rate schedule was stepped")
    rows = steps.skipped.astype(bool)
    skipped = set(zip(steps.optimizer[rows].tolist(), steps.step[rows].tolist(), strict=True))
    for optimizer, advances in calls.schedules.items():
        ahead = [event for event, taken in advances if all((optimizer, step) in skipped for step in taken)]
        lost = len(ahead) / len(advances)
        if len(ahead) < MIN_AHEAD or lost < MIN_AHEAD_SHARE:
            continue
        name = optimizer_class(facts, optimizer)
        return [
            Finding(
                id="scheduler-ahead",
                severity="warning",
                confidence="high",
                title="The learning-rate schedule runs ahead of the steps that were applied",
                summary=(
                    f"lr_scheduler.step advanced {len(ahead)} of {len(advances)} times ({percent(lost)}) on steps of "
                    f"{name} that the scaler had skipped: the schedule is that far ahead of the training."
                ),
                scale_can_fix="no",
                where=(
                    *dict.fromkeys(place for event in ahead for place in sites(event)),
                    *optimizers(facts, [optimizer]),
                ),
                steps=span(facts, [int(ahead[0]["step"]) - 1, int(ahead[-1]["step"]) - 1]),
                evidence=(
                    Evidence("num_ahead", len(ahead), f"of {len(advances)} schedule steps", float(MIN_AHEAD)),
                    Evidence("ahead_share", lost, "of the schedule", MIN_AHEAD_SHARE),
                ),
                remedy=(
                    "Step the schedule only where the step was applied: the scale did not fall in scaler.update(). "
                    "Cure what makes the steps skip first; a start that is too high takes a smaller init_scale."
                ),
            )
        ]
    return []


def _scaled_gradient_penalty(facts: Facts) -> Outcome:
    calls = facts.calls()
    if not has_scaler(calls):
        return NO_SCALER
    bad = [event for event in calls.named.get("penalty", []) if detail(event).get("unscaled") is False]
    scales = [scale_of(facts, event, scaler_of(calls, event)) for event in bad]
    bad = [event for event, scale in zip(bad, scales, strict=True) if scale != 1.0]
    if not bad:
        return []
    scale = next((scale for scale in scales if scale not in (None, 1.0)), None)
    made: Sequence[Event | None] = [calls.last("autograd.grad", bad[0])]
    return [
        Finding(
            id="scaled-gradient-penalty",
            severity="warning",
            confidence="high",
            title="A gradient penalty is computed from scaled gradients",
            summary=(
                "autograd.grad of a scaled loss goes into a further loss without being unscaled: the penalty is "
                f"computed from gradients{f' {power(scale)} times' if scale else ''} too large, and changes with the "
                f"scale (seen at {len(bad)} sampled steps)."
            ),
            scale_can_fix="no",
            where=tuple(dict.fromkeys((*sites(*made), *(p for event in bad for p in sites(event))))),
            steps=span(facts, [int(event["step"]) for event in bad]),
            evidence=(Evidence("num_penalties", len(bad), "losses"), Evidence("scale", scale or 1.0)),
            remedy=(
                "Divide what autograd.grad returns by scaler.get_scale() before the penalty is formed from it, then "
                "scale the whole loss once."
            ),
        )
    ]


ORDER_OF_CALLS: tuple[Check, ...] = (
    *CLIPPING,
    *SCALER_CYCLE,
    *ACCUMULATION,
    Check("scaler-recreated", _scaler_recreated),
    Check("several-scalers", _several_scalers),
    Check("optimizer-without-gradients", _optimizer_without_gradients),
    Check("never-applied", _never_applied),
    Check("scheduler-ahead", _scheduler_ahead),
    Check("scaled-gradient-penalty", _scaled_gradient_penalty),
)
