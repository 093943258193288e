"""Arguments that have no finite result only because FP16 rounded them: to 0, or to what a difference leaves over."""

from __future__ import annotations

import math
from collections.abc import Iterator

from gradaudit.analysis.checks.forward.forward_places import magnitude, what
from gradaudit.analysis.op_words import POLES, SHAPING, SOFTMAXES, is_half
from gradaudit.analysis.origin import Trace, around
from gradaudit.formats import FP16
from gradaudit.store.tables import OpRow

CANCELLED = 2.0**-4
"""A difference this small beside what it is taken of has lost four of FP16's eleven digits, and more at its zeros."""

SATURATING = SOFTMAXES | {"sigmoid", "exp", "exp2", "tanh", "erf"}
"""Their results round to 0, 1 or -1 in FP16 where FP32 still has a difference."""

PASSED = SHAPING | {"neg", "sqrt", "rsqrt", "pow", "mul", "relu"}

DIFFERENCES = frozenset(["sub", "rsub", "add"])


def lost_digits(trace: Trace, row: OpRow) -> str:
    """A sentence on why the argument of an operation with a pole is on it; empty where FP16 is not the reason."""
    if row.name not in POLES:
        return ""
    inputs = trace.inputs(row)
    arguments = inputs[-1:] if row.name == "div" else inputs  # of a division what it divides by
    for made in (*arguments, *(up for at in arguments if at.name in PASSED for up in _before(trace, at))):
        if not is_half(made) or made.name not in SATURATING | DIFFERENCES:
            continue
        before = trace.inputs(made)
        saturated = next((at for at in (made, *before) if is_half(at) and at.name in SATURATING), None)
        if saturated is not None:
            return (
                f" But its argument depends on {what(saturated)}, whose result FP16 rounds to 0 or 1 long before FP32 "
                "does."
            )
        largest = max((at.amax for at in before), default=0.0)
        if len(before) > 1 and all(is_half(at) for at in before) and made.amax <= CANCELLED * largest:
            step = 2.0 ** (math.floor(math.log2(largest)) - FP16.mantissa_bits)
            return (
                f" But its argument depends on {what(made)}, which leaves at most {magnitude(made.amax)} of values up "
                f"to {magnitude(largest)}; FP16's step there is {step:g}, so the sign and the zeros are rounding."
            )
    return ""


def _before(trace: Trace, row: OpRow) -> Iterator[OpRow]:
    return around(trace, row, back=True, through=PASSED)
