"""A dispatch mode that watches every operation torch runs, and changes none.

It lies on torch's mode stack only while a traced forward runs, only where nobody else's mode does and nothing was
compiled, and hands every call on unchanged.
"""

from __future__ import annotations

import sys
from typing import Any, Protocol

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from gradaudit.capture.guard import is_inside


class Observer(Protocol):
    """Whom the mode tells; neither method may raise."""

    off: bool

    def on_op_start(self, func: Any, args: Any, kwargs: Any) -> Any:
        """An operation is about to run; what is returned goes to `on_op_end`, None if that need not be called."""

    def on_op_end(self, started: Any, out: Any) -> None:
        """It returned."""


class OpTrace(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """A mode that watches. Sync: none."""

    supports_higher_order_operators = True

    def __init__(self, observer: Observer) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._observer = observer
        self._inside = 0
        self._watching = False

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # or every call would go through a wrapper of torch's; nothing compiled runs under this mode

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        """What is compiled while the mode is on is compiled as it would have been."""
        return True

    def open(self) -> bool:
        """Begin to watch; False where that would disturb somebody else's mode or compiled code."""
        stack = _stack()
        if not stack and not self._inside and not anything_compiled():
            self.__enter__()  # type: ignore[no-untyped-call]
            stack = [self]
        self._watching = any(mode is self for mode in stack)
        return self._watching

    @property
    def watching(self) -> bool:
        """Whether operations are handed to the observer."""
        return self._watching

    def close(self) -> None:
        """Stop watching, and leave the stack unless another mode has come on top."""
        self._watching = False
        stack = _stack()
        if stack and stack[-1] is self and not self._inside:
            self.__exit__(None, None, None)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if not self._watching or is_inside() or self._observer.off or torch.is_inference_mode_enabled():
            return func(*args, **kwargs)
        self._inside += 1
        try:
            started = self._observer.on_op_start(func, args, kwargs)
            out = func(*args, **kwargs)
            if started is not None:
                self._observer.on_op_end(started, out)
            return out
        finally:
            self._inside -= 1


def _stack() -> list[Any]:
    """This thread's dispatch modes. Looked at anew every time: torch saves and restores them around hooks."""
    return [torch._C._get_dispatch_stack_at(i) for i in range(torch._C._len_torch_dispatch_stack())]


def anything_compiled() -> bool:
    """Whether torch.compile was used in this process: compiled code under a dispatch mode runs other kernels."""
    eval_frame = sys.modules.get("torch._dynamo.eval_frame")
    backends: dict[int, Any] = getattr(eval_frame, "cached_backends", {})
    return any(backend is not None for backend in list(backends.values()))
