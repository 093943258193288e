"""Numbers that went bad elsewhere, judged on records written by hand."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from gradaudit.analysis.checks.base import Facts, Skipped
from gradaudit.analysis.checks.forward.integrity import INTEGRITY
from gradaudit.analysis.context import analyse
from gradaudit.analysis.origin import clean_steps, find_origins
from gradaudit.analysis.report import Finding
from gradaudit.analysis.windows import windows
from gradaudit.store import open_run
from tests import factory

LOOKS = {check.id: check.look for check in INTEGRITY}

PARAM, BUFFER, MASK = 0, 1, 2

TABLE = [
    factory.tensor(PARAM, "fc.weight", "param_grad", dtype="float32", module=""),
    factory.tensor(BUFFER, "norm.running_var", "buffer", dtype="float32", module=""),
    factory.tensor(MASK, "attn.mask", "buffer", dtype="float32", module=""),
    factory.tensor(3, "norm", "output", module="BatchNorm1d"),
    factory.tensor(4, "fc.weight", "param", dtype="float32", module=""),
]

NAN, INF = float("nan"), float("inf")
FAILED = {"loss": NAN, "loss_finite": False, "skipped": True, "found_inf": True, "nonfinite": [PARAM]}
FAILED_ALL = {**FAILED, "param_amax": [NAN]}


def look(
    path: Path, name: str, rows: Sequence[dict[str, Any]], ops: Sequence[dict[str, Any]] = (), **meta: Any
) -> Sequence[Finding]:
    steps = [factory.step(i, **{"param_amax": [1.0], **row}) for i, row in enumerate(rows)]
    run_meta = factory.meta(TABLE, **meta)
    analysis = analyse(open_run(factory.write_run(path / "run", run_meta=run_meta, steps=steps, ops=list(ops))))
    stored = analysis.run.ops()
    origins = partial(find_origins, stored, clean_steps(analysis.steps))
    outcome = LOOKS[name](Facts(analysis, windows(analysis), (), (), stored, origins=origins))
    assert not isinstance(outcome, Skipped)
    return outcome


def given(
    step: int, source: str, *, num_nan: int = 0, num_posinf: int = 0, num_neginf: int = 0
) -> list[dict[str, Any]]:
    """A traced step that began with a tensor of a source, and one operation that used it."""
    bad = {"num_nan": num_nan, "num_posinf": num_posinf, "num_neginf": num_neginf}
    before = factory.op(
        0, "input", step=step, module=source, module_class=source, dtype="float32", file=None, line=None, **bad
    )
    return [before, factory.op(1, "add.Tensor", inputs=(0,), step=step, sequence=1, line=33, **bad)]


BAD = {**FAILED_ALL, "input_finite": False}
GOOD: dict[str, Any] = {}
MASKED = {"input_finite": False}


@pytest.mark.parametrize(
    ("rows", "ops", "steps"),
    [
        ([GOOD, GOOD, BAD, GOOD], [], (2, 2)),
        ([GOOD, BAD, BAD, GOOD], given(2, "batch", num_nan=3), (1, 2)),
        # -inf that nothing absorbs, and nothing else went wrong
        ([GOOD, BAD, BAD, GOOD], given(2, "batch", num_neginf=3), (1, 2)),
        # what the model was given was finite when the forward began: another model made it
        ([GOOD, BAD, BAD, GOOD], given(2, "param"), None),
        # masks do no harm elsewhere
        ([MASKED, MASKED, BAD, MASKED], [], None),
        ([MASKED, {**MASKED, **FAILED_ALL, "loss": 1.0, "loss_finite": True}, MASKED], [], None),
        # the targets
        ([GOOD, FAILED_ALL, FAILED_ALL, GOOD], given(2, "other", num_nan=1), (1, 2)),
        ([GOOD, FAILED_ALL, FAILED_ALL, GOOD], [], None),
        # missing values that the model fills
        ([MASKED] * 4, given(2, "batch", num_nan=3), None),
    ],
)
def test_which_steps_are_put_down_to_the_batch(
    tmp_path: Path, rows: Sequence[dict[str, Any]], ops: Sequence[dict[str, Any]], steps: tuple[int, int] | None
) -> None:
    assert [finding.steps for finding in look(tmp_path, "nonfinite-input", rows, ops)] == ([steps] if steps else [])


def test_a_data_set_that_holds_nan_elsewhere_is_not_this_batch(tmp_path: Path) -> None:
    whole, used = given(2, "other", num_nan=5)
    outside = factory.op(2, "mul.Tensor", inputs=(1,), step=2, sequence=2, num_posinf=1, amax_fp32=1e6)
    ops = [whole, {**used, "num_nan": 0}, outside]
    assert look(tmp_path, "nonfinite-input", [GOOD, GOOD, FAILED_ALL, GOOD], ops) == []


def test_a_bad_batch_is_shown_where_it_is_used(tmp_path: Path) -> None:
    (finding,) = look(tmp_path, "nonfinite-input", [GOOD, GOOD, BAD, GOOD], given(2, "batch", num_nan=3))
    assert [(place.type, place.line) for place in finding.where] == [("step", None), ("call_site", 33)]
    assert finding.confidence == "high"


@pytest.mark.parametrize(
    ("buffer", "failed", "steps"),
    [(BUFFER, True, (2, 4)), (BUFFER, False, (2, 4)), (MASK, True, (2, 4)), (MASK, False, None)],
    ids=["skipped step", "statistics alone", "another buffer", "a mask filled anew"],
)
def test_buffers_that_became_non_finite(
    tmp_path: Path, buffer: int, failed: bool, steps: tuple[int, int] | None
) -> None:
    rows: list[dict[str, Any]] = [{} for _ in range(8)]
    rows[1]["buffers_nonfinite"] = []
    rows[4]["buffers_nonfinite"] = [buffer]
    if failed:
        rows[3] |= FAILED_ALL
    outcome = look(tmp_path, "nonfinite-buffer", rows)
    assert [finding.steps for finding in outcome] == ([steps] if steps else [])
    for finding in outcome:
        assert ("step 3 was skipped" in finding.summary) == failed
        assert ("norm (BatchNorm1d)" in finding.summary) == (buffer == BUFFER)


def test_buffers_that_came_with_nan_show_in_a_trace(tmp_path: Path) -> None:
    rows: list[dict[str, Any]] = [{"buffers_nonfinite": []}, FAILED_ALL, FAILED_ALL]
    ops = [{**row, "module": "norm.running_var"} for row in given(2, "buffer", num_nan=4)]
    (finding,) = look(tmp_path / "bad", "nonfinite-buffer", rows, ops)
    assert "from the start" in finding.summary
    masks = [{**row, "module": "attn.mask"} for row in given(2, "buffer", num_neginf=4)]
    assert look(tmp_path / "mask", "nonfinite-buffer", rows, masks) == []


ZERO_SCALE = {"scale": 0.0, "param_amax": [0.0]}


@pytest.mark.parametrize(
    ("between", "meta", "at", "how"),
    [
        ({"nonfinite": [PARAM], "param_amax": [INF], "scaler": None}, {}, 3, "with no scaler to skip it"),
        ({"nonfinite": [PARAM], "param_amax": [INF]}, {}, 3, "stepped on non-finite gradients."),
        (ZERO_SCALE, {}, 3, "divided by a scale of 0"),
        (
            {},
            {"optimizers": [{"id": 0, "class": "Adam", "params": [PARAM], "resumed": False, "eps": 1e-8,
                             "state_dtypes": {"exp_avg": "float16"}}]},
            4, "an eps that is 0 in FP16",
        ),
        ({}, {}, 4, "the update itself, or the script"),
    ],
)  # fmt: skip
def test_how_weights_broke(tmp_path: Path, between: dict[str, Any], meta: dict[str, Any], at: int, how: str) -> None:
    rows: list[dict[str, Any]] = [{} for _ in range(8)]
    rows[2]["weights_nonfinite"] = []
    rows[3] |= between
    for row in rows[5:]:
        row |= FAILED_ALL
    rows[6]["weights_nonfinite"] = [4]
    (finding,) = look(tmp_path, "nonfinite-weight", rows, **meta)
    assert finding.steps == (at, 7)
    assert how in finding.summary
    assert f"broke at step {at}" in finding.summary


def test_weights_that_nothing_uses_are_left_alone(tmp_path: Path) -> None:
    rows: list[dict[str, Any]] = [{"weights_nonfinite": [4]}, {}, {}]
    assert look(tmp_path / "unused", "nonfinite-weight", rows) == []
    (finding,) = look(tmp_path / "used", "nonfinite-weight", [{**row, **FAILED_ALL} for row in rows])
    assert "before the first step" in finding.summary


def test_a_look_at_another_optimizer_is_no_look_at_this_one(tmp_path: Path) -> None:
    rows: list[dict[str, Any]] = []
    for i in range(4):
        rows += [{"optimizer": 0, "update": i}, {"optimizer": 1, "update": i}]
    rows[0]["weights_nonfinite"] = rows[5]["weights_nonfinite"] = []
    for row in rows[4:]:
        row |= FAILED_ALL
    rows[6]["weights_nonfinite"] = [4]
    (finding,) = look(tmp_path, "nonfinite-weight", rows)
    assert "Last seen finite when step 0 began, first seen broken when step 6 did" in finding.summary


def test_frozen_weights_that_broke_on_the_way(tmp_path: Path) -> None:
    ops = [{**row, "module": "teacher.weight"} for row in given(5, "param", num_nan=4)]
    rows: list[dict[str, Any]] = [*([{}] * 4), FAILED_ALL, FAILED_ALL, FAILED_ALL]
    (finding,) = look(tmp_path, "nonfinite-weight", rows, ops)
    assert finding.steps == (4, 6)
    assert "no optimizer changes it" in finding.summary


def losses(values: Sequence[float], *, grow: bool = True, end: int = 3) -> list[dict[str, Any]]:
    """Steps with these losses and gradients in proportion to their roots, and some that failed."""
    rows = [{"loss": v, "param_amax": [65536.0 * (abs(v) ** 0.5 if grow else 1.0)]} for v in values]
    return [*rows, *([FAILED_ALL] * end)]


RNG = np.random.default_rng(0)
FLAT = [float(v) for v in np.exp(RNG.normal(0, 0.3, 40))]
NOISY = [float(v) for v in np.exp(RNG.normal(0, 1.5, 200))]
GROWTH = [float(2.0 ** (0.7 * i)) for i in range(16)]


@pytest.mark.parametrize(
    ("rows", "fires"),
    [
        (losses([*FLAT, *GROWTH]), True),
        (losses([*FLAT, *(-v for v in GROWTH)]), True),
        (losses(FLAT), False),
        (losses(NOISY), False),
        (losses([*FLAT, 1e6]), False),
        (losses([*FLAT, 1.0, 1.1, 1e4, 1.1e4]), False),
        (losses([*FLAT, *GROWTH], grow=False), False),
        (losses([*(v * 1e3 for v in FLAT), *FLAT, *GROWTH[:6]]), False),
        ([*losses([*FLAT, *GROWTH]), *losses(FLAT, end=0)], False),
        (losses([*FLAT, *GROWTH], end=0), False),
    ],
    ids=[
        "growth", "growth of a negative loss",
        "flat", "noisy", "one jump", "a jump and a step", "gradients do not grow",
        "far below its beginning", "it comes back", "nothing was non-finite",
    ],
)  # fmt: skip
def test_what_is_divergence(tmp_path: Path, rows: Sequence[dict[str, Any]], fires: bool) -> None:
    assert bool(look(tmp_path, "divergence", rows)) == fires


def test_divergence_names_where_it_began(tmp_path: Path) -> None:
    (finding,) = look(tmp_path, "divergence", losses([*FLAT, *GROWTH]))
    assert finding.steps[1] == len(FLAT) + len(GROWTH)
    assert abs(finding.steps[0] - len(FLAT)) <= 4
    assert finding.confidence == "high"
