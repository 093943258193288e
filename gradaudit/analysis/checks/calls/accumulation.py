"""Updates of the scale, and divisions by it, in the middle of a step: gradients at different scales come together."""

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
    row_of,
    share,
    stopped,
)
from gradaudit.analysis.observations import Calls, Event, Observation
from gradaudit.analysis.report import Evidence

SAME = 0.01
"""Factors within 1 % are the same: they may have gone through FP16."""

Moved = tuple[Observation, float, float]
"""An update at which the scale moved, from and to."""


def _scales_around(facts: Facts, one: Observation) -> tuple[float | None, float | None]:
    """The scale before an update and at the use of the gradients after it."""
    steps = facts.analysis.steps
    before = np.flatnonzero((steps.step < one.event["step"]) & (steps.scaler == one.scaler))
    after = row_of(facts, one.other, optimizer=one.optimizer, scaler=one.scaler) if one.other is not None else None
    return (
        float(steps.scale[before[-1]]) if len(before) else None,
        None if after is None else float(steps.scale[after]),
    )


def _moved(facts: Facts, seen: Sequence[Observation]) -> list[Moved]:
    around = [(one, *_scales_around(facts, one)) for one in seen]
    return [(one, old, new) for one, old, new in around if old is not None and new is not None and old != new]


def _update_inside_accumulation(facts: Facts) -> Outcome:
    calls = facts.calls()
    if not has_scaler(calls):
        return NO_SCALER
    late = calls.of("backward after unscale_")
    between = [one for one in calls.of("update between") if not one.alone]
    refused = calls.of("update without step")
    if not (late or between or refused):
        return []
    seen = late or between or refused
    moved = _moved(facts, between)
    title, summary = (_added_late if late else _updated_between if between else _updated_alone)(facts, seen, moved)
    return [
        finding_about(
            facts,
            seen,
            id="update-inside-accumulation",
            confidence="high" if late or refused or moved else "medium",
            title=title,
            summary=summary,
            evidence=(
                Evidence("num_steps", len({one.step for one in seen}), "steps"),
                Evidence("num_backward", seen[0].num_backward, "backward calls per step"),
                Evidence("num_scale_changes", len(moved), "times the scale moved in between"),
            ),
            remedy=(
                "Call unscale_, step and update together, once, after the last backward of a step; with several "
                "optimizers step all of them, then update once."
            ),
        )
    ]


def _how_often(facts: Facts, seen: Sequence[Observation]) -> str:
    return share(len({one.step for one in seen}), facts.calls().used.get(seen[0].optimizer or 0, 0))


def _added_late(facts: Facts, seen: Sequence[Observation], moved: Sequence[Moved]) -> tuple[str, str]:
    return (
        "unscale_ is called between the micro-batches of one step",
        f"A scaled backward adds to gradients of {optimizer_class(facts, seen[0].optimizer)} that unscale_ had divided "
        f"by the scale already, in {_how_often(facts, seen)}: the earlier micro-batches count for next to nothing, or "
        "the later ones are applied with the scale on them.",
    )


def _updated_between(facts: Facts, seen: Sequence[Observation], moved: Sequence[Moved]) -> tuple[str, str]:
    effect = "harmless only as long as the scale does not move, which it has not yet"
    if moved:
        effect = f"scaled by {power(moved[0][1])}, they are divided by {power(moved[0][2])}"
    return (
        "scaler.update() is called between backward and the use of the gradients",
        f"scaler.update() runs between the backward of {optimizer_class(facts, seen[0].optimizer)} and the use of its "
        f"gradients, in {_how_often(facts, seen)}: {effect}.",
    )


def _updated_alone(facts: Facts, seen: Sequence[Observation], moved: Sequence[Moved]) -> tuple[str, str]:
    return (
        "scaler.update() is called without a step before it",
        f"scaler.update() was called after {seen[0].num_backward} backward although neither unscale_ nor step had run "
        f"since the last update; it belongs to the step.{stopped(seen[0].event)}",
    )


def _hysteresis_growth(facts: Facts) -> Outcome:
    calls = facts.calls()
    if not has_scaler(calls) and not calls.named.get("gradients.changed"):
        return NO_SCALER
    pairs = [(one, new / old) for one, old, new in _moved(facts, [o for o in calls.of("update between") if o.alone])]
    pairs += _divided_by_the_next_scale(calls)
    if not pairs:
        return []
    ratio = pairs[0][1]
    return [
        finding_about(
            facts,
            [one for one, _ in pairs],
            id="hysteresis-growth-bug",
            severity="info",
            confidence="high" if len(pairs) > 1 else "medium",
            title="The loss scale changes before the gradients are divided by it",
            summary=(
                f"The scale is updated between backward and the division of the gradients: at {len(pairs)} step"
                f"{'s' if len(pairs) > 1 else ''} where it moved (first by {ratio:g}), what was applied is "
                f"1/{ratio:g} of the true gradient."
            ),
            evidence=(Evidence("num_steps", len(pairs), "steps"), Evidence("scale_ratio", ratio)),
            remedy="Divide the gradients by the scale that backward ran at, then update the scale.",
        )
    ]


def _divided_by_the_next_scale(calls: Calls) -> list[tuple[Observation, float]]:
    """Hand-scaled losses whose gradients were divided by the scale of the step after, where that one is another."""
    factors: dict[int, tuple[Event, float]] = {}
    for event in calls.named.get("backward", []):
        factor = number(detail(event).get("factor"))
        if factor:
            factors[int(event["step"])] = (event, factor)
    found = []
    for event in calls.named.get("gradients.changed", []) if factors else []:
        said, now = detail(event), factors.get(int(event["step"]))
        after = factors.get(int(event["step"]) + 1)
        low, high = number(said.get("factor_min")), number(said.get("factor_max"))
        if now is None or after is None or not low or not high or high / low - 1 > SAME:
            continue
        (backward, scale), (_, next_scale) = now, after
        if abs(next_scale / scale - 1) > SAME and abs(low * next_scale - 1) <= SAME:
            seen = Observation("divided late", event, backward, event["optimizer"], event["scaler"])
            found.append((seen, next_scale / scale))
    return found


ACCUMULATION: tuple[Check, ...] = (
    Check("update-inside-accumulation", _update_inside_accumulation),
    Check("hysteresis-growth-bug", _hysteresis_growth),
)
