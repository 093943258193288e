"""`gradaudit run`: record a training script while it runs, without editing it."""

from __future__ import annotations

import os
import sys
import warnings
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from gradaudit.cli.launch import TorchWatcher, exit_as, run_as_main, show_traceback
from gradaudit.errors import CaptureError, GradauditError, RunExists
from gradaudit.store.folders import default_folder

if TYPE_CHECKING:
    from gradaudit.analysis.report import Recommendation
    from gradaudit.capture.recording import Recording


@click.command(context_settings={"ignore_unknown_options": True, "allow_interspersed_args": False})
@click.option("--out", type=click.Path(path_type=Path), help="Run folder; by default gradaudit-runs/SCRIPT-DATE-TIME.")
@click.option("--force", is_flag=True, help="Replace a run that --out already holds.")
@click.option("--every", type=click.IntRange(1), default=10, show_default=True, help="Take histograms every N steps.")
@click.option(
    "--budget",
    type=click.FloatRange(0, 100, min_open=True),
    help="Percent of step time recording may cost; lengthens --every.",
)
@click.option("--include", multiple=True, metavar="GLOB", help="Histograms only of these modules and parameters.")
@click.option("--exclude", multiple=True, metavar="GLOB", help="No histograms of these.")
@click.option(
    "--apply",
    "apply_from",
    type=click.Path(path_type=Path),
    metavar="FILE|DIR",
    help="Use the settings recommended for this run, or in this JSON report, in the script's GradScaler.",
)
@click.option(
    "--origin",
    type=click.Choice(("auto", "always")),
    default="auto",
    show_default=True,
    help="Trace the operations of the forward after a fault, or at every step.",
)
@click.option(
    "--save-batch",
    is_flag=True,
    help="Keep the batch of a step that fails, to run it again with gradaudit.replay_batch. Every batch and, once a "
    "step, the weights are copied for that.",
)
@click.option("--quiet", is_flag=True, help="Say nothing; only record.")
@click.option("-m", "module", metavar="MODULE", help="Run a module instead of a script.")
@click.argument("command", nargs=-1, type=click.UNPROCESSED, metavar="SCRIPT [ARGS...]")
@click.pass_context
def run(
    ctx: click.Context,
    out: Path | None,
    force: bool,
    every: int,
    budget: float | None,
    include: tuple[str, ...],
    exclude: tuple[str, ...],
    apply_from: Path | None,
    origin: str,
    save_batch: bool,
    quiet: bool,
    module: str | None,
    command: tuple[str, ...],
) -> None:
    """Record a training script while it runs, without editing it.

    SCRIPT runs as it would under python: its arguments, input, output and exit status pass through unchanged. What
    gradaudit has to say goes to stderr when the script is done.
    """
    target, arguments = _target(module, command)
    folder = _folder(out, target, force=force)
    recommendation = _recommendation(apply_from) if apply_from is not None else None
    session = _Session(folder, (target, *arguments), force, recommendation)
    session.settings = {"every": every, "budget": budget, "include": include, "exclude": exclude}
    session.settings |= {"origin": origin, "save_batch": save_batch}
    with TorchWatcher(session.start):
        error = run_as_main(target, arguments, is_module=module is not None)
    if error is not None:
        show_traceback(error)
    session.finish(error)
    if not quiet:
        session.say_what_was_found()
    ctx.exit(exit_as(error))


def _target(module: str | None, command: tuple[str, ...]) -> tuple[str, tuple[str, ...]]:
    if module is not None:
        return module, command
    if not command:
        raise click.UsageError("Missing SCRIPT: pass the training script to run")
    script = command[0]
    if not Path(script).exists():
        raise GradauditError(f"{script} does not exist; pass the path of a training script.")
    return script, command[1:]


def _folder(out: Path | None, target: str, *, force: bool) -> Path:
    """Settle where the run goes before training starts, so that nothing is lost to a bad path."""
    rank = int(os.environ.get("RANK", "0"))
    out = default_folder(target) if out is None else out
    if rank == 0 and (out / "run.json").exists() and not force:
        raise RunExists(f"{out} already holds a run; choose another folder with --out or pass --force.")
    try:
        out.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        reason = error.strerror or type(error).__name__
        raise CaptureError(f"Cannot write the run to {out} ({reason}); choose a writable folder with --out.") from error
    if not os.access(out, os.W_OK):
        raise CaptureError(f"Cannot write the run to {out} (no permission); choose a writable folder with --out.")
    return out.resolve()


def _recommendation(source: Path) -> Recommendation:
    from gradaudit.analysis.stored import recommendation_from

    return recommendation_from(source)


class _Session:
    """The recording of one `gradaudit run`: begun when the script imports torch, ended when the script ends."""

    def __init__(self, folder: Path, argv: tuple[str, ...], force: bool, recommendation: Recommendation | None) -> None:
        self.settings: dict[str, Any] = {}
        self._folder = folder
        self._argv = argv
        self._force = force
        self._recommendation = recommendation
        self._recording: Recording | None = None

    def start(self) -> None:
        """torch is there. Training must go on whatever happens here."""
        try:
            from gradaudit.capture.recording import Recording
            from gradaudit.capture.settings import CaptureSettings

            self._recording = Recording(
                self._folder,
                CaptureSettings(**self.settings),
                argv=self._argv,
                force=self._force,
                apply=self._recommendation,
            )
        except Exception as error:
            warnings.warn(f"gradaudit records nothing ({error}); training goes on.", RuntimeWarning, stacklevel=2)

    def finish(self, error: BaseException | None) -> None:
        """The script is over; a second Ctrl-C while the run is written is waited out."""
        if self._recording is not None:
            self._recording.close(error)
        elif not any(self._folder.iterdir()):
            self._folder.rmdir()

    def say_what_was_found(self) -> None:
        """The diagnosis, on stderr."""
        if self._recording is None:
            click.echo("gradaudit: the script did not use torch, so there is nothing to record.", err=True)
            return
        try:
            from gradaudit.analysis.audit import audit
            from gradaudit.cli._common import terminal_options
            from gradaudit.reporters import text
            from gradaudit.store import open_run

            options = terminal_options(to_file=not sys.stderr.isatty())
            click.echo("", err=True)
            click.echo(text.render(audit(open_run(self._folder)), **options).rstrip(), err=True)
        except GradauditError as error:
            click.echo(f"gradaudit: {error}", err=True)
        shown = os.path.relpath(self._folder)
        shown = str(self._folder) if shown.startswith("..") else shown
        click.echo(f"\nRun recorded in {shown}. Look at it with: gradaudit dashboard {shown}", err=True)
