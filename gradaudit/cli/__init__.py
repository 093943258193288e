"""The `gradaudit` command. Each subcommand's module is imported when it is called, so that --help stays instant."""

from __future__ import annotations

from importlib import import_module
from typing import Any

import click

from gradaudit import __version__
from gradaudit.errors import GradauditError

COMMANDS = {
    "run": ("gradaudit.cli.run:run", "Record a training script while it runs, without editing it."),
    "report": ("gradaudit.cli.report:report", "Say what is wrong with a recorded run, why, and what to do."),
    "recommend": ("gradaudit.cli.recommend:recommend", "Print the loss-scaling settings to use, ready to paste."),
    "replay": ("gradaudit.cli.replay:replay", "Predict what other scaler settings would have done on a run."),
    "compare": ("gradaudit.cli.compare:compare", "Show what changed between two runs."),
    "dashboard": ("gradaudit.cli.dashboard:dashboard", "Browse one run or a folder of runs, live while they train."),
    "demo": ("gradaudit.cli.demo:demo", "Record a small failing run and open it."),
}
"""Where each subcommand lives, and its one line in `gradaudit --help`."""


class Failure(click.ClickException):
    """Exit status 2 with one sentence on stderr: a usage error, or a run that cannot be read."""

    exit_code = 2


def _one_sentence(error: click.UsageError | GradauditError, path: str) -> Failure:
    from gradaudit.reporters.words import prose

    if isinstance(error, GradauditError):
        return Failure(prose(str(error)))
    path = error.ctx.command_path if error.ctx is not None else path
    message = prose(error.format_message())
    return Failure(f"{message}{'' if message.endswith(('.', '?')) else '.'} See {path} --help.")


class LazyGroup(click.Group):
    """A group that knows its subcommands from COMMANDS and imports one only to run it."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        """Names in the order of a user's work, not of the alphabet."""
        return list(COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        """Import one subcommand."""
        if cmd_name not in COMMANDS:
            return None
        module, _, attribute = COMMANDS[cmd_name][0].partition(":")
        command: click.Command = getattr(import_module(module), attribute)
        return command

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        """Name the commands there are when asked for another."""
        if args[0] not in COMMANDS and not args[0].startswith("-"):
            ctx.fail(f"There is no command {args[0]!r}: the commands are {', '.join(COMMANDS)}")
        return super().resolve_command(ctx, args)

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """List the subcommands without importing any."""
        with formatter.section("Commands"):
            formatter.write_dl([(name, help_line) for name, (_, help_line) in COMMANDS.items()])

    def make_context(
        self, info_name: str | None, args: list[str], parent: click.Context | None = None, **extra: Any
    ) -> click.Context:
        """Parse the options before the subcommand."""
        try:
            return super().make_context(info_name, args, parent, **extra)
        except click.UsageError as error:
            raise _one_sentence(error, str(info_name)) from error

    def invoke(self, ctx: click.Context) -> Any:
        """Run the subcommand."""
        try:
            return super().invoke(ctx)
        except (click.UsageError, GradauditError) as error:
            raise _one_sentence(error, f"{ctx.command_path} {ctx.invoked_subcommand}") from error


@click.group(cls=LazyGroup, invoke_without_command=True, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(__version__, prog_name="gradaudit")
@click.pass_context
def main(ctx: click.Context) -> None:
    """Find out why FP16 training misbehaves, and which loss-scaling settings cure it.

    \b
    Record:   gradaudit run --out runs/a train.py
    Diagnose: gradaudit report runs/a
    """
    if ctx.invoked_subcommand is None:
        click.echo(ctx.get_help())


__all__ = ["COMMANDS", "main"]
