"""Which line of the user's changes something: for the length of one step's few lines between backward and step.

Python reports every line before it runs, so what is different when the next one is reported was changed by the last.
Frames of torch and of other libraries are passed over: what happens in them is the doing of the line that called.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from types import FrameType
from typing import Any

from gradaudit.capture.callsite import call_site_of, is_users

MAX_LINES = 2_000
"""Lines followed: somebody who does this much between backward and step evaluates the model there."""


class LineWatch:
    """Follows the lines of the calling thread from `start` to `stop`.

    `found` is the file and line of the first change, None as long as there was none.

    Args:
        fingerprint: What to watch; compared between lines, must be cheap.
    """

    def __init__(self, fingerprint: Callable[[], object]) -> None:
        self.found: tuple[str | None, int | None] | None = None
        self._fingerprint = fingerprint
        self._before: object = None
        self._last: tuple[str | None, int | None] = (None, None)
        self._frames: list[FrameType] = []
        self._num_lines = 0
        self._installed = self._enter, self._line  # bound once, to be recognised

    def start(self) -> None:
        """Begin, unless a debugger or a coverage tool follows the lines already."""
        if sys.gettrace() is not None:
            return
        self._before = self._fingerprint()
        frame: FrameType | None = sys._getframe(1)
        self._last = call_site_of(frame)
        while frame is not None:
            if is_users(frame.f_code.co_filename) and frame.f_trace is None:
                frame.f_trace = self._installed[1]
                self._frames.append(frame)
            frame = frame.f_back
        sys.settrace(self._installed[0])

    def stop(self) -> None:
        """Leave no trace; a second call does nothing."""
        if sys.gettrace() is self._installed[0]:
            sys.settrace(None)
        for frame in self._frames:
            if frame.f_trace is self._installed[1]:
                frame.f_trace = None
        self._frames.clear()

    def _enter(self, frame: FrameType, event: str, arg: Any) -> Any:
        return self._installed[1] if is_users(frame.f_code.co_filename) else None

    def _line(self, frame: FrameType, event: str, arg: Any) -> Any:
        try:
            self._num_lines += 1
            if self.found is None and self._fingerprint() != self._before:
                self.found = self._last
            if self.found is not None or self._num_lines > MAX_LINES:
                self.stop()
                return None
            self._last = call_site_of(frame.f_back if event == "return" else frame)
        except Exception:  # would reach the user's code
            self.stop()
            return None
        return self._installed[1]
