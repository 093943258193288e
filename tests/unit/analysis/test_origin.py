"""Births of non-finite values in traced forwards written by hand, and which of them did harm."""

from __future__ import annotations

from typing import Any

from gradaudit.analysis.origin import find_origins
from tests.unit.analysis.forwards import (
    FLOWS,
    INF,
    LOW,
    NAN,
    Op,
    batch,
    forward,
    made,
    mean_loss,
    op_rows,
    param,
)

MASK: Op = made("masked_fill.Scalar", 0, constants=[float("-inf")], **LOW)


def born(*ops: Op, clean: bool = False, **more: Any) -> list[tuple[str, int]]:
    """Kind and line of each origin."""
    origins = find_origins(op_rows(forward(*ops, **more)), {0} if clean else ())
    return [(origin.first.kind, origin.row.order) for origin in origins]


def test_a_product_out_of_range_is_born_and_what_follows_is_not() -> None:
    ops = (batch(), made("mul.Tensor", 0, 0, **INF), made("relu.default", 1, **FLOWS), mean_loss(2, **FLOWS))
    assert born(*ops) == [("overflow", 1)]


def test_what_came_in_non_finite_was_not_born_here() -> None:
    assert born(batch(num_nan=1), made("mul.Tensor", 0, **NAN), mean_loss(1, **NAN)) == []


def test_two_branches_are_two_births() -> None:
    ops = (batch(), made("mul.Tensor", 0, **INF), made("add.Tensor", 0, **INF), made("cat.default", 1, 2, **FLOWS))
    assert born(*ops, mean_loss(3, **FLOWS)) == [("overflow", 1), ("overflow", 2)]


def test_copies_of_a_block_are_one_birth() -> None:
    ops = (
        batch(), made("mul.Tensor", 0, line=7, module="0", **INF), made("rsqrt.default", 1),
        made("mul.Tensor", 2, line=7, module="1", **INF), mean_loss(3, **FLOWS),
    )  # fmt: skip
    (origin,) = find_origins(op_rows(forward(*ops)))
    assert origin.modules == ("0", "1")


def test_the_same_birth_at_several_steps_is_one() -> None:
    ops = (batch(), made("mul.Tensor", 0, **INF), mean_loss(1, **FLOWS))
    rows = [*forward(*ops, step=3), *forward(*ops, step=9)]
    (origin,) = find_origins(op_rows(rows))
    assert origin.steps == (3, 9)


def test_an_inf_that_a_root_makes_zero_of_is_an_error_nobody_sees() -> None:
    ops = (batch(), made("pow.Tensor_Scalar", 0, constants=[2.0], **INF), made("rsqrt.default", 1, amax=0.0))
    assert born(*ops, mean_loss(2), clean=True) == [("overflow", 1)]


def test_a_mask_that_a_softmax_absorbs_is_none() -> None:
    assert born(batch(), MASK, made("_softmax.default", 1, num_masked_rows=0), mean_loss(2)) == []


def test_a_constant_out_of_range_is_a_mask_as_well() -> None:
    ops = (batch(), made("add.Tensor", 0, constants=[-1e9], num_neginf=4, amax_fp32=1e9))
    assert born(*ops, made("_softmax.default", 1, num_masked_rows=0), mean_loss(2)) == []


def test_a_mask_from_zeros_and_ones_times_a_constant() -> None:
    ops = (
        batch(),
        made("rsub.Scalar", 0, constants=[1.0]),
        made("mul.Tensor", 1, constants=[-1e9], sequence=None, **LOW),
    )
    sums = made("add.Tensor", 0, 2, **LOW)
    assert born(*ops, sums, made("_softmax.default", 3, num_masked_rows=0), mean_loss(4)) == []


def test_scores_that_end_below_the_range_are_no_mask() -> None:
    scores = made("bmm.default", 0, num_neginf=4, amax_fp32=90_000.0)
    ops = (batch(), scores, made("_softmax.default", 1, num_masked_rows=0), mean_loss(2))
    assert born(*ops) == [("overflow", 1)]


def test_rows_of_nothing_but_masks() -> None:
    ops = (batch(), MASK, made("_softmax.default", 1, num_masked_rows=3, **NAN), mean_loss(2, **NAN))
    (origin,) = find_origins(op_rows(forward(*ops)))
    assert (origin.first.kind, origin.row.order) == ("masked rows", 2)
    assert [source.order for source in origin.first.sources] == [1]


def test_masked_rows_that_are_replaced_afterwards_do_no_harm() -> None:
    ops = (batch(), MASK, made("_softmax.default", 1, num_masked_rows=3, **NAN), made("where.self", 2), mean_loss(3))
    assert born(*ops, clean=True) == []


def test_masked_rows_of_a_softmax_written_by_hand() -> None:
    ops = (batch(), MASK, made("amax.default", 1, **LOW), made("sub.Tensor", 1, 2, **NAN), mean_loss(3, **NAN))
    assert born(*ops) == [("masked rows", 3)]


def test_overflowed_scores_are_not_taken_for_a_mask() -> None:
    ops = (batch(), made("bmm.default", 0, **INF), made("masked_fill.Scalar", 1, constants=[-1e4], **NAN))
    softmax = made("_softmax.default", 2, num_masked_rows=1, **NAN)
    assert born(*ops, softmax, mean_loss(3, **NAN)) == [("overflow", 1)]


def test_a_mask_that_nothing_absorbs() -> None:
    ops = (batch(), MASK, made("neg.default", 1, **FLOWS), mean_loss(2, **FLOWS))
    (origin,) = find_origins(op_rows(forward(*ops)))
    assert origin.first.kind == "mask"
    assert origin.first.turned is not None
    assert origin.first.turned.order == 2


def test_a_logarithm_of_zero_counts_if_it_reaches_the_loss() -> None:
    log = made("log.default", 0, **LOW)
    assert born(batch(), log, made("exp.default", 1), mean_loss(2)) == []
    assert born(batch(), log, mean_loss(1, num_neginf=1)) == [("undefined", 1)]


def test_distances_filled_with_inf_for_a_minimum_are_masks() -> None:
    ops = (batch(), made("masked_fill.Scalar", 0, constants=[float("inf")], **FLOWS), made("amin.default", 1))
    assert born(*ops, mean_loss(2)) == []


def test_metrics_outside_the_graph_do_not_count() -> None:
    assert born(batch(), made("exp.default", 0, sequence=None, **INF), mean_loss(0)) == []


def test_a_weight_that_is_inf_makes_no_birth() -> None:
    weight = made("input", module="fc.weight", module_class="param", num_neginf=1)
    layer = made("addmm.default", 0, 1, num_posinf=1, num_neginf=3, amax_fp32=float("inf"))
    assert born(batch(), weight, layer, mean_loss(2, **FLOWS)) == []


def test_where_arguments_may_be_missing_only_what_fp32_confirms_is_born() -> None:
    """At the first forward only operations with FP16 tensors are noted."""
    cast = made("_to_copy.default", **FLOWS)
    assert born(cast, made("mul.Tensor", 0, **FLOWS)) == []
    assert born(made("mul.Tensor", **INF)) == [("overflow", 0)]


def test_layers_after_a_parameter_are_followed_on_from_the_whole_trace() -> None:
    look = forward(made("mm.default", **INF, line=5))
    whole = forward(batch(), param(), made("mm.default", 0, 1, line=5, **INF), mean_loss(2, **FLOWS), step=1)
    (origin,) = find_origins(op_rows([*look, *whole]))
    assert origin.first.trace.is_whole
    assert origin.steps == (0, 1)


def test_values_that_spread_over_many_paths_are_followed_once() -> None:
    chain = [batch(), made("mul.Tensor", 0, **INF), made("add.Tensor", 1, **FLOWS)]
    chain += [made("add.Tensor", i - 1, i - 2, **FLOWS) for i in range(3, 200)]
    assert born(*chain) == [("overflow", 1)]
