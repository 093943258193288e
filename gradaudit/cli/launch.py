"""Runs a user's script or module in this process as `python` would.

torch is not imported for the script's sake: what it sets in the environment before its own import still counts. A
finder on sys.meta_path waits for that import and attaches right after it.
"""

from __future__ import annotations

import builtins
import importlib.util
import os
import runpy
import signal
import sys
import types
from collections.abc import Callable, Sequence
from importlib.machinery import ModuleSpec
from pathlib import Path
from typing import Any

_PACKAGE = os.path.dirname(os.path.dirname(os.path.abspath(__file__))) + os.sep
_LAUNCHERS = (_PACKAGE, "<gradaudit", "<frozen runpy>", "<frozen importlib", os.path.abspath(runpy.__file__))


class TorchWatcher:
    """Calls a function once torch has been imported; a context manager that takes itself off the import path."""

    def __init__(self, then: Callable[[], None]) -> None:
        self._then = then

    def __enter__(self) -> TorchWatcher:
        if "torch" in sys.modules:
            self._then()
        else:
            sys.meta_path.insert(0, self)
        return self

    def __exit__(self, *_: object) -> None:
        if self in sys.meta_path:
            sys.meta_path.remove(self)

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> ModuleSpec | None:
        """The import system's question; answered for torch by the other finders, with a loader that tells us."""
        if name != "torch":
            return None
        self.__exit__()
        spec = importlib.util.find_spec("torch")
        loader: Any = spec.loader if spec is not None else None
        if loader is None:
            return spec
        execute = loader.exec_module

        def exec_module(module: types.ModuleType) -> None:
            execute(module)
            self._then()

        loader.exec_module = exec_module
        return spec


def run_as_main(target: str, arguments: Sequence[str], *, is_module: bool) -> BaseException | None:
    """Run a script or module as __main__.

    Args:
        target: Path of a script (or of a folder or archive with a __main__), or a module's name.
        arguments: Its arguments.
        is_module: Whether `target` is a module's name.

    Returns:
        What ended it, SystemExit and KeyboardInterrupt included; None if it ran to its end.
    """
    sys.argv = [target, *arguments]
    try:
        if is_module:
            sys.path.insert(0, os.getcwd())
            runpy.run_module(target, run_name="__main__", alter_sys=True)
        elif Path(target).is_file() and target.endswith((".py", ".pyw")):
            _run_file(target)
        else:
            runpy.run_path(target, run_name="__main__")
    except BaseException as error:
        return error
    return None


def _run_file(path: str) -> None:
    # a module of its own, kept in sys.modules: pickling and late callbacks find __main__ as they are used to
    module = types.ModuleType("__main__")
    module.__dict__.update(__file__=path, __builtins__=builtins, __spec__=None, __cached__=None)
    sys.modules["__main__"] = module
    sys.path.insert(0, os.path.dirname(os.path.abspath(path)))
    with open(path, "rb") as file:
        code = compile(file.read(), path, "exec")
    exec(code, module.__dict__)


def show_traceback(error: BaseException) -> None:
    """Print an exception as the interpreter would have, without the frames that gradaudit added."""
    if isinstance(error, SystemExit):
        if error.code is not None and not isinstance(error.code, int):
            print(error.code, file=sys.stderr)
        return
    seen: BaseException | None = error
    while seen is not None:
        seen.__traceback__ = _without_our_frames(seen.__traceback__)
        seen = seen.__cause__ or seen.__context__
    sys.excepthook(type(error), error, error.__traceback__)


def _without_our_frames(trace: types.TracebackType | None) -> types.TracebackType | None:
    kept = []
    while trace is not None:
        if not trace.tb_frame.f_code.co_filename.startswith(_LAUNCHERS):
            kept.append(trace)
        trace = trace.tb_next
    for entry, following in zip(kept, [*kept[1:], None], strict=True):
        entry.tb_next = following
    return kept[0] if kept else None


def exit_as(error: BaseException | None) -> int:
    """The exit status the script would have had; does not return for Ctrl-C, which ends by the signal itself."""
    if error is None:
        return 0
    if isinstance(error, SystemExit):
        if error.code is None:
            return 0
        return error.code if isinstance(error.code, int) else 1
    if isinstance(error, KeyboardInterrupt):
        sys.stdout.flush()
        sys.stderr.flush()
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        os.kill(os.getpid(), signal.SIGINT)
    return 1
