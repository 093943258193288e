"""`gradaudit demo`: a real failing run, its diagnosis, the same run with the settings applied, and the dashboard."""

from __future__ import annotations

import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import click

from gradaudit.errors import GradauditError

FOLDER = Path("gradaudit-runs")
BEFORE, AFTER = FOLDER / "demo-before", FOLDER / "demo-after"


@click.command()
@click.option("--no-serve", is_flag=True, help="Stop after the comparison; do not open the dashboard.")
def demo(no_serve: bool) -> None:
    """Record a small network that fails in FP16, diagnose it, train it again with the recommended settings.

    Trains on a GPU if there is one, else on the CPU, which does real FP16 as well. Both runs stay in gradaudit-runs.
    """
    for package, extra in (("torch", "torch"), ("sklearn", "demo")):
        if find_spec(package) is None:
            raise GradauditError(f'The demo needs {package}; install it with: pip install "gradaudit[{extra}]"')
    from gradaudit.analysis.audit import audit
    from gradaudit.analysis.compare import compare
    from gradaudit.cli._common import emit, terminal_options
    from gradaudit.cli.compare import as_text
    from gradaudit.reporters import text
    from gradaudit.store import open_run

    options = terminal_options()
    script = Path(__file__).parent.parent / "demo" / "train.py"
    click.echo(f"1. Training {script.name} as it is, recorded by: gradaudit run --out {BEFORE} {script.name}\n")
    _record(script, BEFORE)
    before = audit(open_run(BEFORE))
    emit("\n2. The diagnosis\n\n" + text.render(before, **options))
    click.echo(f"3. The same script again with: gradaudit run --apply {BEFORE} --out {AFTER} {script.name}\n")
    _record(script, AFTER, "--apply", str(BEFORE))
    after = audit(open_run(AFTER))
    emit("\n4. Before and after\n\n" + as_text(compare(before, after), **options))
    if no_serve:
        return
    try:
        from gradaudit_dashboard.serve import serve
    except ImportError:
        click.echo('5. To look at both in a browser: pip install "gradaudit[dashboard]", then gradaudit dashboard')
        return
    click.echo("5. Both runs in the dashboard; Ctrl-C ends it.\n")
    serve(FOLDER, "127.0.0.1", 8050, open_browser=True)


def _record(script: Path, folder: Path, *options: str) -> None:
    command = [
        sys.executable,
        "-m",
        "gradaudit",
        "run",
        "--quiet",
        "--force",
        "--out",
        str(folder),
        *options,
        str(script),
    ]
    if subprocess.run(command, check=False).returncode != 0:
        raise GradauditError("The demo's training failed; its own output above says why.")
