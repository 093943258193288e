"""What the offline commands share: the DIR argument, where output goes, and how wide and colourful it may be."""

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import click

from gradaudit.errors import GradauditError

MAX_WIDTH = 100
"""Prose in longer lines is hard to read, however wide the terminal."""

LOG_WIDTH = 80
"""Columns where the output is no terminal."""

Decorator = Callable[[Callable[..., Any]], Callable[..., Any]]

run_argument: Decorator = click.argument("directory", metavar="DIR", type=click.Path(path_type=Path))

text_or_json: Decorator = click.option(
    "--format",
    "format_name",
    type=click.Choice(["text", "json"]),
    default="text",
    show_default=True,
    help="For people or for scripts.",
)


def terminal_options(*, to_file: bool = False) -> dict[str, Any]:
    """Width in columns and whether to use colour: both from the terminal, 80 and no colour where there is none."""
    if to_file or not sys.stdout.isatty():
        return {"width": LOG_WIDTH, "colour": False}
    colour = not os.environ.get("NO_COLOR") and os.environ.get("TERM") != "dumb"
    return {"width": min(shutil.get_terminal_size().columns, MAX_WIDTH), "colour": colour}


def emit(text: str, output: Path | None = None) -> None:
    """Write to a file, or to standard output in whatever encoding that has.

    Raises:
        GradauditError: The file or the stream cannot be written.
    """
    if output is not None:
        try:
            output.write_text(text, encoding="utf-8", errors="backslashreplace")
        except OSError as error:
            reason = error.strerror or type(error).__name__
            raise GradauditError(f"{output} cannot be written ({reason}); choose another --output.") from error
        return
    encoding = sys.stdout.encoding or "utf-8"
    try:
        sys.stdout.write(text.encode(encoding, errors="backslashreplace").decode(encoding))
        sys.stdout.flush()
    except OSError as error:
        # without this the interpreter tries again when it exits, and complains
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        if not isinstance(error, BrokenPipeError):  # head or less has seen enough, which is no failure
            reason = error.strerror or type(error).__name__
            raise GradauditError(f"Standard output cannot be written ({reason}); use --output.") from error
