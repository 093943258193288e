"""The user's file and line behind a call into torch."""

from __future__ import annotations

import os
import sys
import sysconfig
from types import FrameType

import torch

_PACKAGE = os.path.dirname(os.path.dirname(os.path.abspath(__file__))) + os.sep
_TORCH = os.path.dirname(os.path.abspath(torch.__file__)) + os.sep
_STDLIB = sysconfig.get_paths()["stdlib"] + os.sep
_SITE = os.sep + "site-packages" + os.sep


def user_call_site() -> tuple[str | None, int | None]:
    """File and line of the innermost frame outside torch, gradaudit and the libraries around them.

    Where a framework drives the training, the outermost library frame below the user's code is not what they can edit,
    so frames in site-packages count only if there is nothing else. The file is relative to the working directory where
    it lies below it.

    Sync: none.
    """
    fallback: FrameType | None = None
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        name = frame.f_code.co_filename
        if not name.startswith((_PACKAGE, _TORCH, "<")):
            if _SITE not in name and not name.startswith(_STDLIB):
                return shorten(name), frame.f_lineno
            fallback = fallback or frame
        frame = frame.f_back
    if fallback is not None:
        return shorten(fallback.f_code.co_filename), fallback.f_lineno
    return None, None


def shorten(path: str) -> str:
    """A path relative to the working directory if it lies below it, as given otherwise."""
    try:
        relative = os.path.relpath(path)
    except ValueError:
        return path  # another drive
    return path if relative.startswith("..") else relative


def variable_name(value: object) -> str | None:
    """The name under which the calling user code holds an object, if any."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        if not frame.f_code.co_filename.startswith((_PACKAGE, _TORCH)):
            for scope in (frame.f_locals, frame.f_globals):
                for name, held in list(scope.items()):
                    if held is value and not name.startswith("_") and name != "self":
                        return name
        frame = frame.f_back
    return None
