"""What one saved batch says, run again as it was and then in FP32."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from gradaudit.analysis.checks.base import power
from gradaudit.analysis.checks.forward.forward_places import against_limit, what
from gradaudit.analysis.op_words import INPUT
from gradaudit.analysis.origin import BAD, Birth, badness, find_origins
from gradaudit.store.tables import OpRow


@dataclass(frozen=True, slots=True)
class ReplayPass:
    """One run of the batch.

    Attributes:
        forward_finite: Whether every output, and the loss if there was one, was finite.
        loss: Its unscaled value, the mean over the step's calls; None without a loss function.
        gradients_finite: Whether the gradients were finite; None where nothing went back.
        first_nonfinite: Names of parameters with a non-finite gradient, in the order in which backward reached them.
        raised: What the model or the loss raised.
    """

    forward_finite: bool
    loss: float | None = None
    gradients_finite: bool | None = None
    first_nonfinite: tuple[str, ...] = ()
    raised: str | None = None

    @property
    def failed(self) -> bool:
        """Whether something was not finite, or raised."""
        return not self.forward_finite or self.gradients_finite is False or self.raised is not None


@dataclass(frozen=True, slots=True)
class FirstBad:
    """The operation that made the first non-finite value.

    Attributes:
        op: torch's name of it.
        module: Name of the module whose code ran it; "loss" outside every module.
        module_class: That module's class.
        file: The user's file.
        line: The user's line.
        dtype: Of its output.
        amax_fp32: The output's largest magnitude when computed in FP32 from the same inputs; None if not known.
        sentence: All of that in words.
    """

    op: str
    module: str
    module_class: str
    file: str | None
    line: int | None
    dtype: str
    amax_fp32: float | None
    sentence: str


@dataclass(frozen=True, slots=True)
class BatchReplay:
    """What `replay_batch` found.

    Attributes:
        file: The saved batch.
        step: The step it belonged to.
        scale: The loss scale of that step.
        recorded: The run as it was, with autocast.
        fp32: The run in FP32.
        first_bad: Where the first non-finite value of the forward was made in the run as it was.
        nonfinite_inputs: Arguments that hold NaN or +Inf themselves.
        nonfinite_weights: Parameters and buffers that do.
        verdict: One or two sentences.
    """

    file: str
    step: int
    scale: float
    recorded: ReplayPass
    fp32: ReplayPass
    first_bad: FirstBad | None
    nonfinite_inputs: tuple[str, ...]
    nonfinite_weights: tuple[str, ...]
    verdict: str


def first_bad(ops: Sequence[OpRow]) -> FirstBad | None:
    """The operation of a traced forward that made the first value that did harm; None where all was well.

    Where no operation did, what was bad before the forward: the batch, a weight or a buffer.
    """
    origins = find_origins(ops)
    births = [origin.first for origin in origins if origin.first.reaches_loss] + [origin.first for origin in origins]
    if births:
        return _named(births[0].row, _how(births[0]))
    for row in ops:
        if row.op == INPUT and badness(row) == BAD:
            holder = f"the {row.module_class} {row.module}" if row.module_class in ("param", "buffer") else "the batch"
            return _named(row, f"{holder} holds {_bad(row)} itself")
    return None


def _named(row: OpRow, sentence: str) -> FirstBad:
    return FirstBad(row.name, row.module, row.module_class, row.file, row.line, row.dtype, row.amax_fp32, sentence)


def _how(birth: Birth) -> str:
    row = birth.row
    if birth.kind == "masked rows":
        made_by = f", made by {what(birth.sources[0])}" if birth.sources else ""
        return f"{what(row)} was given rows of nothing but -inf{made_by}"
    if birth.kind == "mask":
        return f"{what(row)} made -inf that nothing absorbs"
    if birth.kind == "overflow" and row.amax_fp32 is not None:
        return f"{what(row)}: {against_limit(row.amax_fp32)}"
    return f"{what(row)} made {_bad(row)} of finite values"


def _bad(row: OpRow) -> str:
    return "NaN" if row.num_nan else "Inf"


def conclude_replay(**known: Any) -> BatchReplay:
    """The result of a replay, with its verdict, from everything else that `BatchReplay` holds."""
    return BatchReplay(**known, verdict=_verdict(**known))


def _verdict(
    *,
    recorded: ReplayPass,
    fp32: ReplayPass,
    scale: float,
    first_bad: FirstBad | None,
    nonfinite_inputs: Sequence[str],
    nonfinite_weights: Sequence[str],
    **_: Any,
) -> str:
    where = f" First bad value: {first_bad.sentence}." if first_bad is not None else ""
    if not recorded.failed:
        if recorded.gradients_finite is None:
            return "The forward is finite in FP16: pass the loss function to replay the backward too."
        return f"The forward is finite in FP16, and so is the backward at scale {power(scale)}: the fault is not here."
    if fp32.failed:
        verdict = "FP16 is innocent: the same batch fails in FP32 too"
        if nonfinite_inputs:
            return f"{verdict}, since the batch itself holds NaN or Inf, in {nonfinite_inputs[0]}."
        if nonfinite_weights:
            return f"{verdict}, since the weights hold NaN or Inf already, in {nonfinite_weights[0]}."
        if fp32.gradients_finite is False:
            return f"{verdict}; its gradient is not finite, first at {fp32.first_nonfinite[0]}."
        return f"{verdict}.{where}"
    if not recorded.forward_finite or recorded.raised is not None:
        return f"Only FP16 fails: the same batch is finite in FP32.{where}"
    return (
        f"Only the FP16 backward fails, at scale {power(scale)} and first in the gradient of "
        f"{recorded.first_nonfinite[0]}; forward and FP32 are finite: a smaller scale is the cure."
    )
