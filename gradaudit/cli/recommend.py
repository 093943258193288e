"""`gradaudit recommend DIR`: settings to paste, with the reasons and the predicted effect."""

from __future__ import annotations

from pathlib import Path

import click

from gradaudit.cli._common import emit, run_argument, terminal_options, text_or_json
from gradaudit.reporters.snippets import torch_lines

NO_RECOMMENDATION = "No settings can be recommended from this run; gradaudit report {path} says what it shows."


@click.command()
@run_argument
@click.option(
    "--for", "framework", metavar="NAME", default="torch", show_default=True,
    help="Whose way of writing the settings.",
)  # fmt: skip
@text_or_json
def recommend(directory: Path, framework: str, format_name: str) -> None:
    """Print the loss-scaling settings for the run in DIR, ready to paste."""
    from gradaudit.analysis.audit import audit
    from gradaudit.reporters.json_ import dumps
    from gradaudit.reporters.layout import to_string
    from gradaudit.reporters.text import recommendation_lines
    from gradaudit.store import open_run

    if framework not in FRAMEWORKS:
        raise click.BadParameter(f"{framework!r} is not supported, only {', '.join(FRAMEWORKS)}.", param_hint="--for")
    run = open_run(directory)
    report = audit(run)
    recommendation = report.recommendation
    lines = FRAMEWORKS[framework](recommendation, run.meta) if recommendation is not None else []
    if format_name == "json":
        body = report.to_dict()["recommendation"]
        emit(dumps({"format": "gradaudit-recommendation", "version": 1, "for": framework,
                    "recommendation": body, "lines": lines}))  # fmt: skip
        return
    if recommendation is None:
        emit(NO_RECOMMENDATION.format(path=directory) + "\n")
        return
    options = terminal_options()
    text = to_string(recommendation_lines(report, recommendation, width=options["width"]), colour=options["colour"])
    # not indented, so that what is copied runs
    emit("\n".join([text, *lines, ""]) if lines else text)


FRAMEWORKS = {"torch": torch_lines}
"""Per name for --for, the function that writes the settings that framework's way."""
