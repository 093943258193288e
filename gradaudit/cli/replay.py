"""`gradaudit replay DIR`: what other scaler settings would have done on the same recorded run."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from gradaudit.cli._common import emit, run_argument, terminal_options, text_or_json

if TYPE_CHECKING:
    from gradaudit.analysis.replay import ReplayResult, TorchPolicy
    from gradaudit.analysis.report import AuditReport

TORCH_DEFAULTS = {"init_scale": 2.0**16, "growth_interval": 2000, "growth_factor": 2.0, "backoff_factor": 0.5}
"""Of torch.amp.GradScaler, for a run that recorded no scaler."""


@click.command()
@run_argument
@click.option(
    "--policy", "policy_name", type=click.Choice(["torch"]), default="torch", show_default=True,
    help="The scaler's rule: torch is torch.amp.GradScaler's.",
)  # fmt: skip
@click.option("--init-scale", type=float, metavar="X", help="Loss scale to start at.")
@click.option("--growth-interval", type=int, metavar="N", help="Steps without overflow before the scale grows.")
@click.option("--growth-factor", type=float, metavar="X", help="What the scale grows by.")
@click.option("--backoff-factor", type=float, metavar="X", help="What the scale is multiplied by after an overflow.")
@text_or_json
def replay(directory: Path, policy_name: str, format_name: str, **settings: float | None) -> None:
    """Predict what other scaler settings would have done on the run in DIR.

    Settings not given stay as they were in the run; torch's defaults where it had no scaler.
    """
    from gradaudit.analysis.audit import audit
    from gradaudit.analysis.replay import TorchPolicy
    from gradaudit.analysis.replay import replay as replay_run
    from gradaudit.reporters.json_ import dumps
    from gradaudit.store import open_run

    run = open_run(directory)
    chosen = recorded_settings(run.meta) | {name: value for name, value in settings.items() if value is not None}
    try:
        policy = TorchPolicy(**chosen)
    except ValueError as error:
        raise click.UsageError(str(error)) from error
    report = audit(run)
    result = replay_run(run, policy)
    if format_name == "json":
        emit(dumps(_body(report, result, {"name": policy_name, **chosen})))
    else:
        emit(_text(report, result, policy))


def recorded_settings(meta: Mapping[str, Any]) -> dict[str, Any]:
    """The settings of the run's first enabled scaler, from run.json."""
    enabled = [scaler for scaler in meta.get("scalers") or [] if scaler.get("enabled")]
    recorded = enabled[0] if enabled else {}
    return {name: recorded.get(name, default) for name, default in TORCH_DEFAULTS.items()}


def _lowest_sqnr_db(report: AuditReport) -> float | None:
    return report.recommendation.current.min_sqnr_db if report.recommendation is not None else None


def _scales(result: ReplayResult) -> list[float]:
    return [float(scale) for scale in result.scale]


def _body(report: AuditReport, result: ReplayResult, policy: Mapping[str, Any]) -> dict[str, Any]:
    run, scales = report.run, _scales(result)
    points = [
        (int(step), scale)
        for number, (step, scale) in enumerate(zip(result.step, scales, strict=True))
        if number in (0, len(scales) - 1) or scale != scales[number - 1]
    ]
    return {
        "format": "gradaudit-replay",
        "version": 1,
        "policy": policy,
        "num_steps": result.num_steps,
        "recorded": {
            "num_skipped": run.num_skipped,
            "skip_rate": run.num_skipped / run.num_steps if run.num_steps else 0.0,
            "min_sqnr_db": _lowest_sqnr_db(report),
            "scale_first": run.scale_first,
            "scale_last": run.scale_last,
        },
        "predicted": {
            "num_skipped": result.num_skipped,
            "num_skipped_low": result.num_skipped_low,
            "num_skipped_high": result.num_skipped_high,
            "skip_rate": result.skip_rate,
            "min_sqnr_db": result.min_sqnr_db,
            "scale_first": scales[0] if scales else None,
            "scale_last": scales[-1] if scales else None,
            "scale_points": points,
        },
    }


def _text(report: AuditReport, result: ReplayResult, policy: TorchPolicy) -> str:
    from gradaudit.analysis.report import Outlook
    from gradaudit.reporters.layout import paragraph, table, to_string
    from gradaudit.reporters.words import format_db, format_number, format_scale, format_share, format_skipped, plural

    options = terminal_options()
    run, scales = report.run, _scales(result)
    if not scales:
        return "Nothing to replay: the run recorded no step.\n"
    rule = (
        f"torch: init_scale {format_scale(policy.init_scale)}, "
        f"growth_interval {plural(policy.growth_interval, 'step')}, "
        f"growth_factor {format_number(policy.growth_factor)}, backoff_factor {format_number(policy.backoff_factor)}"
    )
    outlook = Outlook(
        result.num_skipped, result.skip_rate, result.min_sqnr_db, result.num_skipped_low, result.num_skipped_high
    )
    rows = [
        (f"on {plural(result.num_steps, 'step')}", "recorded", "predicted"),
        ("skipped steps", f"{run.num_skipped:,}", format_skipped(outlook)),
        ("skip rate", format_share(run.num_skipped / max(run.num_steps, 1)), format_share(result.skip_rate)),
        ("lowest SQNR", format_db(_lowest_sqnr_db(report)), format_db(result.min_sqnr_db)),
        ("first scale", format_scale(run.scale_first), format_scale(scales[0])),
        ("last scale", format_scale(run.scale_last), format_scale(scales[-1])),
        ("lowest scale", _lowest_recorded(report), format_scale(min(scales))),
        ("highest scale", _highest_recorded(report), format_scale(max(scales))),
    ]
    first = "Replay  "
    lines = paragraph(rule, width=options["width"], first=first, indent=len(first))
    return to_string([*lines, *table(rows, header=True)], colour=options["colour"])


def _lowest_recorded(report: AuditReport) -> str:
    from gradaudit.reporters.words import format_scale

    return format_scale(min((scale for _, scale in report.history.scale_points), default=None))


def _highest_recorded(report: AuditReport) -> str:
    from gradaudit.reporters.words import format_scale

    return format_scale(max((scale for _, scale in report.history.scale_points), default=None))
