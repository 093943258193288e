"""`gradaudit report DIR`: what is wrong with a recorded run, why that is known, and what to do."""

from __future__ import annotations

import difflib
from collections.abc import Sequence
from pathlib import Path

import click

from gradaudit.cli._common import emit, run_argument, terminal_options
from gradaudit.reporters import FORMATS, renderer

FAIL_ON = {"error": ("error",), "warning": ("error", "warning"), "never": ()}
"""Severities that make the exit status 1."""


@click.command()
@run_argument
@click.option(
    "--format", "format_name", type=click.Choice(list(FORMATS)), default="text", show_default=True,
    help="Text for a terminal, JSON for scripts, Markdown for an issue, HTML as one page that opens offline.",
)  # fmt: skip
@click.option("--output", type=click.Path(path_type=Path), metavar="FILE", help="Write to FILE, not to the terminal.")
@click.option(
    "--fail-on", type=click.Choice(list(FAIL_ON)), default="never", show_default=True,
    help="Exit with status 1 when a finding is this severe, or more.",
)  # fmt: skip
@click.option(
    "--ignore", multiple=True, metavar="ID[:GLOB]",
    help="Leave out the findings of check ID, before verdict and exit status; with GLOB only where it matches the name "
    "of a module, parameter or other place of the finding. May be repeated.",
)  # fmt: skip
@click.pass_context
def report(
    ctx: click.Context, directory: Path, format_name: str, output: Path | None, fail_on: str, ignore: tuple[str, ...]
) -> None:
    """Say what is wrong with the run in DIR, why, and what to do about it.

    Exit status: 0, or 1 when a finding reaches --fail-on; 2 when DIR cannot be read.
    """
    from gradaudit.analysis.audit import CHECK_IDS, audit
    from gradaudit.store import open_run

    _require_known(ignore, CHECK_IDS)
    result = audit(open_run(directory), ignore=ignore)
    options = terminal_options(to_file=output is not None) if format_name == "text" else {}
    emit(renderer(format_name)(result, **options), output)
    if any(finding.severity in FAIL_ON[fail_on] for finding in result.findings):
        ctx.exit(1)


def _require_known(ignore: Sequence[str], check_ids: Sequence[str]) -> None:
    for pattern in ignore:
        name = pattern.partition(":")[0]
        if name not in check_ids:
            close = difflib.get_close_matches(name, check_ids)
            hint = f"did you mean {' or '.join(close)}?" if close else f"the checks are {', '.join(sorted(check_ids))}"
            raise click.UsageError(f"--ignore {pattern!r}: there is no check {name!r}, {hint}")
