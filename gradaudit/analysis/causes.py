"""Causes and consequences: which findings merely follow from another one of the same run.

A run with one fault shows many symptoms: a product that overflows in the forward takes the loss scale to nothing, stops
every step, lets the learning-rate schedule run ahead. Someone who reads five errors fixes the wrong one. The table says
which kinds of finding can explain which, and a finding explains another only where the two meet in time; what nothing
explains stands for itself, so that independent faults stay separate.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from gradaudit.analysis.report import Finding

SLACK_STEPS = 5
"""A fault is located a few steps after it first shows, once the forward has been traced."""

BORN_IN_FORWARD = (
    "nonfinite-input",
    "masked-row",
    "attention-logits-overflow",
    "reduction-overflow",
    "loss-in-half",
    "forward-overflow",
)
"""Where the first bad number of a forward was born."""

BORN_SOMEWHERE = ("nonfinite-weight", *BORN_IN_FORWARD, "epsilon-flushed", "nonfinite-backward", "unlocated-nonfinite")
"""Faults after which no scale helps: each overflow they cause lowers it for nothing."""

SCALE_FELL = ("scale-zero", "scale-at-floor", "scale-collapse")

ANYTIME = frozenset({"unlocated-nonfinite"})
"""A step of which nothing is known but that it failed is taken for an earlier showing of a fault that was located."""

LASTING = frozenset({"nonfinite-weight", "nonfinite-buffer", "divergence", "scale-zero", "half-trainable-params"})
"""Once there, they stay: whatever comes later can follow from them."""

EXPLAINS: tuple[tuple[tuple[str, ...], tuple[str, ...]], ...] = (
    (("autocast-inactive",), ("missing-loss-scaling", "scaler-without-fp16", "gradient-underflow")),
    (("missing-update",), ("double-unscale",)),
    (("double-unscale",), ("update-inside-accumulation",)),
    (("optimizer-without-gradients",), ("layer-without-gradient", "never-applied", "scale-runaway")),
    (
        ("scaler-recreated",),
        ("scale-thrashing", "scale-decay", "resume-reset-scale", "scheduler-ahead", "gradient-overflow"),
    ),
    (("several-scalers",), ("scale-thrashing", "scale-decay")),
    (
        ("half-trainable-params",),
        (
            "swallowed-updates", "optimizer-eps-flushed", "gradient-norm-overflow", "critical-op-in-half",
            "missing-loss-scaling", "gradient-underflow", "loss-in-half",
        ),
    ),
    (("optimizer-eps-flushed",), ("nonfinite-weight", *SCALE_FELL, "unlocated-nonfinite")),
    (("divergence",), (*BORN_IN_FORWARD[1:], "forward-headroom-low", "unlocated-nonfinite", "gradient-overflow",
                       "gradient-headroom-low", "scale-decay", *SCALE_FELL, "never-applied", "scheduler-ahead")),
    (("epsilon-flushed",), ("nonfinite-backward", "forward-overflow", "masked-row")),
    (
        ("step-bypasses-scaler", "clip-before-unscale", "unscaled-backward", "gradient-norm-overflow"),
        ("nonfinite-weight", "gradient-underflow", "gradient-overflow"),
    ),
    (
        (*BORN_SOMEWHERE, "gradient-norm-overflow"),
        ("layer-without-gradient",),
    ),
    (BORN_SOMEWHERE[:-1], ("nonfinite-buffer",)),
    (("nonfinite-buffer",), ("unlocated-nonfinite",)),
    (
        BORN_SOMEWHERE,
        (
            "nonfinite-weight", *SCALE_FELL, "scale-thrashing", "scale-decay", "never-applied",
            "scheduler-ahead", "static-scale-unsafe", "scale-never-grew", "unlocated-nonfinite", "gradient-overflow",
        ),
    ),
    (("missing-loss-scaling",), ("nonfinite-weight", "gradient-underflow", "gradient-overflow")),
    (BORN_IN_FORWARD[1:], ("forward-headroom-low",)),
    (("scale-zero",), ("nonfinite-weight",)),
    (SCALE_FELL, ("never-applied", "scheduler-ahead", "gradient-underflow")),
    (
        ("gradient-overflow", "static-scale-unsafe", "scale-thrashing", "scale-decay"),
        ("never-applied", "scheduler-ahead"),
    ),
)  # fmt: skip
"""(causes, what they explain); an earlier row wins over a later one, an earlier cause over a later one."""


def with_causes(findings: Sequence[Finding]) -> list[Finding]:
    """The same findings, each with the root cause among them that explains it, if there is one.

    Args:
        findings: All findings of a run, the leading ones first where several could explain the same.
    """
    explained_by: dict[int, int] = {}
    for causes, effects in EXPLAINS:
        leading = [i for name in causes for i, finding in enumerate(findings) if finding.id == name]
        for cause in leading:
            for effect, finding in enumerate(findings):
                free = finding.id in effects and finding.id != findings[cause].id and effect not in explained_by
                if free and _root(explained_by, cause) != effect and _meet(findings[cause], finding):
                    explained_by[effect] = cause
    return [
        replace(finding, consequence_of=findings[_root(explained_by, i)].id) if i in explained_by else finding
        for i, finding in enumerate(findings)
    ]


def _meet(cause: Finding, effect: Finding) -> bool:
    if effect.id in ANYTIME:
        return True
    began = cause.steps[0] - SLACK_STEPS <= effect.steps[1]
    return began and (cause.id in LASTING or cause.steps[1] + SLACK_STEPS >= effect.steps[0])


def _root(explained_by: dict[int, int], index: int) -> int:
    while index in explained_by:
        index = explained_by[index]
    return index
