"""Recommendations from where users have them."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from gradaudit.analysis.audit import audit
from gradaudit.analysis.stored import recommendation_from
from gradaudit.errors import GradauditError
from gradaudit.reporters import json_
from gradaudit.store import open_run
from tests.factory import meta, sample, step, tensor, write_run


@pytest.fixture
def fp16_run(tmp_path: Path) -> Path:
    return write_run(
        tmp_path / "run",
        run_meta=meta([tensor(0, "fc1")]),
        steps=[step(i) for i in range(20)],
        samples=[sample(i, 0, {-4: 50, 3: 50}) for i in range(20)],
    )


def test_a_run_and_its_report_recommend_the_same(fp16_run: Path, tmp_path: Path) -> None:
    report = audit(open_run(fp16_run))
    (tmp_path / "report.json").write_text(json_.render(report))

    from_run = recommendation_from(fp16_run)
    from_report = recommendation_from(tmp_path / "report.json")

    assert from_run == report.recommendation
    names = ("init_scale", "growth_interval", "growth_factor", "backoff_factor", "min_scale", "window", "reasons")
    assert [getattr(from_report, name) for name in names] == [getattr(from_run, name) for name in names]


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("not json", "is no JSON report; write one with: gradaudit report RUN --format json"),
        ("[1, 2]", "is no gradaudit report"),
        ('{"format": "something-else"}', "is no gradaudit report"),
        (json.dumps({"format": "gradaudit-report", "recommendation": None}), "holds no recommendation to apply"),
        (json.dumps({"format": "gradaudit-report", "recommendation": {"init_scale": 1}}), "cannot be read"),
    ],
)
def test_other_files_are_refused_in_one_sentence(tmp_path: Path, text: str, sentence: str) -> None:
    path = tmp_path / "report.json"
    path.write_text(text)

    with pytest.raises(GradauditError, match=sentence) as caught:
        recommendation_from(path)

    assert str(path) in str(caught.value)
    assert len(str(caught.value).splitlines()) == 1


def test_a_run_without_fp16_has_nothing_to_apply(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run", run_meta=meta([tensor(0, "fc1", dtype="float32")]), steps=[step(0)])

    with pytest.raises(GradauditError, match="nothing of that run was in FP16"):
        recommendation_from(run)
