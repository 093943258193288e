"""Gradients that no loss scale makes finite, and steps of which only that is known."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from gradaudit.analysis.checks.base import NUM_NAMED, Facts, Outcome, Skipped, power
from gradaudit.analysis.checks.forward.flushed_constants import guarded_by_constant, words_of
from gradaudit.analysis.checks.forward.forward_places import magnitude
from gradaudit.analysis.checks.forward.gradient_births import Culprit, culprits
from gradaudit.analysis.checks.forward.last_step import stopped_at
from gradaudit.analysis.op_words import LOSS
from gradaudit.analysis.origin import Origin, clean_steps
from gradaudit.analysis.report import Evidence, Finding, Place
from gradaudit.store.tables import NO_GRADIENT

SAME_FAULT_STEPS = 10
"""A fault is located within a few steps of its first sight; what came this long before it was another one."""

REASONS = {
    "Sqrt": "the slope of a square root is infinite at zero",
    "Rsqrt": "1/sqrt has no slope at zero",
    "LinalgVectorNorm": "a norm has no slope at the zero vector",
    "Norm": "a norm has no slope at the zero vector",
    "CdistForward": "a distance of zero has no slope",
    "Cdist": "a distance of zero has no slope",
    "Log": "the slope of a logarithm is infinite at zero",
    "Log2": "the slope of a logarithm is infinite at zero",
    "Log10": "the slope of a logarithm is infinite at zero",
    "Log1P": "the slope of log1p is infinite at -1",
    "Log1p": "the slope of log1p is infinite at -1",
    "Div": "a division by zero has no slope, and 0/0 is NaN",
    "Reciprocal": "1/x has no slope at zero",
    "Pow": "a power below one has an infinite slope at zero",
    "Acos": "the slope of acos is infinite at 1 and -1",
    "Asin": "the slope of asin is infinite at 1 and -1",
    "Atan2": "atan2 has no slope at (0, 0)",
    "Std": "the standard deviation of equal values is zero and has no slope there",
    "Var": "a variance over one value divides by zero",
    "Mul": "zero times inf is NaN",
    "Exp": "exp of a large value is inf",
    "Softmax": "rows of nothing but -inf have no softmax",
    "LogSoftmax": "rows of nothing but -inf have no softmax",
}
"""Why a gradient may not exist, by autograd node."""

PASSES_ON = frozenset(["Mul", "Exp", "Softmax", "LogSoftmax"])
"""Those of them that may as well have been given what they made worse."""


def nonfinite_backward(facts: Facts) -> Outcome:
    """The forward was finite and a gradient is inf or NaN at any scale."""
    if not len(facts.analysis.samples):
        return Skipped("no gradient was sampled")
    origins = facts.origins()
    found = culprits(facts)
    # one that is not the first may have it from an earlier one, on a path that was not there when it was first seen
    found = [c for c in found if c is found[0] or (c.op in REASONS and c.op not in PASSES_ON)]
    own = [c for c in found if not guarded_by_constant(facts, c) and not _born_forward(c, origins)]
    return [_backward(culprit) for culprit in own[:NUM_NAMED]]


def _born_forward(culprit: Culprit, origins: tuple[Origin, ...]) -> bool:
    """Whether something of the forward of that place was not finite to begin with."""
    for origin in origins:
        if any(culprit.is_at(birth.row) or culprit.module == birth.row.module for birth in origin.births):
            return True
    return False


def _backward(culprit: Culprit) -> Finding:
    reason = REASONS.get(culprit.op, "")
    made = "NaN" if culprit.is_nan else "inf"
    places = [Place("call_site", culprit.op, culprit.file, culprit.line)] if culprit.file else []
    if culprit.module and culprit.module != LOSS:
        places.append(Place("module", culprit.module))
    places.append(Place("op", f"{culprit.op} in {culprit.module or LOSS}"))
    return Finding(
        id="nonfinite-backward",
        severity="error",
        confidence="high" if reason else "medium",
        title=f"The gradient of {culprit.op} is {made} at any loss scale",
        summary=(
            f"The forward is finite; the first gradient that is not comes out of {words_of(culprit)} and arrives at "
            f"{culprit.reached}, in {culprit.num_steps} sampled step(s){f': {reason}' if reason else ''}. What came "
            "back to it was finite and of ordinary size, so a smaller scale does not help."
        ),
        scale_can_fix="no",
        where=tuple(places),
        steps=culprit.steps,
        evidence=(Evidence("num_overflows", culprit.num_steps, "sampled steps with such a gradient"),),
        remedy=(
            "Keep the argument away from that point before the operation (x.clamp_min(1e-6) in FP32 for a root or a "
            "logarithm), or mask with torch.where on the input of it, not on its result."
        ),
    )


def unlocated(facts: Facts) -> Outcome:
    """Steps that were not finite for a reason that was never seen."""
    rows = _unexplained_rows(facts)
    located = [origin.steps[0] for origin in facts.origins()]
    located += [culprit.steps[0] for culprit in culprits(facts)]
    located += facts.analysis.outputs.step[_bad_outputs(facts)].tolist()
    if located:
        rows = rows[facts.analysis.steps.step[rows] < min(located) - SAME_FAULT_STEPS]
    if len(rows):
        return [_unlocated(facts, rows)]
    return stopped_at(facts) if not located else []


def _bad_outputs(facts: Facts) -> np.ndarray:
    outputs, clean = facts.analysis.outputs, clean_steps(facts.analysis.steps)
    seen = np.isin(outputs.step, np.fromiter(clean, dtype=np.int64, count=len(clean)))
    return np.asarray((outputs.num_nan + outputs.num_inf > 0) & ~seen)


def _unexplained_rows(facts: Facts) -> np.ndarray:
    """Rows of the step table that were not finite and that neither size, batch nor weights explain."""
    steps = facts.analysis.steps
    hit = np.array([len(ids) > 0 for ids in steps.nonfinite], dtype=bool)
    weights = np.array([ids is not None and len(ids) > 0 for ids in steps.weights_nonfinite], dtype=bool)
    meant = steps.loss_finite == 0
    for history, unexplained in zip(facts.analysis.histories, facts.unexplained, strict=True):
        mine = history.update_of >= 0
        meant[mine] |= unexplained[history.update_of[mine]] & (hit | (steps.found_inf == 1))[mine]
    scaled = (steps.scaled_loss_finite == 0) & (steps.loss_finite != 0)
    return np.flatnonzero(meant & ~scaled & (steps.input_finite != 0) & ~weights)


def _unlocated(facts: Facts, rows: np.ndarray) -> Finding:
    steps, tensors = facts.analysis.steps, facts.analysis.tensors
    first = int(rows[0])
    ids = [int(i) for i in steps.nonfinite[first] if 0 <= int(i) < len(tensors)]
    names = [tensors[i].fqn for i in _in_backward_order(facts, ids)]
    with_gradient = np.asarray(steps.param_amax[first])
    num_params = int((with_gradient != NO_GRADIENT).sum())
    loss = _word(int(steps.loss_finite[first]), "The loss")
    if steps.loss_finite[first] == 1:
        loss = f"The loss was finite ({magnitude(float(steps.loss[first]))})"
    batch = _word(int(steps.input_finite[first]), "the batch")
    which = f"; in backward order the first non-finite gradients were those of {', '.join(names[:NUM_NAMED])}"
    again = f" The same kind of step came {len(rows)} times." if len(rows) > 1 else " It did not come again."
    return Finding(
        id="unlocated-nonfinite",
        severity="warning",
        confidence="medium",
        title="A step was not finite, and its forward was not traced",
        summary=(
            f"Step {int(steps.step[first])}, at scale {power(float(steps.scale[first]))}: {loss[:1].lower()}{loss[1:]}"
            f", {batch}{which if names else ''}. The size of the gradients does not explain it.{again}"
        ),
        scale_can_fix="no",
        where=tuple(Place("param", name) for name in names[:NUM_NAMED])
        or (Place("step", str(int(steps.step[first]))),),
        steps=(int(steps.step[first]), int(steps.step[rows[-1]])),
        evidence=(
            Evidence("num_steps", len(rows), f"of {len(steps)} steps"),
            Evidence("num_nonfinite", len(names), f"of {num_params} parameter gradients"),
            Evidence("scale", float(steps.scale[first])),
        ),
        remedy=(
            "Record again with --origin always, which traces every step, and --save-batch, which keeps the batch for a "
            "replay."
        ),
    )


def _in_backward_order(facts: Facts, ids: Sequence[int]) -> list[int]:
    """Tensors in the order in which backward reaches them at sampled steps."""
    samples = facts.analysis.samples
    place = {i: float(np.median(samples.order[samples.tensor == i])) for i in ids if (samples.tensor == i).any()}
    return sorted(dict.fromkeys(ids), key=lambda i: place.get(i, float("inf")))


def _word(flag: int, what: str) -> str:
    return f"{what} was {'finite' if flag == 1 else 'not finite' if flag == 0 else 'not looked at'}"
