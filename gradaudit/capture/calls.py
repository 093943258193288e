"""The call-order log: who called what, in which order, and from which line of the user's."""

from __future__ import annotations

from typing import Any

from gradaudit.capture.callsite import user_call_site

NUM_CALL_SITES = 3
"""The user's line is looked up for the first few calls of each kind only: it costs microseconds."""


class CallLog:
    """Numbers events and knows when a call site is still worth looking up."""

    def __init__(self) -> None:
        self.autocasts: list[dict[str, Any]] = []
        self._num_events = 0
        self._num_calls: dict[tuple[str, int | None], int] = {}

    def event(self, name: str, optimizer: int | None, **more: Any) -> dict[str, Any]:
        """A row of the event table. Sync: none."""
        times = self._num_calls.get((name, optimizer), 0)
        self._num_calls[(name, optimizer)] = times + 1
        file, line = user_call_site() if times < NUM_CALL_SITES else (None, None)
        row = {"seq": self._num_events, "name": name, "optimizer": optimizer, "file": file, "line": line, **more}
        self._num_events += 1
        return row

    def autocast(self, device: str, dtype: str, *, enabled: bool) -> None:
        """Note an autocast region the first time one like it is entered."""
        entry = {"device": device, "dtype": dtype, "enabled": enabled}
        if not any(entry.items() <= seen.items() for seen in self.autocasts):
            file, line = user_call_site()
            self.autocasts.append({**entry, "file": file, "line": line})
