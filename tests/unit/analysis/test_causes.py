"""Which findings follow from which, and which stand for themselves."""

from __future__ import annotations

from typing import Any

import pytest

from gradaudit.analysis.causes import EXPLAINS, SLACK_STEPS, with_causes
from gradaudit.analysis.checks import CHECKS
from gradaudit.analysis.report import Finding


def finding(id: str, first: int = 0, last: int = 50, **more: Any) -> Finding:
    values: dict[str, Any] = {
        "severity": "error", "confidence": "high", "title": id, "summary": "s", "scale_can_fix": "no", "where": (),
        "evidence": (), "remedy": "r", **more,
    }  # fmt: skip
    return Finding(id=id, steps=(first, last), **values)


def causes_of(*findings: Finding) -> dict[str, str | None]:
    return {found.id: found.consequence_of for found in with_causes(findings)}


def test_what_a_forward_overflow_does_to_the_scale_follows_from_it() -> None:
    found = causes_of(
        finding("scale-collapse", 10, 90), finding("forward-overflow", 11, 13), finding("never-applied", 10, 90),
        finding("nonfinite-buffer", 10, 11), finding("scheduler-ahead", 10, 90),
    )  # fmt: skip

    assert found.pop("forward-overflow") is None
    assert set(found.values()) == {"forward-overflow"}


def test_a_chain_of_consequences_leads_to_its_root() -> None:
    found = causes_of(
        finding("half-trainable-params"), finding("optimizer-eps-flushed"), finding("nonfinite-weight", 1, 50),
        finding("scale-collapse", 2, 50), finding("scale-zero", 2, 50),
    )  # fmt: skip

    assert found.pop("half-trainable-params") is None
    assert set(found.values()) == {"half-trainable-params"}


def test_independent_faults_stay_separate() -> None:
    found = causes_of(
        finding("clip-before-unscale"), finding("forward-overflow", 20, 22), finding("masked-row", 20, 22),
        finding("scheduler-ahead", 20, 50), finding("several-scalers"),
    )  # fmt: skip

    assert found == {
        "clip-before-unscale": None, "forward-overflow": None, "masked-row": None, "several-scalers": None,
        "scheduler-ahead": "masked-row",
    }  # fmt: skip


def test_a_fault_explains_nothing_that_was_over_before_it_began() -> None:
    early = finding("scale-thrashing", 0, 30)

    assert causes_of(early, finding("forward-overflow", 40, 42))["scale-thrashing"] is None
    assert causes_of(early, finding("forward-overflow", 30 + SLACK_STEPS, 42))["scale-thrashing"] == "forward-overflow"


def test_a_single_bad_batch_explains_no_collapse_long_after_it_but_ruined_weights_do() -> None:
    collapse = finding("scale-collapse", 60, 90)

    assert causes_of(finding("nonfinite-input", 5, 5), collapse)["scale-collapse"] is None
    assert causes_of(finding("nonfinite-weight", 5, 5), collapse)["scale-collapse"] == "nonfinite-weight"


def test_no_finding_explains_itself_or_its_own_cause() -> None:
    for causes, effects in EXPLAINS:
        for cause in causes:
            found = with_causes([finding(cause), *(finding(effect) for effect in effects if effect != cause)])
            by_id = {item.id: item for item in found}
            for item in found:
                assert item.consequence_of != item.id
                assert item.consequence_of is None or by_id[item.consequence_of].consequence_of is None


@pytest.mark.parametrize("name", sorted({name for causes, effects in EXPLAINS for name in (*causes, *effects)}))
def test_the_table_knows_only_findings_that_exist(name: str) -> None:
    assert name in {check.id for check in CHECKS}
