"""What stands between gradaudit's failures and the user's training."""

from __future__ import annotations

import time
import warnings
from collections.abc import Callable
from functools import wraps
from typing import Any, Protocol, TypeVar

_Method = TypeVar("_Method", bound=Callable[..., Any])

MAX_REASON = 200
"""Characters of an error's own text that are kept: torch lists every backend over a hundred lines."""


class Owner(Protocol):
    """Whose time it is, and who goes silent when something fails."""

    off: bool
    cost_s: float

    def fail(self, error: Exception) -> None:
        """Switch capture off."""


_depth = 0


def is_inside() -> bool:
    """Whether what runs now is gradaudit's own doing."""
    return _depth > 0


def guarded(method: _Method) -> _Method:
    """A failure inside gradaudit turns capture off, and the user's training goes on; the time spent is counted.

    The method's object has `off`, `fail(error)` and `cost_s`.
    """

    @wraps(method)
    def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        if self.off:
            return None
        global _depth
        _depth += 1
        start, before = time.perf_counter(), self.cost_s
        try:
            return method(self, *args, **kwargs)
        except Exception as error:
            self.fail(error)
            return None
        finally:
            _depth -= 1
            # nested calls have added their share already; the outer one's includes it
            self.cost_s = before + time.perf_counter() - start

    return call  # type: ignore[return-value]


def one_line(error: BaseException) -> str:
    """An error as part of a sentence."""
    reason = next(iter(str(error).strip().splitlines()), "")[:MAX_REASON].rstrip(". ")
    return f"{type(error).__name__}: {reason}" if reason else type(error).__name__


def warn_once(step: int, reason: str) -> None:
    """Tell the user that capture has stopped, unless warnings are errors here: those would end the training."""
    try:
        warnings.warn(
            f"gradaudit stopped recording at step {step} ({reason}); training goes on unobserved.",
            RuntimeWarning,
            stacklevel=5,
        )
    except RuntimeWarning:
        pass  # the run tells
