"""When the operation trace is on: while a forward runs in which it was asked for, and never during backward or a step.

There are two reasons to watch: the look, once, at the first training forward, which notes the operations with FP16
tensors; and armed steps, of which everything is noted.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch

from gradaudit.capture.guard import one_line
from gradaudit.capture.names import Names, Running
from gradaudit.capture.trace.opnotes import OpNotes, Site, Surroundings
from gradaudit.capture.trace.optrace import Observer, OpTrace


class Tracing:
    """Opens and closes the trace and holds the notes of the step under way.

    Args:
        observer: Whom the trace tells of each operation.
        names: Where parameters and buffers get their names.
        running: The modules whose forward is running, outermost first.
        armed: Whether the first step is traced.
    """

    def __init__(
        self, observer: Observer, names: Names, running: Callable[[], Sequence[Running]], *, armed: bool
    ) -> None:
        self.notes: OpNotes | None = None
        self.errors: list[str] = []
        self._trace = OpTrace(observer)
        self._names = names
        self._around = Surroundings(running, self._in_autocast)
        self._thread = threading.get_ident()
        self._autocasts: list[tuple[str, bool]] = []
        self._armed = armed
        self._look_is_due, self._looking = True, False
        self._has_missed = self._saw_module = self._has_ended = False

    @property
    def is_whole(self) -> bool:
        """Whether the notes hold everything of the forwards of this step."""
        notes = self.notes
        return notes is not None and notes.everything and not notes.full and not self._has_missed

    def site(self, sequence: int) -> Site:
        """The user's line that made an autograd node, of this step and as far as it was watched."""
        return (None, None) if self.notes is None else self.notes.sites.get(sequence, (None, None))

    def start(self, func: Any, args: Any, kwargs: Any) -> Any:
        """An operation is about to run; what is returned is for `end`. Sync: none."""
        try:
            return None if self.notes is None else self.notes.start(func, args, kwargs)
        except Exception as error:
            self._give_up(error)
            return None

    def end(self, started: Any, out: Any) -> None:
        """It returned. Sync: none."""
        try:
            if self.notes is not None:
                self.notes.end(started, out)
        except Exception as error:
            self._give_up(error)

    def _give_up(self, error: Exception) -> None:
        """The rest of the recording goes on without a trace."""
        self.errors.append(f"the operation trace stopped: {one_line(error)}")
        self.end_recording()

    def end_recording(self) -> None:
        """No more is watched."""
        self.notes = None
        self._armed = self._looking = self._look_is_due = False
        self._has_ended = True
        self._trace.close()

    def begin_step(self, *, armed: bool, in_backward: bool) -> None:
        """The last step closed; what comes belongs to the next. Sync: none."""
        self.notes, self._armed, self._has_missed = None, armed, False
        if not self._saw_module:  # a training without modules: nothing else says when its forward begins
            self._looking = self._look_is_due and not armed
            if not in_backward:
                self.resume(0)
        self._saw_module = False

    def forward_begins(self, micro_step: int) -> None:
        """The outermost module of a training forward was called. Sync: none."""
        self._saw_module = True
        if self._look_is_due and not self._armed:
            self._looking = True
        if self._looking or self._armed:
            self.resume(micro_step)

    def resume(self, micro_step: int) -> None:
        """Watch from here on, if this step is to be watched and nobody is in the way. Sync: none."""
        if not (self._armed or self._looking) or self._has_ended or threading.get_ident() != self._thread:
            return
        if _is_capturing() or not self._trace.open():
            self._has_missed = True
            return
        if self.notes is None:
            self.notes = OpNotes(self._names, self._around, everything=self._armed)
        self.notes.micro_step = micro_step

    def pause(self) -> bool:
        """A backward or an optimizer step begins; whether the trace was on. Sync: none."""
        was_on = self._trace.watching
        self._trace.close()
        return was_on

    def backward_begins(self) -> None:
        """The look is over. Sync: none."""
        if self._looking or self._armed:
            self._look_is_due = self._looking = False
        self._trace.close()

    def mark_batch(self, tensors: Iterable[torch.Tensor]) -> None:
        """These were the arguments of the outermost module. Sync: none."""
        if self.notes is not None:
            self.notes.mark_batch(tensors)

    def enter_autocast(self, device: str, *, enabled: bool) -> None:
        """An autocast region was entered. Sync: none."""
        if threading.get_ident() == self._thread:
            self._autocasts.append((device, enabled))

    def exit_autocast(self) -> None:
        """One was left. Sync: none."""
        if threading.get_ident() == self._thread and self._autocasts:
            self._autocasts.pop()

    def _in_autocast(self, device: str) -> bool:
        for entered, enabled in reversed(self._autocasts):
            if entered == device:
                return enabled
        return False


def _is_capturing() -> bool:
    """Whether a CUDA graph is being captured: whatever runs now would run at every replay."""
    return bool(torch.cuda.is_initialized() and torch.cuda.is_current_stream_capturing())  # type: ignore[no-untyped-call]
