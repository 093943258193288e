"""Findings about forward values, on traced forwards written by hand: which id, numbers, places."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from gradaudit.analysis.checks.base import Skipped
from gradaudit.analysis.op_words import flushed_constants
from tests import factory
from tests.unit.analysis.forwards import (
    FLOWS,
    INF,
    LOW,
    NAN,
    Op,
    batch,
    forward,
    found,
    lines,
    looked,
    made,
    mean_loss,
    numbers,
    op_rows,
    param,
)

OVERFLOWS = ("forward-overflow", "attention-logits-overflow", "masked-row", "reduction-overflow", "loss-in-half")


def ids(path: Path, *ops: Op) -> set[str]:
    """Ids of the findings about values out of range."""
    rows, names = forward(*ops), set()
    for i, name in enumerate(OVERFLOWS):
        outcome = looked(path / str(i), name, rows)
        names |= {finding.id for finding in outcome} if not isinstance(outcome, Skipped) else set()
    return names


# forward-overflow


def test_a_product_says_how_far_outside_it_is(tmp_path: Path) -> None:
    near = made("add.Tensor", 0, 0, amax=40_000.0, module="block")
    rows = forward(batch(), near, made("mul.Tensor", 0, 1, **{**INF, "amax_fp32": 66_246.0}), mean_loss(2, **FLOWS))
    finding = found(tmp_path, "forward-overflow", rows)
    assert "66,246 against 65,504: 1.01 times the limit" in finding.summary
    assert "in block (Net), train.py:1 with 40,000" in finding.summary
    assert finding.scale_can_fix == "no"
    assert lines(finding) == [2]
    assert "clamp just below" in finding.remedy


def test_far_outside_a_clamp_is_no_cure(tmp_path: Path) -> None:
    rows = forward(batch(), made("mul.Tensor", 0, 0, **{**INF, "amax_fp32": 800_000.0}), mean_loss(1, **FLOWS))
    finding = found(tmp_path, "forward-overflow", rows)
    assert "12 times the limit" in finding.summary
    assert "FP32" in finding.remedy
    assert "clamp would cut off" in finding.remedy


def test_a_finite_loss_is_said(tmp_path: Path) -> None:
    ops = (batch(), param(), made("addmm.default", 0, 1, module="gate", module_class="Linear", **INF))
    rows = forward(*ops, made("sigmoid.default", 2), mean_loss(3))
    finding = found(tmp_path, "forward-overflow", rows, steps=[factory.step(0)])
    assert "stayed finite" in finding.summary
    assert "gate (Linear)" in finding.summary
    assert ("module", "gate") in {(place.type, place.name) for place in finding.where}


def test_fp32_is_not_blamed_on_fp16(tmp_path: Path) -> None:
    rows = forward(batch(), made("log.default", 0, dtype="float32", num_neginf=3, amax_fp32=None), mean_loss(1, **LOW))
    finding = found(tmp_path, "forward-overflow", rows)
    assert "float32: FP16's range is not the reason" in finding.summary


def test_without_a_trace_nothing_is_looked_at(tmp_path: Path) -> None:
    assert isinstance(looked(tmp_path, "reduction-overflow", steps=[factory.step(0)]), Skipped)


# which id


def test_scores(tmp_path: Path) -> None:
    softmax = made("_softmax.default", 2, num_masked_rows=0, **FLOWS)
    scores = made("bmm.default", 0, 1, **INF)
    assert ids(tmp_path, batch(), batch(), scores, softmax, mean_loss(3, **FLOWS)) == {"attention-logits-overflow"}


def test_a_layer_before_a_softmax_is_no_score(tmp_path: Path) -> None:
    softmax = made("_softmax.default", 2, num_masked_rows=0, **FLOWS)
    layer = made("addmm.default", 0, 1, **INF)
    assert ids(tmp_path, batch(), param(), layer, softmax, mean_loss(3, **FLOWS)) == {"forward-overflow"}


def test_scores_scaled_up_after_the_product(tmp_path: Path) -> None:
    ops = (batch(), made("bmm.default", 0), made("mul.Tensor", 1, constants=[8.0], **INF))
    softmax = made("_softmax.default", 2, num_masked_rows=0, **FLOWS)
    assert ids(tmp_path, *ops, softmax, mean_loss(3, **FLOWS)) == {"attention-logits-overflow"}


def test_a_sum(tmp_path: Path) -> None:
    rows = forward(
        batch(), made("mul.Tensor", 0, 0, numel=90_000), made("sum.default", 1, numel=1, shape=[], **INF),
        mean_loss(2, **FLOWS),
    )  # fmt: skip
    finding = found(tmp_path, "reduction-overflow", rows)
    assert numbers(finding)["num_elements"] == 90_000
    assert "at most 0.7278" in finding.summary


def test_a_square_on_its_way_into_a_mean(tmp_path: Path) -> None:
    square = made("pow.Tensor_Scalar", 0, constants=[2.0], **INF)
    assert ids(tmp_path / "a", batch(), square, made("mean.dim", 1, **FLOWS), mean_loss(2)) == {"reduction-overflow"}
    assert ids(tmp_path / "b", batch(), square, made("relu.default", 1, **FLOWS)) == {"forward-overflow"}


def test_a_product_with_itself_is_a_square(tmp_path: Path) -> None:
    ops = (batch(), made("mul.Tensor", 0, **INF), made("sum.dim_IntList", 1, **FLOWS), mean_loss(2, **FLOWS))
    assert ids(tmp_path, *ops) == {"reduction-overflow"}


def test_a_matrix_product_as_a_sum(tmp_path: Path) -> None:
    factor: dict[str, Any] = {"dtype": "float16", "module_class": "batch"}
    points = made("input", numel=140_000, shape=[2, 70_000], amax=2.0, **factor)
    masks = made("input", numel=280_000, shape=[70_000, 4], amax=1.0, **factor)
    cost = made("mm.default", 0, 1, shape=[2, 4], numel=8, module="loss", **INF)
    rows = forward(points, masks, cost, mean_loss(2, **FLOWS))
    assert numbers(found(tmp_path, "reduction-overflow", rows))["num_elements"] == 70_000


def test_large_factors_overflow_by_themselves(tmp_path: Path) -> None:
    ops = (batch(amax=300.0), batch(amax=300.0), made("mm.default", 0, 1, **INF), mean_loss(2, **FLOWS))
    assert ids(tmp_path, *ops) == {"forward-overflow"}


def test_a_weighted_loss(tmp_path: Path) -> None:
    loss: dict[str, Any] = {"module": "loss", "module_class": "", "numel": 1, "shape": []}
    ops = (batch(), made("mean.default", 0, **loss), made("mul.Tensor", 1, constants=[1e5], **loss, **INF))
    assert ids(tmp_path, *ops, mean_loss(2, **FLOWS)) == {"loss-in-half"}


def test_a_criterion_in_half(tmp_path: Path) -> None:
    criterion = made("mse_loss.default", 0, module="loss", numel=1, shape=[], **INF)
    assert ids(tmp_path, batch(), criterion, mean_loss(1, **FLOWS)) == {"loss-in-half"}


# loss-in-half


def test_a_scaled_loss_quotes_both(tmp_path: Path) -> None:
    steps = [factory.step(0, loss=2.0, scaled_loss_finite=False, found_inf=True, skipped=True)]
    events = [factory.event(0, "scaler.scale", scaler=0, line=41)]
    finding = found(tmp_path, "loss-in-half", steps=steps, events=events)
    assert "2 times 2^16 is 131,072 against 65,504" in finding.summary
    assert lines(finding) == [41]


def test_a_criterion_outside_autocast_counts_without_overflow(tmp_path: Path) -> None:
    loss: dict[str, Any] = {"module": "loss", "numel": 1, "shape": []}
    rows = forward(made("addmm.default"), made("mse_loss.default", 0, autocast=False, **loss))
    assert lines(found(tmp_path / "out", "loss-in-half", rows)) == [1]
    inside = forward(made("addmm.default"), made("mse_loss.default", 0, **loss))
    assert looked(tmp_path / "in", "loss-in-half", inside) == []


# masked-row


def test_masked_rows_name_the_constant(tmp_path: Path) -> None:
    ops = (batch(), made("add.Tensor", 0, constants=[-1e9], num_neginf=8, amax_fp32=1e9))
    rows = forward(*ops, made("_softmax.default", 1, num_masked_rows=2, **NAN), mean_loss(2, **NAN))
    finding = found(tmp_path, "masked-row", rows)
    assert "2 of 8 rows" in finding.summary
    assert "the constant -1e+09, out of FP16's range" in finding.summary
    assert lines(finding) == [1, 2]


# epsilon-flushed


@pytest.mark.parametrize(
    ("name", "constants", "num_inputs", "flushed"),
    [
        ("add.Tensor", (1e-8,), 1, (1e-8,)),
        ("add.Tensor", (1e-6,), 1, ()),
        ("add.Tensor", (1e-8,), 2, ()),
        ("mul.Tensor", (1e-9,), 1, ()),
        ("clamp.default", (1e-4, 1 - 1e-6), 1, (1 - 1e-6,)),
        ("clamp.default", (1e-4, 0.999), 1, ()),
        ("clamp_min.default", (0.0,), 1, ()),
        ("clamp_max.default", (1.0,), 1, ()),
        ("bernoulli_.float", (1e-9,), 1, ()),
    ],
)
def test_which_constants_are_lost(
    name: str, constants: tuple[float, ...], num_inputs: int, flushed: tuple[float, ...]
) -> None:
    (row,) = op_rows([factory.op(5, name, inputs=tuple(range(num_inputs)), constants=list(constants))])
    assert flushed_constants(row) == flushed
    (wide,) = op_rows([factory.op(5, name, inputs=(0,), constants=list(constants), dtype="float32")])
    assert flushed_constants(wide) == ()


def test_a_lost_constant_is_a_warning(tmp_path: Path) -> None:
    rows = forward(batch(), made("add.Tensor", 0, constants=[1e-8]), made("div.Tensor", 0, 1), mean_loss(2))
    finding = found(tmp_path, "epsilon-flushed", rows, steps=[factory.step(0)])
    assert finding.severity == "warning"
    assert lines(finding) == [1]


def test_a_lost_constant_and_a_division_by_zero_is_an_error(tmp_path: Path) -> None:
    ops = (batch(), made("add.Tensor", 0, constants=[1e-8]), made("div.Tensor", 0, 1, **NAN), mean_loss(2, **NAN))
    finding = found(tmp_path / "eps", "epsilon-flushed", forward(*ops))
    assert finding.severity == "error"
    assert lines(finding) == [1, 2]
    assert ids(tmp_path, *ops) == set()


def test_a_constant_may_be_given_as_a_tensor(tmp_path: Path) -> None:
    eps = made("scalar_tensor.default", constants=[1e-8], dtype="float32", numel=1, shape=[], sequence=None)
    ops = (batch(), eps, made("clamp_min_.Tensor", 0, 1, sequence=None), made("div.Tensor", 0, 2, **NAN))
    finding = found(tmp_path, "epsilon-flushed", forward(*ops, mean_loss(3, **NAN)))
    assert numbers(finding)["constant"] == 1e-8
    assert lines(finding) == [2, 3]


# critical-op-in-half


def critical(path: Path, *ops: Op) -> str | None:
    outcome = looked(path, "critical-op-in-half", forward(*ops), steps=[factory.step(0)])
    assert not isinstance(outcome, Skipped)
    return outcome[0].severity if outcome else None


def test_critical_operations_by_dtype(tmp_path: Path) -> None:
    softmax: dict[str, Any] = {"num_masked_rows": 0}
    assert critical(tmp_path / "a", batch(), made("_softmax.default", 0, **softmax)) == "info"
    assert critical(tmp_path / "b", batch(), made("_softmax.default", 0, autocast=False, **softmax)) == "warning"
    assert critical(tmp_path / "c", batch(), made("_softmax.default", 0, dtype="float32", **softmax)) is None
    large = made("bmm.default", 0, amax=5000.0)
    assert critical(tmp_path / "d", batch(), large, made("_softmax.default", 1, **softmax)) == "warning"
    masked = made("add.Tensor", 0, constants=[-1e4], amax=10_000.0)
    assert critical(tmp_path / "e", batch(), masked, made("_softmax.default", 1, **softmax)) == "info"
    assert critical(tmp_path / "f", batch(), made("pow.Tensor_Scalar", 0, constants=[2.0])) is None
    # what no gradient goes through is a frozen or an evaluated part
    assert critical(tmp_path / "g", batch(), made("exp.default", 0, sequence=None, autocast=False)) is None


# forward-headroom-low


def test_headroom(tmp_path: Path) -> None:
    rows = forward(batch(), made("mul.Tensor", 0, 0, amax=45_000.0), mean_loss(1))
    finding = found(tmp_path, "forward-headroom-low", rows, steps=[factory.step(0)])
    assert numbers(finding)["amax"] == 45_000
    assert numbers(finding)["headroom"] == pytest.approx(0.542, abs=1e-3)


def test_masks_and_weights_are_no_activations(tmp_path: Path) -> None:
    mask = made("masked_fill.Scalar", 0, constants=[-65504.0], amax=65504.0)
    rows = forward(batch(), mask, param(), made("_to_copy.default", 2, amax=40_000.0), mean_loss(1))
    assert looked(tmp_path, "forward-headroom-low", rows, steps=[factory.step(0)]) == []


def test_a_bounded_value_times_a_large_number_is_an_activation(tmp_path: Path) -> None:
    rows = forward(batch(), made("mul.Tensor", 0, constants=[40_000.0], amax=40_000.0), mean_loss(1))
    assert found(tmp_path, "forward-headroom-low", rows, steps=[factory.step(0)]).severity == "warning"


def test_growing_outputs_meet_the_limit(tmp_path: Path) -> None:
    table = [factory.tensor(0, "up", "output")]
    samples = [
        factory.sample(step, 0, {0: 4}, scaled=False) | {"amax": 30_000.0 * 1.02 ** (step / 2)} for step in range(24)
    ]
    steps = [factory.step(i) for i in range(24)]
    finding = found(tmp_path, "forward-headroom-low", steps=steps, tensors=table, samples=samples)
    assert "meets the limit at about step 79" in finding.summary


# nonfinite-backward


def gradients(*sampled: int, bad: int = 1) -> dict[str, Any]:
    """A run of finite losses: gradients of the loss, a root and its argument; those sampled, and the bad one."""
    table = [
        factory.tensor(0, "loss", "op_grad", op="Mean", dtype="float32"),
        factory.tensor(1, "loss", "op_grad", op="Sqrt", dtype="float32", parents=[0], file="train.py", line=7),
        factory.tensor(2, "loss", "op_grad", op="Sum", dtype="float32", parents=[1], file="train.py", line=6),
    ]  # fmt: skip
    samples = [
        factory.sample(step, i, {} if i == bad else {-8: 4}, num_inf=2 if i == bad else 0, scale=2.0**-12)
        for step in range(4)
        for i in sampled
    ]
    samples += [factory.sample(4, i, {-8: 4}, scale=2.0**-12) for i in range(3)]
    steps = [factory.step(i, found_inf=i < 4, skipped=i < 4, scale=2.0**-12) for i in range(5)]
    return {"tensors": table, "samples": samples, "steps": steps}


def test_the_operation_is_the_one_whose_gradient_came_out_bad(tmp_path: Path) -> None:
    finding = found(tmp_path, "nonfinite-backward", **gradients(0, 1, 2, bad=2))
    assert "Sqrt in loss (train.py:7) and arrives at Sum in loss" in finding.summary
    assert lines(finding) == [7]
    assert finding.scale_can_fix == "no"


def test_of_a_gradient_whose_source_was_not_seen_nothing_is_said(tmp_path: Path) -> None:
    assert looked(tmp_path, "nonfinite-backward", **gradients(0, 2, bad=2)) == []


# without a trace


def outputs(*bad: int, step: int = 0) -> list[dict[str, Any]]:
    """Outputs of first, second and the model, in order of execution."""
    return [
        factory.sample(step, i, {0: 4}, scaled=False, order=i, num_inf=2 if i in bad else 0) for i in range(3)
    ]  # fmt: skip


def bracket(path: Path, *bad: int) -> str:
    names = ["encoder.first", "encoder.second", "encoder"]
    table = [factory.tensor(i, name, "output") for i, name in enumerate(names)]
    steps = [factory.step(0, loss_finite=False, loss=float("nan"), found_inf=True, skipped=True)]
    finding = found(path, "forward-overflow", steps=steps, tensors=table, samples=outputs(*bad))
    assert finding.confidence == "medium"
    return finding.summary


def test_the_first_bad_output_brackets_the_fault(tmp_path: Path) -> None:
    inside = bracket(tmp_path / "child", 1, 2)
    assert "encoder.second (Linear) is the first" in inside
    assert "itself or what its caller gave it made it, after encoder.first" in inside
    assert "its own code made it, after encoder.second" in bracket(tmp_path / "parent", 2)


def test_bad_outputs_of_a_sound_step_were_masks(tmp_path: Path) -> None:
    table = [factory.tensor(i, str(i), "output") for i in range(3)]
    outcome = looked(tmp_path, "forward-overflow", steps=[factory.step(0)], tensors=table, samples=outputs(1))
    assert isinstance(outcome, Skipped)


# unlocated-nonfinite


def test_a_single_bad_step_says_what_is_known(tmp_path: Path) -> None:
    table = [factory.tensor(i, name, "param_grad") for i, name in enumerate(("a.weight", "b.weight"))]
    steps = [factory.step(i, param_amax=[1.0, 1.0]) for i in range(30)]
    steps[20] |= {
        "loss": float("inf"), "loss_finite": False, "found_inf": True, "skipped": True, "nonfinite": [0, 1],
        "param_amax": [float("inf"), float("nan")],
    }  # fmt: skip
    samples = [factory.sample(0, 0, {0: 4}, order=1), factory.sample(0, 1, {0: 4}, order=0)]
    finding = found(tmp_path, "unlocated-nonfinite", steps=steps, tensors=table, samples=samples)
    assert finding.steps == (20, 20)
    assert "the loss was not finite, the batch was finite" in finding.summary
    assert "those of b.weight, a.weight" in finding.summary
    assert "did not come again" in finding.summary


def test_a_bad_batch_explains_the_step(tmp_path: Path) -> None:
    steps = [factory.step(i) for i in range(30)]
    steps[20] |= {"loss_finite": False, "input_finite": False, "found_inf": True, "skipped": True}
    assert looked(tmp_path, "unlocated-nonfinite", steps=steps) == []


def test_a_located_fault_covers_its_steps(tmp_path: Path) -> None:
    rows = forward(batch(), made("mul.Tensor", 0, **INF), mean_loss(1, **FLOWS), step=3)
    bad = {"loss_finite": False, "found_inf": True, "skipped": True}
    steps = [factory.step(i, **(bad if i in (2, 3, 9) else {})) for i in range(12)]
    assert looked(tmp_path, "unlocated-nonfinite", rows, steps=steps) == []
