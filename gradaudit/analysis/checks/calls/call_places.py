"""What the checks on the order of calls share: places, steps, scales and numbers of an event."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np

from gradaudit.analysis.checks.base import Facts
from gradaudit.analysis.observations import Calls, Event, Observation
from gradaudit.analysis.report import Evidence, Finding, Place

SCALER_CALLS = ("scaler.scale", "scaler.unscale_", "scaler.step", "scaler.update")

MAX_AHEAD = 64
"""Rows looked at for the step an event led to: more optimizers than that do not take turns."""


def has_scaler(calls: Calls) -> bool:
    """Whether the log holds any call of an enabled scaler."""
    return any(name in calls.named for name in SCALER_CALLS)


def site(event: Event, name: str | None = None) -> Place:
    """The user's line of a call."""
    return Place("call_site", name or event["name"], event["file"], event["line"])


def sites(*events: Event | None) -> tuple[Place, ...]:
    """The lines of several calls, each once."""
    return tuple(dict.fromkeys(site(event) for event in events if event is not None))


def optimizer_class(facts: Facts, optimizer: int | None) -> str:
    """An optimizer's class name, "the optimizer" where it is unknown."""
    entries = facts.analysis.run.meta.get("optimizers", [])
    return next((str(entry["class"]) for entry in entries if entry["id"] == optimizer), "the optimizer")


def optimizers(facts: Facts, ids: Iterable[int | None]) -> tuple[Place, ...]:
    """Optimizers as places, each class once."""
    names = (optimizer_class(facts, optimizer) for optimizer in ids if optimizer is not None)
    return tuple(Place("optimizer", name) for name in dict.fromkeys(names) if name != "the optimizer")


def where_is(event: Event) -> str:
    """A call's line as people write it: train.py:41, or the call itself where the line is unknown."""
    return f"{event['file']}:{event['line']}" if event["file"] else str(event["name"])


def stopped(event: Event, times: int = 1) -> str:
    """A sentence on what torch raised in a call, and how many times in all; empty if nothing."""
    again = f", {times} times" if times > 1 else ""
    return f" torch stopped with: {event['raised'].strip().rstrip('.')}{again}." if event["raised"] else ""


def span(facts: Facts, steps: Sequence[int]) -> tuple[int, int]:
    """First and last of some steps, within those on record: a call that raised belongs to a step that never closed."""
    known = facts.analysis.steps.step
    last = int(known[-1]) if len(known) else 0
    return min(min(steps), last), min(max(steps), last)


def detail(event: Event) -> dict[str, Any]:
    """An event's details, empty where it has none."""
    found = json.loads(event["detail"]) if event["detail"] else {}
    return found if isinstance(found, dict) else {}


def number(value: object) -> float | None:
    """A number of an event's details; non-finite ones are strings there."""
    if isinstance(value, bool) or not isinstance(value, (int, float, str)):
        return None
    try:
        return float(value)
    except ValueError:
        return None


def row_of(facts: Facts, event: Event, *, optimizer: int | None = None, scaler: int | None = None) -> int | None:
    """Index of the row of the step table that an event led to: the next one closed by its optimizer or scaler."""
    steps = facts.analysis.steps
    start = int(np.searchsorted(steps.step, event["step"]))
    for row in range(start, min(start + MAX_AHEAD, len(steps))):
        if optimizer is not None and steps.optimizer[row] != optimizer:
            continue
        if scaler is None or steps.scaler[row] == scaler:
            return row
    return None


def scale_of(facts: Facts, event: Event, scaler: int | None, *, optimizer: int | None = None) -> float | None:
    """The scale that a scaler held at an event; None where it is unknown.

    It is that of the row the event led to. Where the scaler has no rows, since every step went past it, nothing ever
    updated it either: its init_scale.
    """
    if scaler is None:
        return None
    steps = facts.analysis.steps
    row = row_of(facts, event, optimizer=optimizer, scaler=scaler)
    if row is None:
        earlier = np.flatnonzero((steps.scaler == scaler) & (steps.step <= event["step"]))
        row = int(earlier[-1]) if len(earlier) else None
    if row is not None:
        return float(steps.scale[row])
    entries = facts.analysis.run.meta.get("scalers", [])
    return next((number(entry.get("init_scale")) for entry in entries if entry["id"] == scaler), None)


def scaler_of(calls: Calls, event: Event) -> int | None:
    """The scaler whose scale the gradients carry at an event: that of the last backward before it."""
    if event["scaler"] is not None:
        return int(event["scaler"])
    backward = calls.last("backward", event)
    return None if backward is None else backward["scaler"]


def share(num: int, total: int) -> str:
    """How many of how many: "12 of 40 steps"."""
    return f"{num} of {max(num, total)} step{'s' if max(num, total) != 1 else ''}"


def finding_about(facts: Facts, seen: Sequence[Observation], **more: Any) -> Finding:
    """A finding about some observations: error, high confidence, no matter of the scale, unless said."""
    ids = list(dict.fromkeys(one.optimizer for one in seen))
    lines = [*(sites(one.event) for one in seen), *(sites(one.other) for one in seen)]
    places = more.pop("where", None) or [place for some in lines for place in some]
    more = {
        "severity": "error",
        "confidence": "high",
        "scale_can_fix": "no",
        "steps": span(facts, [one.step for one in seen]),
        "evidence": (Evidence("num_steps", len({one.step for one in seen}), "steps"),),
        **more,
    }
    return Finding(where=(*dict.fromkeys(places), *optimizers(facts, ids)), **more)
