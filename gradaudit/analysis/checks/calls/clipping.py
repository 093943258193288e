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

from gradaudit.analysis.checks.base import Check, Facts, Outcome, power
from gradaudit.analysis.checks.calls.call_places import (
    NO_SCALER,
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
from gradaudit.analysis.report import Evidence, Finding

SAME = 1e-3
"""Relative spread within which numbers that went through FP16 or FP32 count as the same."""

HELD = 0.02
"""Relative spread of what a clip leaves: its limit, but for rounding and the epsilon in its denominator."""

CALMER = 0.1
"""A clip takes at least this much of the spread away; what is steady before and after was not cut to a limit."""

BITES = 0.99
"""A factor below this cut something off; above, it is the 1 of a clip whose limit was not reached."""

TIE_DECADES = 1.0
"""Nearer than a decade the two readings of a limit do not differ enough to tell which one was meant."""


@dataclass(frozen=True, slots=True)
class Clip:
    """One time that scaled gradients were clipped.

    `limit` is None where it was a tensor or is unknown; `hid` whether an inf or NaN was gone afterwards; `asked`
    whether the scale was read just before; `belongs` the unscale_ that came too late, or the call it belongs after.
    """

    event: Event
    optimizer: int
    limit: float | None
    scale: float
    hid: bool
    asked: bool
    belongs: Event | None


def on_purpose(limits: Sequence[float], scales: Sequence[float], *, asked: bool) -> bool:
    """Whether limits were multiplied by the scale by someone who knew that the gradients carry it.

    Args:
        limits: One per clip, finite and positive.
        scales: The scale at each.
        asked: Whether the script read the scale before clipping.
    """
    limit, scale = np.array(limits, dtype=np.float64), np.array(scales, dtype=np.float64)
    if _spread(scale) > SAME:
        if _spread(limit / scale) <= SAME:
            return True
        if _spread(limit) <= SAME:
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


def _is_cut(numbers: dict[str, float]) -> bool:
    """Whether finite gradients were made smaller, and not all to nothing."""
    return 0 < numbers["factor_min"] < BITES and math.isfinite(numbers.get("norm_before", math.nan))


def _limit_of(changes: Sequence[dict[str, float]]) -> float | None:
    """The limit that gradients were cut to by hand, from at least two changes; None if it was something else."""
    factors = np.array([[c["factor_min"], c["factor_max"]] for c in changes]).reshape(-1, 2)
    if len(factors) < 2 or (factors[:, 1] > 1 + SAME).any():
        return None
    if _spread(factors[:, 0]) <= SAME and _spread(factors[:, 1]) <= SAME:
        return None  # the same factor at every step
    for measure in ("norm", "amax"):
        before = np.array([c.get(f"{measure}_before", math.nan) for c in changes])
        after = np.array([c.get(f"{measure}_after", math.nan) for c in changes])
        known = bool(np.isfinite(before + after).all() and (before > 0).all() and (after > 0).all())
        if known and _spread(after) <= min(HELD, CALMER * _spread(before)):
            return float(np.median(after))
    return None


def _clip_before_unscale(facts: Facts) -> Outcome:
    calls = facts.calls()
    if not has_scaler(calls):
        return NO_SCALER
    faulty: list[Clip] = []
    groups: dict[tuple[int, str], list[Clip]] = {}
    for clip in (*clips_by_function(facts, calls), *clips_by_hand(facts, calls)):
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


def _finding(facts: Facts, calls: Calls, faulty: Sequence[Clip]) -> Finding:
    first = next((clip for clip in faulty if clip.limit is not None), faulty[0])
    hid = [clip for clip in faulty if clip.hid]
    ids = list(dict.fromkeys(clip.optimizer for clip in faulty))
    steps = sorted({int(clip.event["step"]) for clip in faulty})
    total = sum(calls.used.get(optimizer, 0) for optimizer in ids)
    by_hand = first.event["name"] not in CLIPS
    lines = [site(clip.event, "p.grad changed" if clip.event["name"] not in CLIPS else None) for clip in faulty]
    # the line of a change by hand is looked for only once one has been seen
    lines = [place for place in lines if place.file] or lines
    lines += [place for clip in faulty for place in sites(clip.belongs)]
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
        said.append(
            f"The gradients of {optimizer_class(facts, first.optimizer)} are {how} {first.limit:.4g} while they still "
            f"carry the loss scale {power(first.scale)}: in effect at {acting:.3g}, {off:,.6g} times too "
            f"{'tight' if first.scale > 1 else 'loose'}, in {share(len(steps), total)}."
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
        where=(*dict.fromkeys(lines), *optimizers(facts, ids)),
        steps=span(facts, steps),
        evidence=tuple(evidence),
        remedy=(
            "Call scaler.unscale_(optimizer) after the last backward of a step and before clipping, once per "
            "optimizer; scaler.step then does not divide again."
        ),
    )


CLIPPING: tuple[Check, ...] = (Check("clip-before-unscale", _clip_before_unscale),)
