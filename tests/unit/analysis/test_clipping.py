"""Which clips of scaled gradients are faults, on runs written by hand."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from gradaudit.analysis.checks.calls.clipping import on_purpose
from tests.unit.analysis.logs import (
    BACKWARD,
    DIRECT,
    SCALE,
    STEP,
    UNSCALE,
    UPDATE,
    ZERO,
    Call,
    changed,
    clip,
    found,
    lines,
    log,
    looked,
    numbers,
    steps_at,
)


@pytest.mark.parametrize(
    ("limits", "scales", "asked", "meant"),
    [
        ([1.0] * 3, [2.0**16] * 3, False, False),
        ([0.1] * 3, [2.0**16] * 3, False, False),
        ([5.0] * 3, [2.0**10] * 3, False, False),
        ([2.0**16] * 3, [2.0**16] * 3, False, True),
        ([100.0] * 3, [128.0] * 3, False, True),
        ([1.0, 1.0], [2.0**16, 2.0**15], True, False),
        ([2.0**16, 2.0**15], [2.0**16, 2.0**15], False, True),
        ([20.0] * 3, [128.0] * 3, True, True),
        ([1.0] * 3, [2.0**16] * 3, True, False),
    ],
)
def test_which_limits_were_multiplied_by_the_scale_on_purpose(
    limits: list[float], scales: list[float], asked: bool, meant: bool
) -> None:
    assert on_purpose(limits, scales, asked=asked) is meant


def test_a_clip_too_early_says_by_how_much_and_where(tmp_path: Path) -> None:
    cycle = (ZERO, BACKWARD, clip(1.0), UNSCALE, STEP, UPDATE)
    finding = found(tmp_path, "clip-before-unscale", log(*[cycle] * 20))
    assert (finding.severity, finding.confidence, finding.steps) == ("error", "high", (0, 19))
    assert numbers(finding)["effective_limit"] == pytest.approx(2.0**-16)
    assert numbers(finding)["factor_off"] == 65536
    assert lines(finding) == [("clip_grad_norm_", 2), ("scaler.unscale_", 3)]
    assert "65,536 times too tight" in finding.summary


@pytest.mark.parametrize("harmless", [clip(2.0**16), clip(None), clip(10.0, norm=2.0), clip(float("inf"))])
def test_clips_that_are_meant_or_cut_nothing(tmp_path: Path, harmless: Call) -> None:
    assert looked(tmp_path, "clip-before-unscale", log(*[(ZERO, BACKWARD, harmless, STEP, UPDATE)] * 20)) == []


def test_at_scale_one_clipping_is_right_anywhere(tmp_path: Path) -> None:
    events = log(*[(ZERO, BACKWARD, clip(1.0), STEP, UPDATE)] * 5)
    assert looked(tmp_path, "clip-before-unscale", events, steps=steps_at(*[1.0] * 5)) == []


def test_a_hidden_inf_is_told_even_where_the_limit_was_meant(tmp_path: Path) -> None:
    hiding = clip(2.0**16, nonfinite_before=True)
    finding = found(tmp_path, "clip-before-unscale", log(*[(ZERO, BACKWARD, hiding, STEP, UPDATE)] * 3))
    assert numbers(finding)["num_hidden"] == 3
    assert "3 times it made an inf or NaN finite" in finding.summary


def cut(low: float, high: float, norm: float, amax: float) -> Call:
    """All factors between two; norm and maximum afterwards."""
    before = {"norm_before": norm / low, "amax_before": amax / low}
    return changed(factor_min=low, factor_max=high, norm_after=norm, amax_after=amax, **before)


def by_hand(changes: Sequence[Call]) -> list[dict[str, Any]]:
    return log(*[(ZERO, BACKWARD, change, STEP, UPDATE) for change in changes])


def test_a_norm_cut_by_hand_is_a_clip(tmp_path: Path) -> None:
    cuts = [cut(f, f, 0.999, 0.9 * f) for f in (1e-4, 2e-4, 3e-4)]
    overflow = changed(factor_min=0.0, factor_max=0.0, norm_before="inf", norm_after="nan")
    finding = found(tmp_path, "clip-before-unscale", by_hand([changed(factor_min=None), *cuts, overflow]))
    assert numbers(finding)["limit"] == pytest.approx(0.999)
    assert finding.steps == (1, 3)
    assert lines(finding) == [("p.grad changed", 2), ("backward", 1)]


def test_values_cut_by_hand_are_a_clip(tmp_path: Path) -> None:
    cuts = [cut(f, 1.0, 9 + 100 * f, 0.5) for f in (0.01, 0.03, 0.02)]
    assert numbers(found(tmp_path, "clip-before-unscale", by_hand(cuts)))["limit"] == 0.5


@pytest.mark.parametrize(
    "changes",
    [
        [cut(0.25, 0.25, n, n) for n in (7.0, 7.01, 7.0)],
        [cut(1 / n, 1 / n, n, n) for n in (31.0, 28.0, 30.0)],
        [changed(factor_min=0.0, factor_max=0.0, norm_before=9.0, norm_after=0.0)] * 3,
        [changed(factor_min=None, factor_max=None)] * 3,
        [cut(1e-4, 1e-4, 1.0, 1.0)],
        [cut(1.0, 1.0, 1.0, 1.0)] * 3,
        [
            changed(factor_min=0.5 + 0.01 * n, factor_max=1.0, norm_before=10 + n / 20, norm_after=7 + n / 30)
            for n in range(3)
        ],
    ],
    ids=[
        "average over ranks",
        "average over tokens",
        "all zero",
        "no numbers",
        "only once",
        "limit not reached",
        "some masked at a steady size",
    ],
)
def test_changes_that_are_no_clip(tmp_path: Path, changes: list[Call]) -> None:
    assert looked(tmp_path, "clip-before-unscale", by_hand(changes)) == []


def test_a_script_that_unscales_clips_and_steps_by_itself(tmp_path: Path) -> None:
    rows = steps_at(*[1.0] * 3, scaler=None, found_inf=None, update=None)
    cuts = [cut(f, f, 1.0, f) for f in (1e-5, 1.2e-5, 0.9e-5)]
    events = log(*[(SCALE, BACKWARD, change, DIRECT) for change in cuts])
    assert looked(tmp_path, "clip-before-unscale", events, steps=rows) == []
    found(tmp_path / "scaler", "clip-before-unscale", log(*[(SCALE, BACKWARD, change, STEP) for change in cuts]))


def test_an_inf_replaced_by_hand_is_hidden(tmp_path: Path) -> None:
    finding = found(tmp_path, "clip-before-unscale", by_hand([changed(nonfinite_before=True)]))
    assert numbers(finding)["num_hidden"] == 1
