"""The user's file and line behind a call into torch, and the names under which they hold things."""

from __future__ import annotations

import inspect
import os
import sys
import sysconfig
from collections.abc import Iterator
from types import FrameType
from typing import Any

import torch

_PACKAGE = os.path.dirname(os.path.dirname(os.path.abspath(__file__))) + os.sep
_TORCH = os.path.dirname(os.path.abspath(torch.__file__)) + os.sep
_STDLIB = sysconfig.get_paths()["stdlib"] + os.sep
_SITE = os.sep + "site-packages" + os.sep


_USER, _LIBRARY, _PASSED_OVER = range(3)

_files: dict[str, tuple[int, str]] = {}
"""Whose a source file is, and its shortened name; as many entries as a process has source files."""


def user_call_site() -> tuple[str | None, int | None]:
    """File and line of the innermost frame outside torch, gradaudit and the libraries around them.

    Where a framework drives the training, the outermost library frame below the user's code is not what they can edit,
    so frames in site-packages count only if there is nothing else. The file is relative to the working directory where
    it lies below it.

    Sync: none.
    """
    return call_site_of(sys._getframe(1))


def call_site_of(frame: FrameType | None) -> tuple[str | None, int | None]:
    """The call site as seen from a frame: the user's innermost line in it or around it. Sync: none."""
    fallback: FrameType | None = None
    while frame is not None:
        name = frame.f_code.co_filename
        whose, short = _files.get(name) or _classify(name)
        if whose == _USER:
            return short, frame.f_lineno
        if whose == _LIBRARY and fallback is None:
            fallback = frame
        frame = frame.f_back
    if fallback is not None:
        return shorten(fallback.f_code.co_filename), fallback.f_lineno
    return None, None


def construction_site(made: object) -> tuple[str | None, int | None]:
    """The line that makes an object, seen from within its constructor: not one of a constructor of the user's own."""
    frame: FrameType | None = sys._getframe(1)
    outside = frame
    while frame is not None:
        code = frame.f_code
        is_constructor = code.co_name == "__init__" and code.co_argcount > 0
        if is_constructor and _local_variables(frame).get(code.co_varnames[0]) is made:
            outside = frame.f_back
        frame = frame.f_back
    return call_site_of(outside)


def is_users(filename: str) -> bool:
    """Whether a source file is neither torch's, gradaudit's nor another library's."""
    return (_files.get(filename) or _classify(filename))[0] == _USER


def _classify(filename: str) -> tuple[int, str]:
    if filename.startswith((_PACKAGE, _TORCH, "<")):
        whose = _PASSED_OVER
    else:
        whose = _LIBRARY if _SITE in filename or filename.startswith(_STDLIB) else _USER
    _files[filename] = found = (whose, shorten(filename))
    return found


def shorten(path: str) -> str:
    """A path relative to the working directory if it lies below it, as given otherwise."""
    try:
        relative = os.path.relpath(path)
    except ValueError:
        return path  # another drive
    return path if relative.startswith("..") else relative


def variable_name(value: object) -> str | None:
    """The name under which the calling user code holds an object, if any."""
    for frame, variables in _scopes():
        for scope in (variables, frame.f_globals):
            for name, held in list(scope.items()):
                if held is value and not name.startswith("_") and name != "self":
                    return name
    return None


def enclosing_module(module: torch.nn.Module) -> torch.nn.Module | None:
    """The outermost module around one that is being called by hand.

    Looked for among the first arguments of the functions that lead there: a method's own module, or the model that a
    function was given.
    """
    found = None
    for frame, variables in _scopes():
        first = frame.f_code.co_varnames[0] if frame.f_code.co_argcount else ""
        caller = variables.get(first)
        if isinstance(caller, torch.nn.Module) and any(child is module for child in caller.modules()):
            found = caller
    return found


def _scopes() -> Iterator[tuple[FrameType, dict[str, Any]]]:
    """Frames outside torch and gradaudit with their local variables, innermost first."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        if not frame.f_code.co_filename.startswith((_PACKAGE, _TORCH)):
            yield frame, _local_variables(frame)
        frame = frame.f_back


def _local_variables(frame: FrameType) -> dict[str, Any]:
    looked_at = frame.f_locals
    variables = dict(looked_at)
    # before Python 3.13 a function's locals, once looked at, are kept alive in a dict of the frame's until the function
    # returns, the first batch of a whole training among them. It is emptied, unless the user holds it too after a call
    # of locals(): two references are the frame's and ours, the third is getrefcount's own
    is_function = frame.f_code.co_flags & inspect.CO_OPTIMIZED
    if is_function and isinstance(looked_at, dict) and sys.getrefcount(looked_at) <= 3:
        looked_at.clear()
    return variables
