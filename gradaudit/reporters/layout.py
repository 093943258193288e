"""Lines for a terminal or a log file: paragraphs and tables of a given width that never break a name.

A word longer than the line stays whole and runs over, so that it can be copied.
"""

from __future__ import annotations

import io
from collections.abc import Iterable, Sequence

from rich.cells import cell_len
from rich.console import Console
from rich.text import Text

from gradaudit.reporters.words import NO_BREAK, glued

MIN_WIDTH = 40
"""Below this, wrapped evidence is harder to read than lines that run over."""


def to_string(lines: Iterable[Text], *, colour: bool) -> str:
    """The lines as one string, with ANSI colours only where asked for."""
    buffer = io.StringIO()
    console = Console(
        file=buffer,
        force_terminal=colour,
        color_system="standard" if colour else None,
        no_color=not colour,
        markup=False,
        emoji=False,
        highlight=False,
        legacy_windows=False,
        width=MIN_WIDTH,  # unused with soft_wrap, but keeps rich from asking the terminal
    )
    for line in lines:
        line.rstrip()
        console.print(line, soft_wrap=True)
    return buffer.getvalue()


def paragraph(text: str, *, width: int, first: Text | str = "", indent: int = 0, style: str = "") -> list[Text]:
    """Text wrapped to `width` columns, the first line behind `first`, the others indented.

    Args:
        text: Words; white space between them may become a line break.
        width: Columns to stay within, where words allow.
        first: What stands before the first line, padded to `indent` columns.
        indent: Columns in front of every line.
        style: Of the text, not of `first`.
    """
    lines = []
    for number, words in enumerate(wrap(text, max(width, MIN_WIDTH) - indent)):
        start = Text.assemble(first) if number == 0 else Text()
        start.append(" " * (indent - start.cell_len))
        lines.append(start.append(words, style=style))
    return lines


def wrap(text: str, width: int) -> list[str]:
    """Greedy line breaks at spaces, by terminal columns; at least one line, no word or `unbroken` name is broken."""
    lines = [""]
    for word in glued(text).split(" "):
        longer = f"{lines[-1]} {word}" if lines[-1] else word
        if lines[-1] and cell_len(longer) > width:
            lines.append(word)
        else:
            lines[-1] = longer
    return [line.replace(NO_BREAK, " ") for line in lines]


def table(rows: Sequence[Sequence[str]], *, indent: int = 2, header: bool = False) -> list[Text]:
    """Columns padded to their widest cell, two spaces apart; the last one is free to run over."""
    widths = [max(cell_len(row[column]) for row in rows) for column in range(len(rows[0]))] if rows else []
    lines = []
    for number, row in enumerate(rows):
        cells = [cell + " " * (width - cell_len(cell)) for cell, width in zip(row, widths, strict=True)]
        line = " " * indent + "  ".join(cells)
        lines.append(Text(line.rstrip(), style="dim" if header and number == 0 else ""))
    return lines
