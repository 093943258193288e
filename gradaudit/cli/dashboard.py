"""`gradaudit dashboard [DIR]`: browse one run or a folder of runs, live while they train."""

from __future__ import annotations

from pathlib import Path

import click

from gradaudit.errors import GradauditError

DEFAULT_DIRECTORY = Path("gradaudit-runs")
"""Where `gradaudit run` puts runs without --out."""


@click.command()
@click.argument("directory", metavar="[DIR]", type=click.Path(path_type=Path), required=False)
@click.option("--host", default="127.0.0.1", show_default=True, help="Loopback address to listen on.")
@click.option(
    "--port", type=click.IntRange(0, 65535), default=8050, show_default=True, help="TCP port; 0 takes a free one."
)
@click.option("--no-open", is_flag=True, help="Do not open a browser.")
def dashboard(directory: Path | None, host: str, port: int, no_open: bool) -> None:
    """Browse one run or a folder of runs in a browser, live while they train.

    DIR is a run folder or a folder of runs; without it, gradaudit-runs in the current folder. The pages are served to
    this machine only and change nothing. Ctrl-C ends it.
    """
    if directory is None:
        if not DEFAULT_DIRECTORY.is_dir():
            raise click.UsageError(f"Missing DIR: there is no {DEFAULT_DIRECTORY} here, so pass a run folder")
        directory = DEFAULT_DIRECTORY
    try:
        from gradaudit_dashboard.serve import serve
    except ImportError as error:
        raise GradauditError(
            f"The dashboard needs {error.name or 'packages that are not installed'}; install it with: "
            'pip install "gradaudit[dashboard]"'
        ) from error
    serve(directory, host, port, open_browser=not no_open)
