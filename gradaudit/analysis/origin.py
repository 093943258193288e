"""Where non-finite values of a traced forward were born, and where they went.

A birth is an operation with a non-finite result whose arguments were all finite. What it made is followed through the
operations that used it: most `-inf` are masks made on purpose, which a softmax absorbs, while an inf that a sigmoid or
a root turns into a plain number is a silent error. Only what does harm is an origin.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Literal

import numpy as np

from gradaudit.analysis.op_words import (
    ELEMENTWISE,
    FILLS,
    INPUT,
    LAYERS_WITH_WEIGHTS,
    MATMULS,
    SHAPING,
    SOFTMAXES,
    flushed_constants,
    flushed_operand,
    is_attention,
    is_half,
)
from gradaudit.formats import FP16
from gradaudit.store.tables import OpRow, Steps

FINITE, ONLY_NEGATIVE, BAD = 0, 1, 2
"""How bad a result is: finite; nothing worse than -inf, as masks have it; NaN or +inf."""

MASK_AT = 1e4
"""Constants from here on are masks: half of what is customary is -1e4, the rest lies beyond."""

FEW_OPS = 6
"""How far a mask, an eps or a score is looked for around an operation: expressions are not longer."""

Kind = Literal["overflow", "undefined", "masked rows", "mask"]


@dataclass(frozen=True, slots=True)
class Trace:
    """The operations of one step by `order`, and which used the result of which. `is_whole`: nothing is missing."""

    step: int
    rows: dict[int, OpRow]
    users: dict[int, tuple[int, ...]]
    is_whole: bool

    def inputs(self, row: OpRow) -> list[OpRow]:
        """The rows that made an operation's arguments."""
        return [self.rows[order] for order in row.inputs if order in self.rows]

    def uses(self, row: OpRow) -> list[OpRow]:
        """The operations that used its result."""
        return [self.rows[order] for order in self.users.get(row.order, ())]


@dataclass(frozen=True, slots=True)
class Birth:
    """One birth at one step.

    Attributes:
        kind: "overflow": the result lies outside FP16, in FP32 it is finite; "undefined": it is not finite in FP32
            either, or it ran there; "masked rows": a softmax had rows of nothing but -inf; "mask": a constant made -inf
            and nothing absorbed it.
        row: The operation.
        trace: Its step.
        sources: For "masked rows" what made the -inf, the nearest first.
        turned: For "mask" the operation that made NaN or +inf of it, or None.
        reaches_loss: Whether something non-finite that follows from it is a last value of the forward.
    """

    kind: Kind
    row: OpRow
    trace: Trace
    sources: tuple[OpRow, ...]
    turned: OpRow | None
    reaches_loss: bool


@dataclass(frozen=True, slots=True)
class Origin:
    """The same birth at all steps at which it was traced, the first one first."""

    births: tuple[Birth, ...]

    @property
    def first(self) -> Birth:
        """The first one at a step that was traced whole, if there is one."""
        return next((birth for birth in self.births if birth.trace.is_whole), self.births[0])

    @property
    def row(self) -> OpRow:
        """The operation, at that step."""
        return self.first.row

    @property
    def modules(self) -> tuple[str, ...]:
        """In whose code: several where a line is shared by copies of a block."""
        return tuple(dict.fromkeys(birth.row.module for birth in self.births))

    @property
    def steps(self) -> tuple[int, int]:
        """First and last step."""
        return self.births[0].row.step, self.births[-1].row.step


def traces(ops: Sequence[OpRow]) -> Iterator[Trace]:
    """The traced steps of a run, in order; `ops` sorted by step."""
    for step, group in groupby(ops, key=lambda row: row.step):
        rows = {row.order: row for row in group}
        users: defaultdict[int, list[int]] = defaultdict(list)
        for row in rows.values():
            for order in row.inputs:
                users[order].append(row.order)
        # what was there before is noted only where everything is
        whole = any(row.op == INPUT for row in rows.values())
        yield Trace(step, rows, {order: tuple(used) for order, used in users.items()}, whole)


def find_origins(ops: Sequence[OpRow], clean: Collection[int] = ()) -> tuple[Origin, ...]:
    """All births that did harm, each place once, in the order in which they were first seen.

    Args:
        ops: The operations of the traced forwards, in order of step and execution.
        clean: Steps whose loss and gradients were finite: rows of a softmax that held nothing did no harm there.
    """
    grouped: dict[tuple[object, ...], list[Birth]] = {}
    for trace in traces(ops):
        if all(row.is_finite for row in trace.rows.values()):
            continue
        for birth in _harmful(trace, is_clean=trace.step in clean):
            row = birth.row
            place = (row.file, row.line, row.module_class) if row.file else (row.module,)
            grouped.setdefault((birth.kind, row.name, *place), []).append(birth)
    return tuple(Origin(tuple(births)) for births in grouped.values())


def clean_steps(steps: Steps) -> frozenset[int]:
    """Steps on record whose loss and gradients were finite."""
    hit = np.array([len(ids) > 0 for ids in steps.nonfinite], dtype=bool)
    good = (steps.loss_finite != 0) & (steps.scaled_loss_finite != 0) & (steps.found_inf != 1) & ~hit
    return frozenset(int(step) for step in steps.step[good])


def badness(row: OpRow) -> int:
    """FINITE, ONLY_NEGATIVE or BAD."""
    if row.num_nan + row.num_posinf:
        return BAD
    return ONLY_NEGATIVE if row.num_neginf else FINITE


def around(trace: Trace, row: OpRow, *, back: bool, through: Collection[str] | None = None) -> Iterator[OpRow]:
    """Operations before (`back`) or after one, the nearest first, at most FEW_OPS away.

    Args:
        trace: The step.
        row: Where to start; it is not among them.
        back: Towards the inputs.
        through: Only these operations are passed, none: all; the first of others on the way is still given.
    """
    seen, ring = {row.order}, [row]
    for _ in range(FEW_OPS):
        found = []
        for at in ring:
            for other in trace.inputs(at) if back else trace.uses(at):
                if other.order not in seen:
                    seen.add(other.order)
                    found.append(other)
                    yield other
        ring = [other for other in found if through is None or other.name in through]


def has_param(trace: Trace, row: OpRow) -> bool:
    """Whether an operation has a parameter among its arguments, cast or reshaped or as it is."""
    if any(layer in row.module_class for layer in LAYERS_WITH_WEIGHTS):
        return True
    found = [*trace.inputs(row)]
    for _ in range(2):
        found += [up for at in found if at.name in SHAPING for up in trace.inputs(at)]
    return any(at.op == INPUT and at.module_class == "param" for at in found)


def lost_constants(trace: Trace, row: OpRow) -> tuple[float, ...]:
    """Numbers that an operation in FP16 uses as an eps or a bound and that are 0 or 1 there."""
    operands = (flushed_operand(row, made) for made in trace.inputs(row) if made.numel == 1)
    return (*flushed_constants(row), *(c for c in operands if c is not None))


def is_cast_weight(trace: Trace, row: OpRow) -> bool:
    """Whether an operation only casts a parameter."""
    if row.name != "to_copy":
        return False
    inputs = trace.inputs(row)
    # where not everything is noted, what was there before is missing
    return all(made.op == INPUT and made.module_class == "param" for made in inputs) if inputs else not trace.is_whole


def mask_constant(trace: Trace, row: OpRow) -> tuple[OpRow, float] | None:
    """The operation, and its constant, that put values far below all others into a tensor; None where there is none.

    Sums, casts, views and fills are passed on the way back, products and layers are not.
    """
    near = [row] if row.name not in MATMULS else []
    if row.name in MATMULS and not (row.amax_fp32 is not None and row.amax_fp32 < 2 * FP16.max_value):
        return None  # a sum with a mask of FP16's lowest number ends just outside; scores may end anywhere
    passed = (ELEMENTWISE | SHAPING | FILLS | {"maximum", "minimum"}) - {"mul", "div"}
    for at in (*near, *around(trace, row, back=True, through=passed)):
        constant = _own_mask_constant(trace, at)
        if constant is not None:
            return at, constant
    return None


def _own_mask_constant(trace: Trace, row: OpRow) -> float | None:
    if row.op == INPUT:
        far = row.amax >= MASK_AT or row.num_neginf > 0
        return (-math.inf if row.num_neginf else -row.amax) if far and row.module_class != "param" else None
    large = [c for c in row.constants if abs(c) >= MASK_AT]
    if not large:
        return None
    if row.name == "mul":  # of zeros and ones, which no gradient goes through; of anything else it is a factor
        is_mask = row.sequence is None and max((up.amax for up in trace.inputs(row)), default=1.0) <= 1
        return large[0] if is_mask else None
    return large[0] if row.name in FILLS | ELEMENTWISE else None


def flow(trace: Trace, *starts: OpRow) -> set[int]:
    """Orders of all non-finite results that follow from some, these included."""
    found, left = {row.order for row in starts}, list(starts)
    while left:
        for user in trace.uses(left.pop()):
            if not user.is_finite and user.order not in found:
                found.add(user.order)
                left.append(user)
    return found


def _ends(trace: Trace) -> set[int]:
    """Last values of the forward: what has an autograd node and one element, and is used by nothing; and the last."""
    nodes = [row for row in trace.rows.values() if row.sequence is not None]
    ends = {row.order for row in nodes if row.numel == 1 and row.order not in trace.users}
    return ends | {row.order for row in nodes[-1:]}


def _harmful(trace: Trace, *, is_clean: bool) -> list[Birth]:
    ends = _ends(trace) if trace.is_whole else set()
    born = [row for row in trace.rows.values() if _is_born(trace, row)]
    masks = {row.order: row for row in born if _is_mask(trace, row)}
    found, spread = [], set[int]()
    for row in born:
        if row.order in masks or not _does_harm(trace, row, ends):
            continue
        reached = flow(trace, row)
        spread |= reached
        kind: Kind = "overflow" if _outside(row) else "undefined"
        found.append(Birth(kind, row, trace, (), None, bool(reached & ends)))
    taken: set[int] = set()
    for row in trace.rows.values():
        if is_clean or row.order in spread or not _has_masked_rows(trace, row):
            continue
        sources = _mask_sources(trace, row, list(masks.values()))
        reached = flow(trace, row)
        spread |= reached
        taken |= {source.order for source in sources}
        found.append(Birth("masked rows", row, trace, sources, None, bool(reached & ends)))
    for row in masks.values():
        own = flow(trace, row) - spread
        turned = next((trace.rows[order] for order in sorted(own) if badness(trace.rows[order]) == BAD), None)
        if row.order not in taken and own & ends:
            spread |= own
            found.append(Birth("mask", row, trace, (), turned, reaches_loss=True))
    return sorted(found, key=lambda birth: birth.row.order)


def _is_born(trace: Trace, row: OpRow) -> bool:
    if row.is_finite or row.op == INPUT:
        return False
    inputs = trace.inputs(row)
    if any(not made.is_finite for made in inputs):
        # a sum with a mask may overflow upwards on its own
        sums = row.name in ("add", "baddbmm", "where", "masked_fill") and row.num_posinf > 0 and row.num_nan == 0
        return sums and all(badness(made) < BAD for made in inputs) and not has_param(trace, row)
    if trace.is_whole:
        return True
    if row.num_posinf == 0 and row.name not in MATMULS:
        return False  # a mask from who knows where
    # some of the arguments may be unknown here
    return _outside(row) if row.amax_fp32 is not None else bool(inputs) and row.num_nan == 0


def _outside(row: OpRow) -> bool:
    """Whether the result left FP16's range, or rather: whether nothing says that it is not finite in FP32."""
    if not is_half(row):
        return False
    if row.amax_fp32 is None:
        return row.num_posinf + row.num_neginf > 0
    return math.isfinite(row.amax_fp32) and row.amax_fp32 >= FP16.overflow_at


def _is_mask(trace: Trace, row: OpRow) -> bool:
    if row.num_nan:
        return False
    if row.num_posinf and not (row.name in FILLS and any(abs(c) >= MASK_AT for c in row.constants)):
        return False
    return mask_constant(trace, row) is not None


def _does_harm(trace: Trace, row: OpRow, ends: set[int]) -> bool:
    if _outside(row):
        # absorbed or not, the number is wrong from here on, unless nothing in the training uses it
        return row.sequence is not None or row.order in trace.users
    return bool(flow(trace, row) & ends)


def _has_masked_rows(trace: Trace, row: OpRow) -> bool:
    """Whether it made NaN of nothing but -inf: a softmax, or one written by hand as exp(x - max)."""
    if row.num_nan == 0 or any(badness(made) == BAD for made in trace.inputs(row)):
        return False
    if row.name in SOFTMAXES or is_attention(row):
        return bool(row.num_masked_rows)
    inputs = trace.inputs(row)
    return row.name == "sub" and len(inputs) > 1 and all(not made.is_finite for made in inputs)


def _mask_sources(trace: Trace, row: OpRow, masks: Sequence[OpRow]) -> tuple[OpRow, ...]:
    """What made the -inf that an operation was given, the nearest first."""
    given = [trace.rows[order] for order in row.inputs if order in trace.rows]
    made = [mask for mask in masks if flow(trace, mask) & {at.order for at in given}]
    before = [at for at in (*given, *around(trace, row, back=True)) if at.op == INPUT and at.num_neginf > 0]
    return (*sorted(made, key=lambda at: -at.order), *dict.fromkeys(before))
