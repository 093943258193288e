"""Which finding a birth belongs to."""

from __future__ import annotations

import math

from gradaudit.analysis.checks.forward.flushed_constants import explained_by_constant
from gradaudit.analysis.op_words import (
    CRITERIA,
    ELEMENTWISE,
    MATMULS,
    REDUCTIONS,
    in_loss,
    is_attention,
    is_square,
)
from gradaudit.analysis.origin import Birth, Trace, around, has_param
from gradaudit.formats import FP16
from gradaudit.store.tables import OpRow

SAFE_PRODUCTS = 64
"""Products of this many times less than the limit: their sum is what overflowed, over many elements."""


def identify(birth: Birth) -> str | None:
    """Which finding a birth belongs to; None where a constant that FP16 does not have explains it."""
    row, trace = birth.row, birth.trace
    if birth.kind == "masked rows":
        return "masked-row"
    if birth.kind == "undefined" and explained_by_constant(trace, row) is not None:
        return None
    if birth.kind == "overflow":
        if _is_scores(trace, row):
            return "attention-logits-overflow"
        if in_loss(row) and _is_of_the_loss(row):
            return "loss-in-half"
        if _is_reduction(trace, row):
            return "reduction-overflow"
    return "forward-overflow"


def _is_of_the_loss(row: OpRow) -> bool:
    """Whether a criterion made it, or it is the loss times something."""
    return row.name in CRITERIA or (row.numel == 1 and row.name in ELEMENTWISE)


def _is_scores(trace: Trace, row: OpRow) -> bool:
    """Whether an operation makes what a softmax of the same module is taken of, and is no layer."""
    if is_attention(row):
        return True
    if row.name not in MATMULS | ELEMENTWISE or (row.name in MATMULS and has_param(trace, row)):
        return False
    passed = ELEMENTWISE | {"masked_fill", "where", "clamp", "tanh", "select", "slice", "unsafe_view", "softmax"}
    for after in around(trace, row, back=False, through=passed):
        if after.name == "softmax":
            return after.module == row.module or after.module.startswith(f"{row.module}.")
    return False


def _is_reduction(trace: Trace, row: OpRow) -> bool:
    """Whether elements are added up in FP16, or squared for that."""
    if row.name in REDUCTIONS:
        return True
    if is_square(row):
        return any(after.name in REDUCTIONS for after in around(trace, row, back=False))
    return is_sum_by_matmul(trace, row)


def is_sum_by_matmul(trace: Trace, row: OpRow) -> bool:
    """Whether a matrix product overflowed by its length: no parameter in it, and no single product near the limit."""
    if row.name not in MATMULS or has_param(trace, row):
        return False
    factors = trace.inputs(row)[-2:]
    if not factors:
        return False
    return factors[0].amax * factors[-1].amax * SAFE_PRODUCTS <= FP16.max_value


def num_added(trace: Trace, row: OpRow) -> int | None:
    """How many elements one element of the result is computed from; None where that cannot be told."""
    factors = trace.inputs(row)[-2:]
    if not factors or not row.numel:
        return None
    if row.name in MATMULS:
        batches = row.shape[0] if row.name in ("bmm", "baddbmm") and row.shape else 1
        inner = math.sqrt(factors[0].numel * factors[-1].numel / (batches * row.numel))
        return round(inner) or None
    if row.name.startswith("cum"):
        return max(factors[0].shape, default=1)
    return max(factors[0].numel // row.numel, 1)
