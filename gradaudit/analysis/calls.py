"""The call-order log, read once: where each optimizer's gradients were, and which calls came out of turn.

Per optimizer the gradients are empty, scaled (by which scaler, before which of its updates), plain, unscaled or used.
Every event moves one or several optimizers on; a call that finds the gradients where they should not be makes an
`Observation`. Gradients count only once they are used: what one loss leaves in another optimizer's gradients and
`zero_grad` removes again is nobody's fault. Whether an observation is a finding is up to the checks.
Attempts that torch refused change nothing and are told apart by its words.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from gradaudit.analysis.observations import CLIPS, Calls, Event, Observation

UNSCALED_TWICE = "unscale_() has already been called"
UNSCALED_LATE = "unscale_() is being called after step()"
STEPPED_TWICE = "step() has already been called"
NO_GRADIENTS = "No inf checks were recorded for this optimizer"
NO_CHECKS = "No inf checks were recorded prior to update"
NO_SCALE = "_scale is None"


@dataclass(slots=True)
class _Gradients:
    """One optimizer's gradients since they were last empty.

    `plain` and `scaled` are the last backward of each kind; `scaled_by` holds per scaler the last one and its update
    number at the first; `unscaled` and `used` are the calls that came after; `late` is a scaled backward after
    `unscaled`; `cleared` the zero_grad that threw away what nobody had used.
    """

    num_backward: int = 0
    plain: Event | None = None
    scaled: Event | None = None
    scaled_by: dict[int, tuple[Event, int]] = field(default_factory=dict)
    steps_at_backward: int = 0
    unscaled: Event | None = None
    late: Event | None = None
    used: Event | None = None
    cleared: Event | None = None
    clips: list[tuple[Event, bool]] = field(default_factory=list)

    @property
    def scaler(self) -> int | None:
        return None if self.scaled is None else self.scaled["scaler"]

    @property
    def carry_scale(self) -> bool:
        return self.scaled is not None and (self.unscaled is None or self.late is not None)


@dataclass(slots=True)
class _State:
    """All that is known after some events; `unowned` are backward calls whose optimizers nobody knew."""

    gradients: dict[int, _Gradients] = field(default_factory=dict)
    zeroed: set[int] = field(default_factory=set)
    stages: dict[int, dict[int, Event]] = field(default_factory=dict)
    updates: dict[int, int] = field(default_factory=dict)
    last_update: dict[int, Event] = field(default_factory=dict)
    lone_cycles: dict[int, int] = field(default_factory=dict)
    unowned: list[Event] = field(default_factory=list)
    claimed: bool = False
    num_steps: int = 0
    backward: Event | None = None
    scaled_backward: Event | None = None
    num_since_update: int = 0
    bypass: Event | None = None
    asked_scale: bool = False
    scaled: set[int] = field(default_factory=set)
    used: dict[int, int] = field(default_factory=dict)
    scalers: dict[int, list[tuple[int, Event]]] = field(default_factory=dict)
    taken: dict[int, list[int]] = field(default_factory=dict)
    schedules: dict[int, list[tuple[Event, tuple[int, ...]]]] = field(default_factory=dict)
    seen: list[Observation] = field(default_factory=list)

    def of(self, optimizer: int) -> _Gradients:
        return self.gradients.setdefault(optimizer, _Gradients())

    def observe(self, what: str, event: Event, other: Event | None, optimizer: int | None, **more: Any) -> None:
        num = self.of(optimizer).num_backward if optimizer is not None else self.num_since_update
        more = {"num_backward": num, "scaler": event["scaler"], **more}
        self.seen.append(Observation(what, event, other, optimizer, **more))


def read_calls(events: Sequence[Event]) -> Calls:
    """Follow every optimizer's gradients through the log.

    Args:
        events: In order, as `Run.events` gives them; may begin in the middle of a run.
    """
    state = _State()
    named: dict[str, list[Event]] = {}
    for event in events:
        named.setdefault(event["name"], []).append(event)
        handle = _HANDLERS.get(event["name"])
        if handle is not None:
            handle(state, event)
    if not state.used:  # what nobody used is nobody's fault, but where the log ends before any use
        for optimizer, gradients in state.gradients.items():
            _report_clips(state, optimizer, gradients, None)
    return Calls(
        observations=tuple(state.seen),
        named=named,
        used=state.used,
        scaled=frozenset(state.scaled),
        scalers=state.scalers,
        schedules=state.schedules,
    )


def _on_backward(state: _State, event: Event) -> None:
    if event["raised"]:
        return
    state.backward, state.asked_scale = event, False
    state.num_since_update += 1
    if event["scaled"]:
        state.scaled_backward = event
    if event["optimizers"] is None:
        if state.claimed:
            state.unowned, state.claimed = [], False
        state.unowned.append(event)
        return
    for optimizer in event["optimizers"]:
        _fill(state, optimizer, event)


def _fill(state: _State, optimizer: int, event: Event) -> None:
    gradients = state.of(optimizer)
    # after a step what is left is divided by the scale once more: as good as gone. Where no zero_grad was ever seen the
    # script empties gradients in its own way: at the latest after another optimizer's step, or an update
    fresh = gradients.used is not None
    if optimizer not in state.zeroed:
        fresh = fresh or state.num_steps > gradients.steps_at_backward
        held = state.stages.get(gradients.unscaled["scaler"], {}).get(optimizer) if gradients.unscaled else None
        fresh = fresh or held is not gradients.unscaled
    if fresh:
        gradients = state.gradients[optimizer] = _Gradients()
    gradients.num_backward += 1
    gradients.steps_at_backward = state.num_steps
    gradients.cleared = None
    if not event["scaled"]:
        if gradients.unscaled is None:
            gradients.plain = event
        return
    state.scaled.add(optimizer)
    if gradients.unscaled is not None:
        gradients.late = event
    gradients.scaled = event
    if event["scaler"] is not None:
        _, first = gradients.scaled_by.get(event["scaler"], (event, state.updates.get(event["scaler"], 0)))
        gradients.scaled_by[event["scaler"]] = (event, first)


def _claim(state: _State, optimizer: int) -> _Gradients:
    """The gradients an optimizer is about to use; backward calls of nobody's are taken for its own."""
    gradients = state.of(optimizer)
    if state.unowned and (gradients.num_backward == 0 or gradients.used is not None):
        for event in state.unowned:
            _fill(state, optimizer, event)
    state.claimed = True
    return state.of(optimizer)


def _on_unscale(state: _State, event: Event) -> None:
    optimizer, scaler = event["optimizer"], event["scaler"]
    if event["raised"]:
        _refused(state, event)
        return
    gradients = _claim(state, optimizer)
    _use(state, event, gradients)
    _report_clips(state, optimizer, gradients, event)
    gradients.unscaled, gradients.late, gradients.plain = event, None, None
    state.scaled.add(optimizer)
    state.stages.setdefault(scaler, {})[optimizer] = event


def _on_scaler_step(state: _State, event: Event) -> None:
    optimizer, scaler = event["optimizer"], event["scaler"]
    if event["raised"]:
        _refused(state, event)
        return
    gradients = _claim(state, optimizer)
    if "num_params" in (event["detail"] or ""):
        state.observe("no gradients", event, _emptied_by(state, gradients), optimizer)
    if gradients.unscaled is None or gradients.late is not None:
        _use(state, event, gradients)
    _report_clips(state, optimizer, gradients, None)
    if gradients.num_backward == 1:
        state.lone_cycles[optimizer] = state.lone_cycles.get(optimizer, 0) + 1
    state.scaled.add(optimizer)
    state.stages.setdefault(scaler, {})[optimizer] = event
    _step(state, event, gradients)


def _use(state: _State, event: Event, gradients: _Gradients) -> None:
    """Gradients are divided by the scale, by unscale_ or within step: are they what that needs?"""
    optimizer, scaler = event["optimizer"], event["scaler"]
    handled = state.scalers.setdefault(optimizer, [])
    if not handled or handled[-1][0] != scaler:
        handled.append((scaler, event))
    if gradients.used is not None:
        return
    if gradients.plain is not None:
        state.observe("plain backward", gradients.plain, event, optimizer, scaler=scaler)
    if gradients.late is not None:
        state.observe("backward after unscale_", gradients.late, gradients.unscaled, optimizer, scaler=scaler)
    elif gradients.unscaled is None:
        for other, (backward, first_update) in gradients.scaled_by.items():
            if other != scaler:
                state.observe("other scaler", event, backward, optimizer)
            elif first_update != state.updates.get(scaler, 0):
                alone = gradients.num_backward == 1 and state.num_steps == gradients.steps_at_backward
                state.observe("update between", state.last_update[scaler], event, optimizer, alone=alone)


def _step(state: _State, event: Event, gradients: _Gradients) -> None:
    optimizer = event["optimizer"]
    gradients.used = event
    state.num_steps += 1
    state.used[optimizer] = state.used.get(optimizer, 0) + 1
    state.taken.setdefault(optimizer, []).append(int(event["step"]))


def _on_step(state: _State, event: Event) -> None:
    optimizer = event["optimizer"]
    gradients = _claim(state, optimizer)
    if gradients.used is not None:
        if gradients.used["name"] == "scaler.step":
            state.observe("second step", event, gradients.used, optimizer, scaler=gradients.used["scaler"])
    elif gradients.carry_scale:
        state.observe("bypass", event, gradients.scaled, optimizer, scaler=gradients.scaler)
        state.bypass = event
    _report_clips(state, optimizer, gradients, None)
    _step(state, event, gradients)


def _on_update(state: _State, event: Event) -> None:
    scaler = event["scaler"]
    if event["raised"]:
        if NO_SCALE in event["raised"]:
            state.observe("no scale", state.backward or event, event, None, scaler=scaler)
        elif NO_CHECKS in event["raised"]:
            what = "update without step" if state.bypass is None else "update after bypass"
            state.observe(what, event, state.bypass or state.scaled_backward, None)
        return
    state.updates[scaler] = state.updates.get(scaler, 0) + 1
    state.last_update[scaler] = event
    state.stages.pop(scaler, None)
    state.bypass, state.num_since_update = None, 0


def _on_zero_grad(state: _State, event: Event) -> None:
    optimizer = event["optimizer"]
    gradients = state.of(optimizer)
    state.zeroed.add(optimizer)
    unused = gradients.num_backward > 0 and gradients.used is None
    state.gradients[optimizer] = _Gradients(
        steps_at_backward=state.num_steps, cleared=event if unused else gradients.cleared
    )


def _on_clip(state: _State, event: Event) -> None:
    if event["scaled"] is False or event["raised"]:
        return
    passed = event["optimizers"]
    for optimizer in list(state.gradients) if passed is None else passed:
        gradients = state.of(optimizer)
        # of gradients made before recording began only the event itself knows
        unseen = passed is not None and event["scaled"] and gradients.num_backward == 0
        if unseen or (gradients.carry_scale and gradients.used is None):
            gradients.clips.append((event, state.asked_scale))


def _report_clips(state: _State, optimizer: int, gradients: _Gradients, unscaled: Event | None) -> None:
    for event, asked in gradients.clips:
        other = unscaled or gradients.scaled
        state.observe("clip", event, other, optimizer, scaler=gradients.scaler, asked_scale=asked)
    gradients.clips.clear()


def _on_get_scale(state: _State, event: Event) -> None:
    state.asked_scale = True


def _on_schedule(state: _State, event: Event) -> None:
    taken = state.taken.get(event["optimizer"])
    if taken:  # a second scheduler of the same optimizer finds none
        state.schedules.setdefault(event["optimizer"], []).append((event, tuple(taken)))
        taken.clear()


def _emptied_by(state: _State, gradients: _Gradients) -> Event | None:
    cleared, backward = gradients.cleared, state.backward
    return cleared if cleared and backward and cleared["seq"] > backward["seq"] else backward


def _refused(state: _State, event: Event) -> None:
    """torch raised in unscale_ or scaler.step: what had come before says which call is at fault."""
    raised, optimizer = event["raised"], event["optimizer"]
    gradients = state.of(optimizer)
    before = state.stages.get(event["scaler"], {}).get(optimizer)
    if NO_GRADIENTS in raised:
        state.observe("no gradients", event, _emptied_by(state, gradients), optimizer)
    elif NO_SCALE in raised and gradients.scaled is not None:
        state.observe("other scaler", event, gradients.scaled, optimizer)
    elif NO_SCALE in raised:
        state.observe("no scale", gradients.plain or state.backward or event, event, optimizer, scaler=event["scaler"])
    elif UNSCALED_TWICE in raised:
        new = before is not None and gradients.unscaled is not before
        # with backward in between and nothing emptied: an iteration left half done, or micro-batches of one step
        again = gradients.late is not None and state.lone_cycles.get(optimizer, 0) > 0
        state.observe("no update" if new or again else "unscale_ again", event, before, optimizer)
    elif UNSCALED_LATE in raised:
        new = gradients.num_backward > 0 and gradients.used is None
        state.observe("no update" if new else "unscale_ again", event, before, optimizer)
    elif STEPPED_TWICE in raised:
        state.observe("step again" if gradients.used is not None else "no update", event, before, optimizer)


_HANDLERS: dict[str, Callable[[_State, Event], None]] = {
    "backward": _on_backward,
    "scaler.unscale_": _on_unscale,
    "scaler.step": _on_scaler_step,
    "scaler.update": _on_update,
    "scaler.get_scale": _on_get_scale,
    "optimizer.step": _on_step,
    "optimizer.zero_grad": _on_zero_grad,
    "lr_scheduler.step": _on_schedule,
    **dict.fromkeys(CLIPS, _on_clip),
}
