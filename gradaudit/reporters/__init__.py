"""Reporters: `render(report) -> str`, one module per format. They choose words and layout, never thresholds."""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module

FORMATS = {
    "text": "gradaudit.reporters.text",
    "json": "gradaudit.reporters.json_",
    "markdown": "gradaudit.reporters.markdown",
    "html": "gradaudit.reporters.html",
}
"""Module per format, imported when it is asked for: rich and jinja2 are slow to load."""


def renderer(name: str) -> Callable[..., str]:
    """The `render` function of one of FORMATS."""
    render: Callable[..., str] = import_module(FORMATS[name]).render
    return render


__all__ = ["FORMATS", "renderer"]
