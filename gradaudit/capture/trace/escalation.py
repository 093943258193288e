"""When a step's forward is worth tracing: after a fault that no search for a loss scale explains.

A healthy run is never traced. After a fault the next few steps are; one of them that shows a fault itself has caught
it, and tracing ends. A fault that keeps coming without being caught leaves it on until it is.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from gradaudit.capture.recorder import Packet, has_bad_outputs

TRACED_STEPS = 3
"""Steps traced after a fault; most faults repeat at once."""

MAX_TRACED = 300
"""Traced steps of a run: a traced step costs several times a plain one."""

MAX_CATCHES = 8
"""The same fault caught more often than this says nothing new."""

FIRST_PAUSE = 10
"""Steps after the first catch in which a fault is taken for the same one; doubles with every catch."""

SEARCH_FLOOR = 2.0**8
"""A scale that is still above this while no step has been applied yet is coming down from its initial value."""


@dataclass(slots=True)
class _Scaler:
    """A scaler's course: `proven` is the scale from which it last grew, so a full interval was clean there."""

    has_applied: bool = False
    scale: float = 0.0
    proven: float | None = None
    num_held_back: int = 0
    num_in_a_row: int = 0


@dataclass(frozen=True, slots=True)
class _Fault:
    """`in_forward`: it shows before the backward, so that it is another one than gradients that overflow."""

    step: int
    armed: bool
    in_forward: bool


@dataclass(slots=True)
class _Hunt:
    """What is done about one kind of fault: `is_on` while there was one that no traced step has shown yet."""

    is_on: bool = False
    num_uncaught: int = 0
    num_catches: int = 0
    quiet_until: int = 0


class Judge:
    """Says of finished steps, in order, whether they show a fault. For one thread."""

    def __init__(self) -> None:
        self._scalers: dict[int, _Scaler] = {}

    def is_fault(self, row: dict[str, Any]) -> bool:
        """Whether a row of the step table shows what no search for a scale explains."""
        found = bool(row["found_inf"])
        searching = self._follow(row["scaler"], row["scale"], overflowed=found)
        if in_forward(row):
            return True
        if found:
            return not searching
        return bool(row["nonfinite"]) and not row["skipped"]

    def was_clean(self, scaler: int | None, scale: float) -> None:
        """A step on which nothing was wrong."""
        self._follow(scaler, scale, overflowed=False)

    def _follow(self, scaler: int | None, scale: float, *, overflowed: bool) -> bool:
        """Take note of an attempt; whether its overflow is part of a search for the scale."""
        if scaler is None:
            return False
        course = self._scalers.setdefault(scaler, _Scaler())
        if course.has_applied and scale > course.scale:
            course.proven = course.scale
        course.scale = scale
        if not overflowed:
            course.has_applied = True
            return False
        if not course.has_applied:
            return scale > SEARCH_FLOOR
        if course.proven is not None and scale <= course.proven:
            course.proven = None
            return False
        return course.proven is not None


def in_forward(row: dict[str, Any]) -> bool:
    """Whether a row of the step table was bad before its backward."""
    return row["loss_finite"] is False or row["input_finite"] is False or row.get("scaled_loss_finite") is False


class Escalation:
    """Decides after each step whether the next one is traced.

    Args:
        always: Trace every step.
        initial: A scaler's init_scale and backoff_factor, by its identity.
    """

    def __init__(self, *, always: bool, initial: Callable[[int], tuple[float, float]]) -> None:
        self.armed = always
        self.failed = False  # whether the step just closed shows a fault, as far as the host knows
        self._always = always
        self._initial = initial
        self._judge = Judge()
        self._arrived: deque[_Fault] = deque()
        self._courses: dict[int, _Scaler] = {}
        self._hunts = {False: _Hunt(), True: _Hunt()}  # by whether the fault is in the forward
        self._left = self._num_traced = 0

    def closed(self, packet: Packet, *, held_back: bool, saw_fault: bool, num_optimizers: int) -> bool:
        """A step is over: whether to trace the next.

        Args:
            packet: The step, as it goes to the recorder.
            held_back: Whether the scaler is known to have skipped it.
            saw_fault: Whether its operations are known to have made a NaN or an inf in FP16.
            num_optimizers: Optimizers that take turns.

        Sync: none.
        """
        if packet.on_host:
            fault, forward = self._shows_fault(packet)
        else:
            fault, forward = self._is_stuck(packet, held_back=held_back), False
        self.failed = fault = fault or saw_fault
        while self._arrived:
            self._take(self._arrived.popleft(), num_optimizers)
        if fault:
            self._take(_Fault(packet.step, packet.armed, forward or saw_fault), num_optimizers)
        self.armed = self._always or self._goes_on()
        return self.armed

    def finished(self, packet: Packet, row: dict[str, Any]) -> None:
        """A step's numbers have arrived from the device; called in the writer thread."""
        if not packet.on_host:
            forward = in_forward(row) or (packet.samples is not None and has_bad_outputs(packet.samples))
            if self._judge.is_fault(row) or forward:
                self._arrived.append(_Fault(packet.step, packet.armed, forward))

    def _shows_fault(self, packet: Packet) -> tuple[bool, bool]:
        """Whether there is one, and whether it is in the forward."""
        scale = _scale_if_clean(packet)
        fault = forward = False
        if scale is None:
            row = packet.row()
            fault, forward = self._judge.is_fault(row), in_forward(row)
        else:
            self._judge.was_clean(packet.scaler, scale)
        forward = forward or (packet.samples is not None and has_bad_outputs(packet.samples))
        return fault or forward, forward

    def _is_stuck(self, packet: Packet, *, held_back: bool) -> bool:
        """Two skipped steps in a row outside the search; a single one may be a scale that grew too far."""
        if packet.scaler is None:
            return False
        course = self._courses.setdefault(packet.scaler, _Scaler())
        if not held_back:
            course.has_applied, course.num_in_a_row = True, 0
            return False
        init_scale, backoff = self._initial(packet.scaler)
        scale = init_scale * backoff**course.num_held_back
        course.num_held_back += 1
        if not course.has_applied and scale > SEARCH_FLOOR:
            return False
        course.num_in_a_row += 1
        return course.num_in_a_row > 1

    def _take(self, fault: _Fault, num_optimizers: int) -> None:
        hunt = self._hunts[fault.in_forward]
        if fault.armed:
            if hunt.is_on:
                hunt.num_catches += 1
                hunt.quiet_until = fault.step + FIRST_PAUSE * 2 ** (hunt.num_catches - 1)
            hunt.num_uncaught, hunt.is_on = 0, False
            if not any(other.is_on for other in self._hunts.values()):
                self._left = 0
        elif hunt.num_catches < MAX_CATCHES and fault.step >= hunt.quiet_until:
            hunt.num_uncaught += 1
            hunt.is_on = True
            steps = TRACED_STEPS * max(num_optimizers, 1) if hunt.num_uncaught == 1 else MAX_TRACED
            self._left = max(self._left, steps)

    def _goes_on(self) -> bool:
        """Whether one more step is traced."""
        if self._left == 0 or self._num_traced >= MAX_TRACED:
            return False
        self._left -= 1
        self._num_traced += 1
        return True


def _scale_if_clean(packet: Packet) -> float | None:
    """The scale of a step on which nothing was wrong, None where its row has to be looked at."""
    if len(packet.scalars) != 1:
        return None
    values = packet.scalars[0].numpy()
    # not by their sum: inf - inf would warn the user
    if not np.isfinite(values).all() or any(values[i] > 0 for i in range(packet.found.start, packet.found.stop)):
        return None
    return 1.0 if packet.scaler is None else float(values[0])
