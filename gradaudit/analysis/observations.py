"""What reading the call-order log yields: calls out of turn, and who used what. `calls.read_calls` makes them."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from dataclasses import dataclass, field
from typing import Any

Event = dict[str, Any]

CLIPS = ("clip_grad_norm_", "clip_grad_value_", "clip_grads_with_norm_")


@dataclass(frozen=True, slots=True)
class Observation:
    """One call out of turn.

    `what` is one of
    "clip": `event` clipped scaled gradients, `other` is the unscale_ that came later or the backward it belongs after;
    "bypass": `event` stepped on scaled gradients, `other` is the backward that made them;
    "second step": `event` stepped on what `other`, a scaler.step, had used;
    "plain backward": `event` is a backward without scale whose gradients `other` unscales;
    "no scale": torch refused `other` since nothing was ever scaled, `event` is the last backward;
    "backward after unscale_": `event` added scaled gradients to what `other` had unscaled;
    "update between": `event` is the update between the backward and `other`, which uses the gradients;
    "update without step": torch refused the update `event`; `other` is the last scaled backward;
    "update after bypass": the same, where `other` is a direct step before it;
    "unscale_ again": torch refused the unscale_ `event` after `other`, unscale_ or step;
    "no update": torch refused `event` in a new iteration, `other` is the call after which the update was left out;
    "step again": torch refused a second scaler.step, `event`, within one iteration, after `other`;
    "other scaler": `event` unscales with another scaler than the one of `other`, a backward;
    "no gradients": `event` is a scaler.step without any, `other` the zero_grad that removed them or the last backward.
    `num_backward` counts the backward calls since the gradients were last empty; `asked_scale` says whether the script
    called get_scale between the last backward and `event`; `alone` whether nothing but that update came between.
    """

    what: str
    event: Event
    other: Event | None
    optimizer: int | None
    scaler: int | None
    num_backward: int = 0
    asked_scale: bool = False
    alone: bool = True

    @property
    def step(self) -> int:
        """The step at which it was seen."""
        return int(self.event["step"])


@dataclass(frozen=True, slots=True)
class Calls:
    """What the log of a run amounts to.

    Attributes:
        observations: Calls out of turn, in order.
        named: All events by name.
        used: Per optimizer, how often its gradients were used (scaler.step and direct steps).
        scaled: Optimizers that ever got gradients from a scaled loss, or were unscaled.
        scalers: Per optimizer the scalers that unscaled its gradients, each with the first call after a change.
        schedules: Per optimizer, each schedule step and the steps taken since the one before.
    """

    observations: tuple[Observation, ...] = ()
    named: dict[str, list[Event]] = field(default_factory=dict)
    used: dict[int, int] = field(default_factory=dict)
    scaled: frozenset[int] = frozenset()
    scalers: dict[int, list[tuple[int, Event]]] = field(default_factory=dict)
    schedules: dict[int, list[tuple[Event, tuple[int, ...]]]] = field(default_factory=dict)

    def of(self, *what: str) -> list[Observation]:
        """Observations of these kinds."""
        return [seen for seen in self.observations if seen.what in what]

    def last(self, name: str, before: Event) -> Event | None:
        """The last event of a name before another one."""
        events = self.named.get(name, [])
        index = bisect_left(events, before["seq"], key=lambda event: event["seq"])
        return events[index - 1] if index else None

    def next(self, name: str, after: Event) -> Event | None:
        """The first event of a name after another one."""
        events = self.named.get(name, [])
        index = bisect_right(events, after["seq"], key=lambda event: event["seq"])
        return events[index] if index < len(events) else None
