"""`gradaudit recommend DIR`: settings to paste, with the reasons and the predicted effect."""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import click

from gradaudit.analysis.report import Recommendation
from gradaudit.cli._common import emit, run_argument, terminal_options, text_or_json

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


def torch_lines(recommendation: Recommendation, meta: Mapping[str, Any]) -> list[str]:
    """Python to paste into a plain PyTorch script; empty when the settings may stay.

    Args:
        recommendation: What to write down.
        meta: run.json, for the device and the scaler's class.
    """
    if not recommendation.change_needed:
        return []
    autocast = meta.get("autocast") or [{}]
    device = autocast[0].get("device", "cuda")
    if recommendation.precision == "bf16":
        return [f'with torch.autocast("{device}", dtype=torch.bfloat16):  # and no GradScaler', "    ..."]
    lines = []
    if recommendation.precision == "fp32-modules":
        lines += [
            "# in the forward of each module to keep in FP32:",
            f'with torch.autocast("{device}", enabled=False):',
            "    ...  # on inputs cast with .float()",
            "",
        ]
    scalers = meta.get("scalers") or [{}]
    sharded = scalers[0].get("class") == "ShardedGradScaler"
    return [
        *lines,
        f"scaler = {'ShardedGradScaler' if sharded else 'torch.amp.GradScaler'}(",
        f'    "{device}",',
        f"    init_scale={power_of_two(recommendation.init_scale)},",
        f"    growth_factor={recommendation.growth_factor!r},",
        f"    backoff_factor={recommendation.backoff_factor!r},",
        f"    growth_interval={recommendation.growth_interval},",
        ")",
        f"# GradScaler has no min_scale: stop where scaler.get_scale() falls below "
        f"{power_of_two(recommendation.min_scale)}, a lower scale will not help",
    ]


def power_of_two(value: float) -> str:
    """A scale as one writes it in Python: `2.0**14`, or the plain number where it is no power of two."""
    mantissa, exponent = math.frexp(value)
    return f"2.0**{exponent - 1}" if mantissa == 0.5 else repr(float(value))


FRAMEWORKS = {"torch": torch_lines}
"""Per name for --for, the function that writes the settings that framework's way."""
