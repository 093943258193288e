"""Gradients that are inf or NaN at any scale, and the operation of the forward whose slope made them so."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from gradaudit.analysis.checks.base import Facts
from gradaudit.analysis.context import Analysis
from gradaudit.analysis.overflows import born_here, sources_seen, too_large
from gradaudit.store.tables import OpRow, TensorInfo

ARROW = " -> "
"""Between the operations of a gradient on its way from one to the other."""


@dataclass(frozen=True, slots=True)
class Culprit:
    """An operation of the forward whose gradient is not finite although what came back to it was.

    Attributes:
        op: The autograd node, as "Sqrt".
        module: In whose code, "loss" outside every module.
        module_class: Its class.
        file, line: The user's line in the forward, None where it was not seen.
        steps: First and last step.
        num_steps: At how many.
        is_nan: Whether it was NaN, not inf.
        reached: The tensor whose gradient it was.
    """

    op: str
    module: str
    module_class: str
    file: str | None
    line: int | None
    steps: tuple[int, int]
    num_steps: int
    is_nan: bool
    reached: str

    @property
    def line_text(self) -> str:
        """train.py:41, or nothing."""
        return f"{self.file}:{self.line}" if self.file else ""

    def is_at(self, row: OpRow) -> bool:
        """Whether an operation of a traced forward is on the same line, or in the same module where there is none."""
        if self.file and row.file:
            return (self.file, self.line) == (row.file, row.line)
        return self.module == row.module


def culprits(facts: Facts) -> list[Culprit]:
    """Operations whose gradient is not finite at any scale, each once, the first ones first.

    Steps whose forward was not finite do not count, nor those whose overflow the size of the gradients explains.
    """
    analysis = facts.analysis
    samples = analysis.samples
    born = born_here(analysis)
    if not born.any():
        return []
    rows = np.flatnonzero(born & ~too_large(analysis, born) & np.isin(samples.step, _steps_meant(facts)))
    rows = rows[sources_seen(analysis, rows)]
    found: dict[tuple[object, ...], list[int]] = {}
    for row in rows[np.lexsort((samples.order[rows], samples.step[rows]))]:
        op, info = _operation(analysis, int(samples.tensor[row]))
        found.setdefault((op, info.fqn, info.file, info.line), []).append(int(row))
    return [_culprit(facts, mine) for mine in found.values()]


def _steps_meant(facts: Facts) -> np.ndarray:
    analysis = facts.analysis
    steps = analysis.steps
    weights = np.array([ids is not None and len(ids) > 0 for ids in steps.weights_nonfinite], dtype=bool)
    meant = (steps.loss_finite != 0) & (steps.scaled_loss_finite != 0) & (steps.input_finite != 0) & ~weights
    for history, unexplained in zip(analysis.histories, facts.unexplained, strict=True):
        mine = history.update_of >= 0
        meant[mine] &= unexplained[history.update_of[mine]]
    return np.asarray(steps.step[meant])


def _operation(analysis: Analysis, tensor: int) -> tuple[str, TensorInfo]:
    """The node that computed a gradient, and the tensor that stands for it.

    A gradient carries the name of the operation it arrives at; the one it was computed by is nearer to the loss.
    """
    info = analysis.tensors[tensor]
    if ARROW in info.op:
        return info.op.partition(ARROW)[0], info
    parents = [analysis.tensors[p] for p in info.parents if p < len(analysis.tensors)]
    if not parents:
        return info.op, info
    return parents[0].op.rpartition(ARROW)[2], parents[0]


def _culprit(facts: Facts, rows: list[int]) -> Culprit:
    analysis = facts.analysis
    samples = analysis.samples
    op, info = _operation(analysis, int(samples.tensor[rows[0]]))
    own = analysis.tensors[samples.tensor[rows[0]]]
    file, line = info.file, info.line
    if file is None or (ARROW in info.op and info is not own):  # then it is the line of the operation before
        file, line = _line_of(facts, op, info)
    steps = sorted({int(samples.step[row]) for row in rows})
    return Culprit(
        op, info.fqn, info.module, file, line, (steps[0], steps[-1]), len(steps), bool(samples.num_nan[rows[0]]),
        own.described,
    )  # fmt: skip


def _line_of(facts: Facts, op: str, info: TensorInfo) -> tuple[str | None, int | None]:
    """The line of an operation by its name, where its module has it on one line only."""
    name = op.lower()
    lines = {
        (row.file, row.line)
        for row in facts.ops
        if row.file and row.module == info.fqn and row.name.replace("_", "") == name
    }
    return lines.pop() if len(lines) == 1 else (info.file, info.line)
