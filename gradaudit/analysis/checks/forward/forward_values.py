"""Where the first bad number of a forward was born: the group's findings about values that left FP16's range."""

from __future__ import annotations

import math
from collections.abc import Callable

from gradaudit.analysis.checks.base import Check, Facts, Outcome, Skipped
from gradaudit.analysis.checks.forward.bad_outputs import bad_outputs
from gradaudit.analysis.checks.forward.birth_ids import identify, num_added
from gradaudit.analysis.checks.forward.flushed_constants import epsilon_flushed
from gradaudit.analysis.checks.forward.forward_places import (
    FAR_OUTSIDE,
    NO_SCALE_HELPS,
    against_limit,
    line_of,
    magnitude,
    magnitude_evidence,
    near_text,
    nearest,
    op_places,
    sentence,
    silent_text,
    site,
    span,
    what,
)
from gradaudit.analysis.checks.forward.half_loss import loss_in_half
from gradaudit.analysis.checks.forward.half_values import critical_op_in_half, headroom_low
from gradaudit.analysis.checks.forward.lost_digits import lost_digits
from gradaudit.analysis.checks.forward.nonfinite_gradients import nonfinite_backward, unlocated
from gradaudit.analysis.op_words import CRITERIA, INPUT, MATMULS, REDUCTIONS, is_half, is_square, words
from gradaudit.analysis.origin import BAD, Birth, Origin, Trace, around, badness
from gradaudit.analysis.report import Evidence, Finding, Place
from gradaudit.formats import FP16
from gradaudit.store.tables import OpRow

NO_TRACE = Skipped("no forward was traced: nothing was non-finite, or it could not be")


def _looked(name: str, make: Callable[[Facts, Origin], Finding]) -> Callable[[Facts], Outcome]:
    def look(facts: Facts) -> Outcome:
        if not facts.ops:
            return NO_TRACE
        return [make(facts, origin) for origin in facts.origins() if identify(origin.first) == name]

    return look


def _overflows(facts: Facts) -> Outcome:
    found = _looked("forward-overflow", _forward_overflow)(facts)
    # where a forward began with NaN or inf, in a weight or in the batch, the modules only passed it on
    given = any(row.op == INPUT and badness(row) == BAD for row in facts.ops)
    if facts.origins() or given:
        return found
    from_outputs = bad_outputs(facts)
    return from_outputs or found


def _overflow_remedy(row: OpRow, otherwise: str) -> str:
    if row.amax_fp32 is not None and math.isfinite(row.amax_fp32) and row.amax_fp32 > FAR_OUTSIDE * FP16.max_value:
        return (
            "Compute this part in FP32 (an autocast(enabled=False) block with .float() on its inputs) or train in "
            "BF16. A clamp would cut off values the model computes with."
        )
    return otherwise


def _forward_overflow(facts: Facts, origin: Origin) -> Finding:
    row, birth = origin.row, origin.first
    outside = birth.kind == "overflow"
    if outside and row.amax_fp32 is not None:
        title = f"{words(row)[:1].upper()}{words(row)[1:]} leaves FP16's range in the forward"
        summary = f"{sentence(what(row))}: {against_limit(row.amax_fp32)}, from finite inputs."
    elif outside:
        title = "A value leaves FP16's range in the forward"
        summary = f"{sentence(what(row))} made inf from finite inputs."
    else:
        title, summary = _undefined(birth)
    remedy = _overflow_remedy(
        row,
        "Compute this operation in FP32 (.float() on its inputs, outside autocast), scale its inputs down, or train in "
        "BF16; a clamp just below 65,504 costs little where the limit is exceeded this narrowly.",
    )
    lost = lost_digits(origin.first.trace, row) if birth.kind == "undefined" else ""
    if lost:
        summary += lost
        remedy = (
            "Compute the argument in FP32 from where the digits are lost, or use the fused form of it "
            "(binary_cross_entropy_with_logits, logsigmoid, log_softmax, torch.var on x.float())."
        )
    elif not outside and row.name in CRITERIA:
        remedy = (
            "Look at the targets of that step: a mean over none that counts is 0/0, and a CTC target longer than its "
            "input has no path (zero_infinity=True). Leave such samples out, or sum and divide by max(count, 1)."
        )
    elif not outside:
        remedy = (
            "Keep the argument of this operation inside its domain (clamp it before, in FP32), or mask it out there."
        )
    return _finding(facts, origin, "forward-overflow", title, summary, remedy)


def _undefined(birth: Birth) -> tuple[str, str]:
    row = birth.row
    made = "NaN" if row.num_nan else "-inf" if row.num_neginf else "inf"
    where = sentence(what(row))
    if birth.kind == "mask":
        turned = f", and {what(birth.turned)} makes NaN or inf of it" if birth.turned else ""
        return f"A constant makes {made}, and nothing absorbs it", f"{where} made {made} on purpose{turned}."
    given = [c for c in row.constants if not math.isfinite(c)]
    if given:
        title = f"A constant of {given[0]} makes {made} in the forward"
        return title, f"{where} made {made} from finite inputs with the constant {given[0]}."
    if not is_half(row):
        title = f"{words(row)[:1].upper()}{words(row)[1:]} has no finite value here, in {row.dtype}"
        return title, f"{where} made {made} from finite inputs, in {row.dtype}: FP16's range is not the reason."
    title = f"{words(row)[:1].upper()}{words(row)[1:]} has no finite value here"
    return title, f"{where} made {made} from finite inputs; with the same inputs FP32 does so too."


def _attention(facts: Facts, origin: Origin) -> Finding:
    row = origin.row
    size = f": {against_limit(row.amax_fp32)}" if row.amax_fp32 is not None else " and are inf"
    return _finding(
        facts, origin, "attention-logits-overflow", "Attention scores leave FP16's range before the softmax",
        f"The scores go out of range in {what(row)}{size}; a softmax is taken of them.",
        "Scale the queries by 1/sqrt(d) before the product, not the scores after it; normalise queries and keys; or "
        "compute the product in FP32.",
    )  # fmt: skip


def _reduction(facts: Facts, origin: Origin) -> Finding:
    row, trace = origin.row, origin.first.trace
    size = f": {against_limit(row.amax_fp32)}" if row.amax_fp32 is not None else " to inf"
    count = num_added(trace, row)
    if is_square(row):
        after = next(op for op in around(trace, row, back=False) if op.name in REDUCTIONS)
        count, how = num_added(trace, after), f" {words(after)[:1].upper()}{words(after)[1:]} follows; a"
        how += " square leaves FP16 for values from 256 up"
        how += f", here of {count:,} elements each." if count and count > 1 else "."
    else:
        how = f" It runs over {count:,} elements in FP16" if count else ""
        how += f": their mean may be at most {magnitude(FP16.max_value / count)}." if count and _is_sum(row) else "."
    more = (Evidence("num_elements", count, "elements per result"),) if count else ()
    used = [op for op in around(trace, row, back=False) if op.name in ("rsqrt", "reciprocal", "div") and op.is_finite]
    if used and not origin.first.reaches_loss:
        how += f" {sentence(what(used[0]))} turns the inf into a plain 0."
    return _finding(
        facts, origin, "reduction-overflow", "A sum over elements leaves FP16's range",
        f"{sentence(what(row))} overflows{size}.{how if how != '.' else ''}",
        ".float() on the tensor before the square and the sum, or divide before summing.", more=more,
    )  # fmt: skip


def _is_sum(row: OpRow) -> bool:
    return row.name in MATMULS or row.name in ("sum", "nansum", "cumsum")


def _masked_row(facts: Facts, origin: Origin) -> Finding:
    birth, row = origin.first, origin.row
    num = row.num_masked_rows
    rows = max(row.numel // row.shape[-1], 1) if row.shape and row.shape[-1] else 1
    of_them = f"{num:,} of {rows:,} rows" if num else "Some rows"
    lines = [_why_masked(source) for source in birth.sources[:2]]
    made = f" What made it -inf: {'; '.join(lines)}." if lines else " The mask leaves nothing of them."
    places = tuple(place for source in birth.sources for place in _source_places(source, birth.trace))
    evidence = (
        Evidence("num_masked_rows", num or 0, f"of {rows} rows", 0.0),
        Evidence("num_nan", row.num_nan, f"of {row.numel} elements"),
    )
    return Finding(
        id="masked-row",
        severity="error",
        confidence="high",
        title="A softmax gets rows of nothing but -inf, and makes NaN of them",
        summary=f"{of_them} of the input of {what(row)} hold nothing but -inf.{made} {NO_SCALE_HELPS}",
        scale_can_fix="no",
        where=tuple(dict.fromkeys((*places, *op_places(row, origin.modules)))),
        steps=span(facts, *origin.steps),
        evidence=evidence,
        remedy=(
            "Leave one entry of every row unmasked, or set the output of such rows to zero with torch.where on the "
            "input. Combine masks as booleans and fill once with torch.finfo(scores.dtype).min, after the last sum."
        ),
    )


def _why_masked(source: OpRow) -> str:
    if source.op == INPUT:
        return f"{source.module or 'a tensor'} holds -inf"
    large = [c for c in source.constants if abs(c) > FP16.max_value and math.isfinite(c)]
    if large:
        return f"the constant {large[0]:g}, out of FP16's range, in {what(source)}"
    if source.amax_fp32 is not None and math.isfinite(source.amax_fp32):
        return f"{what(source)}, whose result of -{magnitude(source.amax_fp32)} is out of FP16's range"
    return f"-inf from {what(source)}"


def _source_places(source: OpRow, trace: Trace) -> tuple[Place, ...]:
    if source.op != INPUT:
        return (site(source),) if source.file else ()
    return tuple(site(user) for user in trace.uses(source)[:1] if user.file)


def _finding(
    facts: Facts, origin: Origin, name: str, title: str, summary: str, remedy: str, more: tuple[Evidence, ...] = ()
) -> Finding:
    birth = origin.first
    known = birth.kind != "overflow" or origin.row.amax_fp32 is not None
    lines = {line_of(other.row) for other in origin.births}
    copies = f" The same in {len(origin.modules)} modules." if len(origin.modules) > 1 and len(lines) == 1 else ""
    near = near_text(nearest(birth.trace, origin.row)) if birth.kind == "overflow" else ""
    return Finding(
        id=name,
        severity="error",
        confidence="high" if known and birth.trace.is_whole else "medium",
        title=title,
        summary=f"{summary}{copies}{near}{silent_text(facts, origin)} {NO_SCALE_HELPS}",
        scale_can_fix="no",
        where=op_places(origin.row, origin.modules),
        steps=span(facts, *origin.steps),
        evidence=(*magnitude_evidence(origin), *more),
        remedy=remedy,
    )


FORWARD_VALUES: tuple[Check, ...] = (
    Check("masked-row", _looked("masked-row", _masked_row)),
    Check("attention-logits-overflow", _looked("attention-logits-overflow", _attention)),
    Check("reduction-overflow", _looked("reduction-overflow", _reduction)),
    Check("loss-in-half", loss_in_half),
    Check("forward-overflow", _overflows),
    Check("epsilon-flushed", epsilon_flushed),
    Check("nonfinite-backward", nonfinite_backward),
    Check("critical-op-in-half", critical_op_in_half),
    Check("forward-headroom-low", headroom_low),
    Check("unlocated-nonfinite", unlocated),
)
