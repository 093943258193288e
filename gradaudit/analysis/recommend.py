"""Settings for the GradScaler, with what they would have done on the recorded run beside what was done.

The scale starts as high as is safe, since starting too high costs one skipped step per halving and starting too low
costs a whole growth interval per doubling. The growth interval chooses the skip rate: with factors 2 and 0.5 it lies
between 0.693 / N and 1 / (N + 1) whatever the gradients look like (design section 5).
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from gradaudit.analysis.causes import BORN_IN_FORWARD, BORN_SOMEWHERE, SCALE_FELL
from gradaudit.analysis.checks.base import percent
from gradaudit.analysis.context import TARGET_DB, Analysis
from gradaudit.analysis.history import ScalerSettings
from gradaudit.analysis.overflows import LIMIT_LOG2
from gradaudit.analysis.replay import ReplayResult, TorchPolicy, lowest_sqnr_db, replay
from gradaudit.analysis.report import Finding, Outlook, Recommendation, Settings
from gradaudit.analysis.windows import Windows, limit_log2

TARGET_SKIP_RATE = 0.001
"""One step in a thousand: a cost nobody notices, and often enough to find a better scale within an epoch."""

RUN_SHARE = 4
"""The interval is at most a quarter of the run, so that a scale that fell can come back before the end."""

MIN_INTERVAL = 200
"""Shorter than this, growing alone would skip up to half a percent of the steps."""

DEFAULT_LOG2 = 16
"""torch's own start."""

MARGIN_LOG2 = 1
"""Start one binade below the largest safe scale: the next batch is not one of the recorded ones."""

NO_SCALE_WILL_DO = frozenset({*SCALE_FELL, "scale-window-empty"})
"""Findings beside which no scale can be recommended, whatever else is wrong."""

NOT_THE_SCALE = NO_SCALE_WILL_DO | {*BORN_SOMEWHERE, "divergence"}
"""Findings that no scale setting cures."""

TAKE_OUT_OF_FP16 = frozenset({*SCALE_FELL, *BORN_IN_FORWARD, *BORN_SOMEWHERE[-3:]}) - {"nonfinite-input"}
"""Those of them that leaving FP16 for a part of the model does cure."""


def recommend(analysis: Analysis, found_windows: Windows, findings: Sequence[Finding]) -> Recommendation | None:
    """Choose settings, or say that none are needed or none will do.

    Args:
        analysis: The run.
        found_windows: Its safe windows.
        findings: What the checks found.

    Returns:
        None where nothing ran in FP16 or nothing was recorded, so that there is no scale to speak of.
    """
    if not analysis.ran_fp16 or not len(analysis.steps):
        return None
    history = analysis.history
    current_settings = history.settings if history is not None else None
    current = _current(analysis)
    alarming = [finding for finding in findings if finding.severity != "info"]
    roots = [finding for finding in alarming if finding.consequence_of is None]
    helped = [f for f in alarming if f.scale_can_fix != "no" and (f.consequence_of or f.id) not in NOT_THE_SCALE]
    hopeless = [f for f in alarming if f.id in NO_SCALE_WILL_DO or (f.id in NOT_THE_SCALE and not helped)]
    if hopeless:
        cured = any(f.id in TAKE_OUT_OF_FP16 or f.id == "scale-window-empty" for f in roots)
        precision = "fp32-modules" if cured else "fp16"
        return _keep(analysis, found_windows, current, precision, _why_not(hopeless, roots, found_windows))
    uncured = [
        f"No scaler setting cures this: {finding.title[0].lower()}{finding.title[1:]}."
        for finding in roots
        if finding not in helped
    ]
    if not helped and (current_settings is not None or roots):
        reasons = uncured or ["The settings in use do no harm on this run: change nothing."]
        return _keep(analysis, found_windows, current, "fp16", reasons)
    policy, reasons = _choose(analysis, found_windows)
    reasons += uncured
    predicted = replay(analysis, policy)
    return _made_of(policy, found_windows, current, current_settings, predicted, reasons)


def _choose(analysis: Analysis, found_windows: Windows) -> tuple[TorchPolicy, list[str]]:
    level, reason = _start_log2(analysis, found_windows)
    reasons = [reason]
    window, lowest = found_windows.run, found_windows.lowest
    if window.low_log2 is not None and lowest is not None:
        reasons.append(f"Below 2^{window.low_log2} {lowest.described} drops under {TARGET_DB:g} dB.")
    wanted = math.ceil(1 / TARGET_SKIP_RATE)
    interval = max(MIN_INTERVAL, min(wanted, len(analysis.steps) // RUN_SHARE))
    aim = "short enough to grow within a run of this length" if interval < wanted else "one in a thousand is aimed at"
    reasons.append(
        f"growth_interval {interval:,}: in the long run {percent(0.693 / interval)} to {percent(1 / (interval + 1))} "
        f"of the steps are skipped; {aim}."
    )
    return TorchPolicy(init_scale=2.0 ** max(min(level, 127), -100), growth_interval=interval), reasons


def _start_log2(analysis: Analysis, found_windows: Windows) -> tuple[int, str]:
    """Exponent of the scale to start with, and why."""
    low, high = found_windows.run.low_log2, found_windows.run.high_log2
    if high is None:
        return DEFAULT_LOG2, "init_scale 2^16: no FP16 gradient was recorded that would bound it."
    level = high - MARGIN_LOG2
    if not analysis.applied.any():
        level = min(DEFAULT_LOG2, level)
        return level, (
            f"init_scale 2^{level}: every sampled step overflowed, so how much lower the scale has to be is not known; "
            "the scaler finds it by halving."
        )
    if found_windows.run.is_empty:
        early = limit_log2(analysis)[0][: max(len(analysis.steps) // RUN_SHARE, 1)]
        known = early[np.isfinite(early)]
        level = math.ceil(LIMIT_LOG2 - float(known.max())) - 1 - MARGIN_LOG2 if len(known) else DEFAULT_LOG2
        return level, (
            f"init_scale 2^{level}: the gradients change so much over the run that no single scale fits all of it; "
            "this one fits its beginning, and the scaler follows."
        )
    if low is not None:
        level = max(level, min(low, high))
    first = f"; {found_windows.highest.described} is what overflows above" if found_windows.highest is not None else ""
    return level, (
        f"init_scale 2^{level}: nothing overflows up to 2^{high}{first}; {high - level} binade(s) are kept in reserve."
    )


def _made_of(
    policy: TorchPolicy,
    found_windows: Windows,
    current: Outlook,
    current_settings: ScalerSettings | None,
    predicted: ReplayResult,
    reasons: list[str],
) -> Recommendation:
    low = found_windows.run.low_log2
    return Recommendation(
        change_needed=True,
        precision="fp16",
        init_scale=policy.init_scale,
        growth_interval=policy.growth_interval,
        growth_factor=policy.growth_factor,
        backoff_factor=policy.backoff_factor,
        min_scale=min(2.0**low if low is not None else 1.0, policy.init_scale),
        window=found_windows.run,
        predicted=Outlook(
            num_skipped=predicted.num_skipped,
            skip_rate=predicted.skip_rate,
            min_sqnr_db=predicted.min_sqnr_db,
            num_skipped_low=predicted.num_skipped_low,
            num_skipped_high=predicted.num_skipped_high,
        ),
        current=current,
        current_settings=_settings(current_settings),
        reasons=tuple(reasons),
    )


def _keep(
    analysis: Analysis, found_windows: Windows, current: Outlook, precision: str, reasons: Sequence[str]
) -> Recommendation:
    settings = analysis.history.settings if analysis.history is not None else None
    kept = settings or ScalerSettings(65536.0, 2.0, 0.5, 2000)
    low = found_windows.run.low_log2
    return Recommendation(
        change_needed=precision != "fp16",
        precision="fp16" if precision == "fp16" else "fp32-modules",
        init_scale=kept.init_scale,
        growth_interval=kept.growth_interval,
        growth_factor=kept.growth_factor,
        backoff_factor=kept.backoff_factor,
        min_scale=min(2.0**low if low is not None else 1.0, kept.init_scale),
        window=found_windows.run,
        predicted=current,
        current=current,
        current_settings=_settings(settings),
        reasons=tuple(reasons),
    )


def _settings(settings: ScalerSettings | None) -> Settings | None:
    if settings is None:
        return None
    return Settings(settings.init_scale, settings.growth_interval, settings.growth_factor, settings.backoff_factor)


def _current(analysis: Analysis) -> Outlook:
    num_skipped = int(analysis.steps.skipped.sum())
    return Outlook(num_skipped, num_skipped / len(analysis.steps), lowest_sqnr_db(analysis))


def _why_not(hopeless: Sequence[Finding], roots: Sequence[Finding], found_windows: Windows) -> list[str]:
    if any(finding.id == "scale-window-empty" for finding in hopeless):
        window, low, high = found_windows.run, found_windows.lowest, found_windows.highest
        return [
            f"No single scale fits: {low.described if low else ''} needs at least 2^{window.low_log2}, "
            f"{high.described if high else ''} overflows above 2^{window.high_log2}.",
            "Keep one of the two in FP32 (leave autocast around it), train in BF16, or bring their losses to one size.",
        ]
    named = [finding for finding in roots if finding.id in NOT_THE_SCALE and finding.id not in SCALE_FELL]
    if named:
        return [
            "No scale will do: what is non-finite before the backward, or at any scale, stays so at a smaller one.",
            *(f"{finding.title}: {finding.remedy}" for finding in named),
        ]
    return [
        "No scale will do: the overflow does not go away however far the scale falls, so it is not the scale's.",
        "Find where the forward turns non-finite and keep that part in FP32, or train in BF16.",
    ]
