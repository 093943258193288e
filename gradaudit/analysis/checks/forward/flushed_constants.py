"""Small constants that FP16 does not have: 0 or 1 where they should guard a division, a logarithm or a root."""

from __future__ import annotations

from collections.abc import Sequence

from gradaudit.analysis.checks.base import NUM_NAMED, Facts, Outcome, Skipped
from gradaudit.analysis.checks.forward.forward_places import line_of, op_places, sentence, span, what
from gradaudit.analysis.checks.forward.gradient_births import Culprit, culprits
from gradaudit.analysis.op_words import POLES, is_flushed, words
from gradaudit.analysis.origin import Origin, Trace, around, lost_constants, traces
from gradaudit.analysis.report import Evidence, Finding
from gradaudit.formats import FP16
from gradaudit.store.tables import OpRow

NEEDS_EPS = 4
"""Operations between an eps and what it guards, at most: x + eps, a root, a division."""


def explained_by_constant(trace: Trace, row: OpRow) -> OpRow | None:
    """The operation whose constant FP16 does not have, shortly before one without a finite value, if any."""
    if row.name not in POLES:
        return None
    near = (row, *around(trace, row, back=True))
    return next((before for before in near if lost_constants(trace, before)), None)


def epsilon_flushed(facts: Facts) -> Outcome:
    """Constants that FP16 does not have: an error where a NaN or inf follows from one."""
    if not facts.ops:
        return Skipped("no operation of a forward was seen")
    used = _used(facts)
    if not used:
        return []
    gradients = culprits(facts)
    found, harmless = [], []
    for rows in used:
        births = _births_after(facts, rows[0][1])
        slopes = [culprit for culprit in gradients if _guards(rows, culprit)]
        if births or slopes:
            found.append(_error(facts, rows, births, slopes))
        else:
            harmless.append(rows)
    return [*found, _warning(facts, harmless)] if harmless else found


def guarded_by_constant(facts: Facts, culprit: Culprit) -> bool:
    """Whether a gradient without a finite value comes of such a constant."""
    return any(_guards(rows, culprit) for rows in _used(facts))


def _used(facts: Facts) -> list[list[tuple[Trace, OpRow]]]:
    """Operations with such constants by place, with their step, the first seen first."""
    used: dict[tuple[object, ...], list[tuple[Trace, OpRow]]] = {}
    for trace in traces(facts.ops):
        for row in trace.rows.values():
            constants = lost_constants(trace, row)
            if constants:
                place = (row.file, row.line) if row.file else (row.module,)
                used.setdefault((row.name, constants, *place), []).append((trace, row))
    return list(used.values())


def _births_after(facts: Facts, eps: OpRow) -> list[Origin]:
    found = []
    for origin in facts.origins():
        if origin.first.kind == "undefined":
            cause = explained_by_constant(origin.first.trace, origin.row)
            if cause is not None and _same_place(cause, eps):
                found.append(origin)
    return found


def _same_place(a: OpRow, b: OpRow) -> bool:
    return (a.name, a.file, a.line) == (b.name, b.file, b.line) and (bool(a.file) or a.module == b.module)


def _guards(rows: Sequence[tuple[Trace, OpRow]], culprit: Culprit) -> bool:
    """Whether the operation whose slope is not finite follows such a constant."""
    if culprit.op.lower() not in POLES:
        return False
    for trace, eps in rows:
        for after in around(trace, eps, back=False):
            if after.name == culprit.op.lower() and culprit.is_at(after):
                return True
    return False


def _error(
    facts: Facts, rows: Sequence[tuple[Trace, OpRow]], births: Sequence[Origin], slopes: Sequence[Culprit]
) -> Finding:
    row = rows[0][1]
    constant, becomes = _constant(*rows[0])
    if births:
        born = births[0]
        follows = f"{what(born.row)} then made {'NaN' if born.row.num_nan else 'inf'} from it"
        steps, num = born.steps, born.row.num_nan + born.row.num_posinf + born.row.num_neginf
        evidence = Evidence("num_nonfinite", num, f"of {born.row.numel} elements")
    else:
        steps = slopes[0].steps
        follows = f"the forward is finite, the gradient of {words_of(slopes[0])} is not, at any scale"
        evidence = Evidence("num_overflows", slopes[0].num_steps, "steps with such a gradient")
    places = op_places(row, tuple(dict.fromkeys(other.module for _, other in rows)))
    if births:
        places = tuple(dict.fromkeys((*places, *op_places(births[0].row))))
    return Finding(
        id="epsilon-flushed",
        severity="error",
        confidence="high",
        title=f"A constant of {constant:g} is {becomes} in FP16, and NaN or inf follows",
        summary=(
            f"{sentence(what(row))}, uses {constant:.7g}, which is {becomes} in FP16: it guards nothing; {follows}. "
            "No loss scale changes it."
        ),
        scale_can_fix="no",
        where=places,
        steps=span(facts, *steps),
        evidence=(_evidence(constant), evidence),
        remedy=_remedy(constant),
    )


def words_of(culprit: Culprit) -> str:
    """The operation a gradient went wrong in, with its line."""
    return f"{culprit.op} in {culprit.module or 'the loss'}" + (f" ({culprit.line_text})" if culprit.line_text else "")


def _warning(facts: Facts, groups: Sequence[Sequence[tuple[Trace, OpRow]]]) -> Finding:
    firsts = [rows[0][1] for rows in groups]
    constant, becomes = _constant(*groups[0][0])
    places = dict.fromkeys(place for row in firsts[:NUM_NAMED] for place in op_places(row))
    steps = [row.step for rows in groups for _, row in rows]
    num = len(firsts)
    elsewhere = f" {num - 1} more such constants: {', '.join(_short(*rows[0]) for rows in groups[1:NUM_NAMED])}."
    return Finding(
        id="epsilon-flushed",
        severity="warning",
        confidence="high",
        title=f"A constant of {constant:g} is {becomes} in FP16",
        summary=(
            f"{sentence(what(firsts[0]))}, uses {constant:.7g}, which is {becomes} in FP16: it guards nothing. Nothing "
            f"came of it at the steps seen.{elsewhere if num > 1 else ''}"
        ),
        scale_can_fix="no",
        where=tuple(places),
        steps=span(facts, min(steps), max(steps)),
        evidence=(_evidence(constant),),
        remedy=_remedy(constant),
    )


def _short(trace: Trace, row: OpRow) -> str:
    return f"{_constant(trace, row)[0]:g} ({line_of(row) or words(row)})"


def _constant(trace: Trace, row: OpRow) -> tuple[float, str]:
    constant = lost_constants(trace, row)[0]
    return constant, "0" if is_flushed(constant) else "1"


def _evidence(constant: float) -> Evidence:
    if is_flushed(constant):
        return Evidence("constant", constant, "is 0 in FP16", 2.0**FP16.flush_log2)
    return Evidence("constant", constant, "is 1 in FP16")


def _remedy(constant: float) -> str:
    if is_flushed(constant):
        return (
            "Compute that expression in FP32 (.float() before it), or use a constant FP16 can hold: 1e-7 beside 0, "
            "1e-4 where it is squared, rooted or divided by."
        )
    return "Compute that expression in FP32 (.float() before it), or keep a bound that FP16 has: 0.999, not 1 - 1e-6."
