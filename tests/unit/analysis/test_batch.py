"""What a probe and a replayed batch say, from made-up passes and operations."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from gradaudit.analysis.batch import ReplayPass, conclude_replay, first_bad
from gradaudit.analysis.checks.forward.forward_places import what
from gradaudit.analysis.probe import ProbeRow, conclude
from gradaudit.store import open_run
from gradaudit.store.tables import OpRow
from tests.factory import op, write_run


def ops_of(folder: Path, *rows: dict[str, Any]) -> tuple[OpRow, ...]:
    return open_run(write_run(folder / "run", ops=list(rows))).ops()


def batch(order: int = 0, **more: Any) -> dict[str, Any]:
    return op(order, "input", module="batch", module_class="batch", amax_fp32=None, **more)


def test_the_first_overflow_is_named_with_its_size_in_fp32(tmp_path: Path) -> None:
    ops = ops_of(
        tmp_path,
        batch(),
        op(1, "mul.Tensor", inputs=(0, 0), num_posinf=3, amax_fp32=131008.0, module="blocks.3", line=41, sequence=1),
        op(2, "add.Tensor", inputs=(1, 0), num_nan=3, amax_fp32=None, line=42, sequence=2),
        op(3, "mean.default", inputs=(2,), num_nan=1, numel=1, amax_fp32=None, line=43, sequence=3),
    )
    found = first_bad(ops)
    assert found is not None
    assert (found.op, found.module, found.line, found.amax_fp32) == ("mul", "blocks.3", 41, 131008.0)
    assert found.sentence == f"{what(ops[1])}: 131,008 against 65,504: 2.00 times the limit"


def test_one_that_reaches_the_loss_comes_before_one_that_does_not(tmp_path: Path) -> None:
    ops = ops_of(
        tmp_path,
        batch(),
        op(1, "mul.Tensor", inputs=(0, 0), num_posinf=1, amax_fp32=131008.0, module="a", line=1, sequence=1),
        op(2, "rsqrt.default", inputs=(1,), module="a", line=2, sequence=2),
        op(3, "exp.default", inputs=(2,), num_posinf=1, amax_fp32=9e5, module="b", line=3, sequence=3),
        op(4, "mean.default", inputs=(3,), num_posinf=1, numel=1, amax_fp32=None, sequence=4),
    )
    found = first_bad(ops)
    assert found is not None
    assert found.op == "exp"


def test_a_mask_that_a_softmax_absorbs_is_no_fault(tmp_path: Path) -> None:
    ops = ops_of(
        tmp_path,
        batch(),
        op(1, "masked_fill.Scalar", inputs=(0,), num_neginf=5, amax_fp32=None, constants=[-1e9], sequence=1),
        op(2, "_softmax.default", inputs=(1,), num_masked_rows=0, sequence=2),
    )
    assert first_bad(ops) is None


def test_a_softmax_of_nothing_but_minus_infinity_is_said_with_what_made_it(tmp_path: Path) -> None:
    ops = ops_of(
        tmp_path,
        batch(),
        op(1, "masked_fill.Scalar", inputs=(0,), num_neginf=8, amax_fp32=None, constants=[-1e9], line=7, sequence=1),
        op(2, "_softmax.default", inputs=(1,), num_nan=8, amax_fp32=None, num_masked_rows=1, sequence=2),
    )
    found = first_bad(ops)
    assert found is not None
    assert found.sentence == f"{what(ops[2])} was given rows of nothing but -inf, made by {what(ops[1])}"


def test_what_is_not_finite_in_fp32_either_is_said_to_come_of_finite_values(tmp_path: Path) -> None:
    ops = ops_of(
        tmp_path,
        batch(),
        op(1, "log.default", inputs=(0,), num_nan=1, dtype="float32", amax_fp32=None, module="loss", sequence=1),
    )
    found = first_bad(ops)
    assert found is not None
    assert found.sentence == f"{what(ops[1])} made NaN of finite values"


@pytest.mark.parametrize(
    ("source", "words"), [("batch", "the batch"), ("param", "the param w"), ("buffer", "the buffer w")]
)
def test_what_was_bad_before_the_forward_is_said_to_be(tmp_path: Path, source: str, words: str) -> None:
    found = first_bad(
        ops_of(
            tmp_path,
            op(0, "input", module="w", module_class=source, num_nan=1),
            op(1, "mul.Tensor", inputs=(0,), num_nan=1, sequence=1),
        )
    )
    assert found is not None
    assert found.sentence == f"{words} holds NaN itself"


def row(scale: float, *, finite: bool = True, nan: bool = False) -> ProbeRow:
    bad = () if finite else ("head.weight", "body.weight")
    return ProbeRow(scale, 1.0, True, finite, nan, bad, 0.5, 4, 0)


def test_the_largest_safe_scale_lies_below_every_one_that_is_not() -> None:
    rows = (row(1.0), row(2.0, finite=False), row(4.0), row(8.0, finite=False))
    assert conclude(rows, scale_in_force=None, first_bad=None).largest_safe_scale == 1.0


@pytest.mark.parametrize(
    ("rows", "in_force", "verdict"),
    [
        (
            (row(1.0), row(8192.0), row(16384.0, finite=False)),
            65536.0,
            "The forward is finite and the backward overflows above 2^13, first in the gradient of head.weight: a "
            "smaller scale is the cure.",
        ),
        (
            (row(1.0), row(8192.0), row(16384.0, finite=False)),
            8192.0,
            "The forward is finite and the backward overflows above 2^13, first in the gradient of head.weight; the "
            "scale in force, 2^13, is safe for this batch.",
        ),
        (
            (row(0.25), row(0.5, finite=False), row(1.0, finite=False)),
            None,
            "The forward is finite and the backward overflows above 2^-2, first in the gradient of head.weight: only a "
            "scale below 1 is safe; averaging the loss instead of summing it makes room for a larger one.",
        ),
        (
            (row(0.25, finite=False, nan=True), row(1.0, finite=False, nan=True)),
            None,
            "The forward is finite and the gradient is NaN at every scale tried, from 2^-2 to 2^0: no scale can help; "
            "backward meets it first at head.weight.",
        ),
        (
            (row(3.0, finite=False),),
            None,
            "The forward is finite and the gradient is infinite at every scale tried, 3: no scale can help; backward "
            "meets it first at head.weight.",
        ),
        (
            (row(1.0), row(1024.0)),
            None,
            "The forward is finite, and so is the backward up to 2^10, the largest scale tried: this batch does not "
            "overflow.",
        ),
        (
            (ProbeRow(1.0, float("inf"), False, None, False, (), None, 0, 0),),
            None,
            "The forward is not finite: no scale can help.",
        ),
    ],
)
def test_a_probe_says_in_a_sentence_what_can_help(
    rows: tuple[ProbeRow, ...], in_force: float | None, verdict: str
) -> None:
    assert conclude(rows, scale_in_force=in_force, first_bad=None).verdict == verdict


FINE = ReplayPass(True, 1.0, True)
BAD_FORWARD = ReplayPass(False, float("nan"))
BAD_BACKWARD = ReplayPass(True, 1.0, False, ("head.weight",))


@pytest.mark.parametrize(
    ("recorded", "fp32", "weights", "verdict"),
    [
        (FINE, FINE, (), "The forward is finite in FP16, and so is the backward at scale 2^10: the fault is not here."),
        (BAD_FORWARD, BAD_FORWARD, (), "FP16 is innocent: the same batch fails in FP32 too."),
        (
            BAD_FORWARD,
            BAD_FORWARD,
            ("head.weight",),
            "FP16 is innocent: the same batch fails in FP32 too, since the weights hold NaN or Inf already, in "
            "head.weight.",
        ),
        (
            BAD_BACKWARD,
            BAD_BACKWARD,
            (),
            "FP16 is innocent: the same batch fails in FP32 too; its gradient is not finite, first at head.weight.",
        ),
        (BAD_FORWARD, FINE, (), "Only FP16 fails: the same batch is finite in FP32."),
    ],
)
def test_a_replay_says_whether_fp16_is_to_blame(
    recorded: ReplayPass, fp32: ReplayPass, weights: tuple[str, ...], verdict: str
) -> None:
    replay = conclude_replay(
        file="batch.pt",
        step=3,
        scale=1024.0,
        recorded=recorded,
        fp32=fp32,
        first_bad=None,
        nonfinite_inputs=(),
        nonfinite_weights=weights,
    )
    assert replay.verdict == verdict
