"""Clipping of gradients that still carry the loss scale: by torch's functions, or by hand.

A limit c at scale S acts as c / S on the gradients themselves. Whether that was meant shows in the numbers: a limit
that moves with the scale was multiplied by it on purpose, one that stays where it is was not; with a scale that never
moves, the one of c and c / S that is nearer to 1 is the one somebody chose.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from gradaudit.analysis.checks.base import NO_SCALER, Check, Facts, Outcome, power
from gradaudit.analysis.checks.calls.call_places import (
    detail,
    has_scaler,
    number,
    optimizer_class,
    optimizers,
    scale_of,
    scaler_of,
    share,
    site,
    sites,
    span,
)
from gradaudit.analysis.observations import CLIPS, Calls, Event
from gradaudit.analysis.report import Evidence, Finding, Place

SAME_NUMBER = 1e-3
"""Relative spread within which numbers that went through FP16 or FP32 count as the same."""

HELD = 0.02
"""Relative spread of what a clip leaves: its limit, but for rounding and the epsilon in its denominator."""

CALMER = 0.1
"""A clip takes at least this much of the spread away; what is steady before and after was not cut to a limit."""

BITES = 0.99
"""A factor below this cut something off; above, it is the 1 of a clip whose limit was not reached."""

MIN_HELD_PARAMS = 3
"""Two gradients may be equal because one is the sum of what the other is; not all of several layers."""

MIN_HELD_STEPS = 5
"""Steps after which magnitudes that never change are no accident."""

TIE_DECADES = 1.0
"""Nearer than a decade the two readings of a limit do not differ enough to tell which one was meant."""


@dataclass(frozen=True, slots=True)
class Clip:
    """One time that scaled gradients were clipped.

    `limit` is None where it was a tensor or is unknown; `hid` whether an inf or NaN was gone afterwards; `asked`
    whether the scale was read just before; `belongs` the unscale_ that came too late, or the call it belongs after;
    `scaler` whether a GradScaler had scaled the loss, and not the script.
    """

    event: Event
    optimizer: int
    limit: float | None
    scale: float
    hid: bool
    asked: bool
    belongs: Event | None
    scaler: bool = True


def on_purpose(limits: Sequence[float], scales: Sequence[float], *, asked: bool) -> bool:
    """Whether limits were multiplied by the scale by someone who knew that the gradients carry it.

    Args:
        limits: One per clip, finite and positive.
        scales: The scale at each.
        asked: Whether the script read the scale before clipping.
    """
    limit, scale = np.array(limits, dtype=np.float64), np.array(scales, dtype=np.float64)
    if _spread(scale) > SAME_NUMBER:
        if _spread(limit / scale) <= SAME_NUMBER:
            return True
        if _spread(limit) <= SAME_NUMBER:
            return False
    as_given = abs(math.log10(float(np.median(limit))))
    as_acting = abs(math.log10(float(np.median(limit / scale))))
    return as_given >= as_acting - (TIE_DECADES if asked else 0.0)


def _spread(values: np.ndarray) -> float:
    """Largest over smallest, less one."""
    return float(values.max() / values.min()) - 1.0


def clips_by_function(facts: Facts, calls: Calls) -> list[Clip]:
    """Calls of torch's clip functions on scaled gradients that had an effect."""
    found = []
    for seen in calls.of("clip"):
        assert seen.optimizer is not None
        said = detail(seen.event)
        limit, norm = number(said.get("limit")), number(said.get("norm"))
        scale = scale_of(facts, seen.event, seen.scaler, optimizer=seen.optimizer)
        reached = norm is None or limit is None or not norm <= limit
        hid = bool(said.get("nonfinite_before")) and said.get("nonfinite_after") is False
        if scale is not None and scale not in (0.0, 1.0) and (reached or hid):
            found.append(Clip(seen.event, seen.optimizer, limit, scale, hid, seen.asked_scale, seen.other))
    return found


def clips_by_hand(facts: Facts, calls: Calls) -> list[Clip]:
    """Changes of scaled gradients by other means that leave the same norm or maximum every time, or hide an inf.

    One factor for all gradients that leaves neither is an average over samples, micro-batches or ranks.
    """
    by_optimizer: dict[int, list[tuple[Event, dict[str, float], bool]]] = {}
    for event in calls.named.get("gradients.changed", []):
        said = detail(event)
        numbers = {key: value for key in said if (value := number(said[key])) is not None}
        hid = bool(said.get("nonfinite_before")) and said.get("nonfinite_after") is False
        if event["scaled"] and (hid or {"factor_min", "factor_max"} <= numbers.keys()):
            by_optimizer.setdefault(event["optimizer"], []).append((event, numbers, hid))
    direct = {(event["optimizer"], event["step"]) for event in calls.named.get("optimizer.step", [])}
    found = []
    for optimizer, changes in by_optimizer.items():
        limit = _limit_of([numbers for _, numbers, hid in changes if not hid and _is_cut(numbers)])
        for event, numbers, hid in changes:
            scale = scale_of(facts, event, scaler_of(calls, event), optimizer=optimizer)
            divided = scale is not None and numbers.get("factor_max", math.inf) * scale <= 1 + HELD
            if divided and (optimizer, event["step"]) in direct:
                continue  # the script unscales, clips and steps by itself
            if scale not in (None, 0.0, 1.0) and (hid or (limit is not None and _is_cut(numbers))):
                assert scale is not None
                belongs = calls.last("backward", event)
                found.append(Clip(event, optimizer, limit, scale, hid, False, belongs))
    return found


def clips_of_hand_scaled(calls: Calls) -> list[Clip]:
    """Calls of torch's clip functions on gradients of a loss multiplied by hand, divided by that only later."""
    found = []
    for event in (event for name in CLIPS for event in calls.named.get(name, [])):
        backward = calls.last("backward", event)
        factor = None if backward is None or backward["scaled"] else number(detail(backward).get("factor"))
        if factor is None or factor in (0.0, 1.0) or event["raised"]:
            continue
        said = detail(event)
        limit, norm = number(said.get("limit")), number(said.get("norm"))
        divided = _divided_after(calls, event, factor)
        if divided is not None and (norm is None or limit is None or norm > limit):
            found.append(Clip(event, divided["optimizer"], limit, factor, False, False, divided, scaler=False))
    measured = {clip.optimizer for clip in found if clip.belongs and number(detail(clip.belongs).get("factor_max"))}
    copied = {clip.optimizer for clip in found if clip.event["optimizers"] is None}
    return [clip for clip in found if clip.optimizer in measured | copied]


def _divided_after(calls: Calls, clip: Event, factor: float) -> Event | None:
    """The change between a clip and the next backward that divided by a loss's factor, or may have: not all are
    measured."""
    backward = calls.next("backward", clip)
    event = calls.next("gradients.changed", clip)
    while event is not None and (backward is None or event["seq"] < backward["seq"]):
        # a copy to FP32 masters is another optimizer's gradients than those that were clipped
        ours = event["optimizer"] in clip["optimizers"] if clip["optimizers"] else detail(event)["kind"] == "replaced"
        low, high = number(detail(event).get("factor_min")), number(detail(event).get("factor_max"))
        if ours and (low is None or high is None or max(abs(low * factor - 1), abs(high * factor - 1)) <= HELD):
            return event
        event = calls.next("gradients.changed", event)
    return None


def clips_in_hooks(facts: Facts, calls: Calls) -> list[Clip]:
    """Scaled gradients that come out of backward with one and the same largest magnitude: clamped by hooks of tensors.

    Nothing is called between backward and step then, so that only what it leaves shows: the limit, to the last bit, in
    all parameters, step after step.
    """
    steps, found = facts.analysis.steps, []
    known = {event["optimizer"] for event in calls.named.get("gradients.changed", [])}
    known |= {one for name in CLIPS for event in calls.named.get(name, []) for one in event["optimizers"] or ()}
    for entry in facts.analysis.run.meta.get("optimizers", []):
        rows, amax = steps.param_matrix(entry["id"])
        if entry["id"] in known or amax.shape[1] < MIN_HELD_PARAMS:
            continue
        limits = _held_in_all(amax)
        held = limits > 0
        scaled = (steps.scaler[rows] >= 0) & np.isfinite(amax).all(axis=1)
        if not len(rows) or held[scaled].sum() < max(MIN_HELD_STEPS, BITES * scaled.sum()) or np.ptp(limits[held]) > 0:
            continue
        at = set(steps.step[rows[held & scaled]].tolist())
        for event in calls.named.get("scaler.step", []):
            backward = calls.last("backward", event)
            if event["optimizer"] != entry["id"] or event["step"] not in at or backward is None:
                continue
            asked, scaled_at = calls.last("scaler.get_scale", event), calls.last("scaler.scale", event)
            if asked is not None and scaled_at is not None and asked["seq"] > scaled_at["seq"]:
                continue  # the hook, or what follows, knows of the scale
            scale = scale_of(facts, event, event["scaler"], optimizer=entry["id"])
            if scale not in (None, 0.0, 1.0):
                assert scale is not None
                hook = (entry.get("gradient_hooks") or [{"file": None, "line": None}])[0]
                clip = {**backward, "name": "gradients.changed", "file": hook["file"], "line": hook["line"]}
                found.append(Clip(clip, entry["id"], float(limits[held][0]), scale, False, False, backward))
    return found


def _held_in_all(amax: np.ndarray) -> np.ndarray:
    """Per step the magnitude that all its gradients share, 0 where they do not; those that are zero set aside."""
    some = np.isfinite(amax) & (amax > 0)
    largest = np.where(some, amax, 0.0).max(axis=1)
    shared = (some.sum(axis=1) >= MIN_HELD_PARAMS) & (np.where(some, amax, largest[:, None]) == largest[:, None]).all(
        axis=1
    )
    return np.where(shared, largest, 0.0)


def _is_cut(numbers: dict[str, float]) -> bool:
    """Whether finite gradients were made smaller, and not all to nothing."""
    return 0 < numbers["factor_min"] < BITES and math.isfinite(numbers.get("norm_before", math.nan))


def _limit_of(changes: Sequence[dict[str, float]]) -> float | None:
    """The limit that gradients were cut to by hand, from at least two changes; None if it was something else."""
    factors = np.array([[c["factor_min"], c["factor_max"]] for c in changes]).reshape(-1, 2)
    if len(factors) < 2 or (factors[:, 1] > 1 + SAME_NUMBER).any():
        return None
    if _spread(factors[:, 0]) <= SAME_NUMBER and _spread(factors[:, 1]) <= SAME_NUMBER:
        return None  # the same factor at every step
    held: list[tuple[float, float]] = []
    for measure in (
        "amax",
        "norm",
    ):  # where a clamp held every element the norm is held too: the first of equals counts
        before = np.array([c.get(f"{measure}_before", math.nan) for c in changes])
        after = np.array([c.get(f"{measure}_after", math.nan) for c in changes])
        known = bool(np.isfinite(before + after).all() and (before > 0).all() and (after > 0).all())
        if known and _spread(after) <= min(HELD, CALMER * _spread(before)):
            held.append((round(_spread(after) / SAME_NUMBER), float(np.median(after))))
    return min(held, key=lambda found: found[0])[1] if held else None


def _clip_before_unscale(facts: Facts) -> Outcome:
    calls = facts.calls()
    hand_scaled = clips_of_hand_scaled(calls)
    if not has_scaler(calls) and not hand_scaled:
        return NO_SCALER
    faulty: list[Clip] = []
    groups: dict[tuple[int, str], list[Clip]] = {}
    for clip in (
        *clips_by_function(facts, calls),
        *clips_by_hand(facts, calls),
        *clips_in_hooks(facts, calls),
        *hand_scaled,
    ):
        groups.setdefault((clip.optimizer, clip.event["name"]), []).append(clip)
    for clips in groups.values():
        sized = [c for c in clips if c.limit is not None and 0 < c.limit < math.inf]
        asked = all(c.asked for c in sized)
        if sized and not on_purpose([c.limit or 1.0 for c in sized], [c.scale for c in sized], asked=asked):
            faulty += clips
        else:
            faulty += [replace(clip, limit=None) for clip in clips if clip.hid]
    if not faulty:
        return []
    faulty.sort(key=lambda clip: int(clip.event["seq"]))
    return [_finding(facts, calls, faulty)]


def _lines(faulty: Sequence[Clip]) -> list[Place]:
    """Where gradients were clipped, and the call that should have come before."""
    lines = [site(clip.event, "p.grad changed" if clip.event["name"] not in CLIPS else None) for clip in faulty]
    # the line of a change by hand is looked for only once one has been seen
    lines = [place for place in lines if place.file] or lines
    lines += [place for clip in faulty for place in sites(clip.belongs) if clip.scaler or place.file]
    return list(dict.fromkeys(lines))


def _finding(facts: Facts, calls: Calls, faulty: Sequence[Clip]) -> Finding:
    first = next((clip for clip in faulty if clip.limit is not None), faulty[0])
    hid = [clip for clip in faulty if clip.hid]
    ids = list(dict.fromkeys(clip.optimizer for clip in faulty))
    steps = sorted({int(clip.event["step"]) for clip in faulty})
    total = sum(calls.used.get(optimizer, 0) for optimizer in ids)
    by_hand = first.event["name"] not in CLIPS
    evidence = [
        Evidence("scale", first.scale),
        Evidence("num_clips", len(faulty), f"of {max(total, len(steps))} steps"),
    ]
    said = []
    if first.limit is not None:
        acting = first.limit / first.scale
        off = max(first.scale, 1 / first.scale)
        evidence = [
            Evidence("limit", first.limit),
            Evidence("effective_limit", acting, "on the unscaled gradients", first.limit),
            Evidence("factor_off", off, "times"),
            *evidence,
        ]
        how = "cut down by hand to" if by_hand else "clipped at"
        often = share(len(steps), total)
        measured = _num_measured(calls, ids) if by_hand else 0
        if measured:
            often = f"{len(steps)} of {max(measured, len(steps))} steps that were measured"
        said.append(
            f"The gradients of {optimizer_class(facts, first.optimizer)} are {how} {first.limit:.4g} while they still "
            f"carry the loss scale {power(first.scale)}: in effect at {acting:.3g}, {off:,.6g} times too "
            f"{'tight' if first.scale > 1 else 'loose'}, in {often}."
        )
    title = "Gradients are clipped before they are unscaled"
    if hid:
        evidence.append(Evidence("num_hidden", len(hid), "times an inf or NaN was gone before the scaler looked"))
        times = f"{len(hid)} time{'s' if len(hid) > 1 else ''}"
        said.append(f"{times} it made an inf or NaN finite: the scaler neither skipped the step nor lowered the scale.")
    if first.limit is None:
        title = "An overflow is hidden from the GradScaler"
        what = "a change of .grad" if by_hand else first.event["name"]
        said.insert(0, f"The scaled gradients of {optimizer_class(facts, first.optimizer)} go through {what} first.")
    return Finding(
        id="clip-before-unscale",
        severity="error",
        confidence="medium" if by_hand and not hid else "high",
        title=title,
        summary=" ".join(said),
        scale_can_fix="no",
        where=(*_lines(faulty), *optimizers(facts, ids)),
        steps=span(facts, steps),
        evidence=tuple(evidence),
        remedy=(
            "Call scaler.unscale_(optimizer) after the last backward of a step and before clipping, once per "
            "optimizer; scaler.step then does not divide again."
            if first.scaler
            else "Divide the gradients by the factor of the loss first, and clip them then."
        ),
    )


def _num_measured(calls: Calls, ids: Sequence[int]) -> int:
    """Steps at which a change by hand of some optimizers' gradients was measured: not all are."""
    changes = [event for event in calls.named.get("gradients.changed", []) if event["optimizer"] in ids]
    return len({event["step"] for event in changes if detail(event).get("norm_before") is not None})


CLIPPING: tuple[Check, ...] = (Check("clip-before-unscale", _clip_before_unscale),)
