"""`gradaudit compare DIR_A DIR_B`: what changed from one run to another."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import click

from gradaudit.cli._common import emit, terminal_options, text_or_json

if TYPE_CHECKING:
    from rich.text import Text

    from gradaudit.analysis.compare import Comparison, Side

NUM_LAYERS = 10
"""Layers listed as text; the JSON form holds all that both runs have."""


@click.command()
@click.argument("directory_a", metavar="DIR_A", type=click.Path(path_type=Path))
@click.argument("directory_b", metavar="DIR_B", type=click.Path(path_type=Path))
@text_or_json
def compare(directory_a: Path, directory_b: Path, format_name: str) -> None:
    """Show what changed from the run in DIR_A to the run in DIR_B."""
    from gradaudit.analysis.audit import audit
    from gradaudit.analysis.compare import compare as compare_reports
    from gradaudit.reporters.json_ import dumps
    from gradaudit.store import open_run

    runs = [open_run(directory) for directory in (directory_a, directory_b)]
    comparison = compare_reports(*(audit(run) for run in runs))
    if format_name == "json":
        emit(dumps(comparison.to_dict()))
        return
    emit(as_text(comparison, **terminal_options()))


def as_text(comparison: Comparison, *, width: int, colour: bool) -> str:
    """A comparison for people: the runs side by side, the findings, the largest changes of SQNR."""
    from gradaudit.reporters.layout import to_string

    return to_string(_lines(comparison, width), colour=colour)


def _lines(comparison: Comparison, width: int) -> list[Text]:
    from rich.text import Text

    from gradaudit.reporters.layout import paragraph, table
    from gradaudit.reporters.words import format_db, plural, prose, unbroken

    rows = [
        (label, of_a, of_b) for (label, of_a), (_, of_b) in zip(_rows(comparison.a), _rows(comparison.b), strict=True)
    ]
    lines = table([("", "A", "B"), *rows], indent=0, header=True)
    lines += [Text(), Text("Findings" if comparison.findings else "Findings: none in either run", style="bold")]
    for change in comparison.findings:
        first = f"  {change.status:5}  "
        lines += paragraph(f"{change.id}: {prose(change.title)}", width=width, first=first, indent=len(first))
    changed = [layer for layer in comparison.layers if layer.change_db != 0][:NUM_LAYERS]
    if changed:
        title = f"Largest SQNR changes, {len(changed)} of the {len(comparison.layers):,} tensors that both runs have"
        lines += [Text(), Text(title, style="bold")]
    for layer in changed:
        change_words = f"{layer.change_db:+.1f} dB"
        first = f"  {change_words:>10}  "
        name = unbroken(f"{layer.fqn} [{layer.op}]" if layer.op and layer.kind == "op_grad" else layer.fqn)
        text = f"{name} ({layer.kind}): {format_db(layer.sqnr_db_a)} -> {format_db(layer.sqnr_db_b)}"
        lines += paragraph(text, width=width, first=first, indent=len(first))
    if comparison.num_layers_only_a or comparison.num_layers_only_b:
        text = f"{plural(comparison.num_layers_only_a, 'tensor')} only in A, {comparison.num_layers_only_b:,} only in B"
        lines += paragraph(text, width=width, indent=2)
    return lines


def _rows(side: Side) -> list[tuple[str, str]]:
    from gradaudit.reporters.words import (
        LEVEL_WORDS,
        UNKNOWN,
        clean,
        format_db,
        format_number,
        format_scale,
        format_share,
    )

    scales = "none"
    if side.scale_min is not None and side.scale_max is not None:
        scales = f"{format_scale(side.scale_min)} to {format_scale(side.scale_max)}"
    losses = [UNKNOWN if loss is None else format_number(loss) for loss in (side.loss_first, side.loss_last)]
    return [
        ("run", clean(side.name)),
        ("verdict", LEVEL_WORDS[side.level]),
        ("skipped steps", f"{side.num_skipped:,} of {side.num_steps:,}"),
        ("skip rate", f"{format_share(side.skip_rate)} of attempted"),
        ("scale range", scales),
        ("lowest SQNR", format_db(side.min_sqnr_db)),
        ("first loss", losses[0]),
        ("last loss", losses[1]),
    ]
