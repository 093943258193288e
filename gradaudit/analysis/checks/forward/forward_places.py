"""What the checks on forward values share: places, magnitudes against the limit, and what is near it."""

from __future__ import annotations

import math

from gradaudit.analysis.checks.base import NUM_NAMED, Facts
from gradaudit.analysis.op_words import INPUT, LOSS, is_half, words
from gradaudit.analysis.origin import Origin, Trace, clean_steps, is_cast_weight, mask_constant
from gradaudit.analysis.report import Evidence, Place
from gradaudit.formats import FP16
from gradaudit.store.tables import OpRow

NUM_NEAR = 3
"""Other tensors near the limit that a finding names."""

NEAR_FROM = 2.0**12
"""Four binades under the limit: what lies below needs another cause to get there."""

FAR_OUTSIDE = 4.0
"""Times the limit from which a clamp would cut off what the model computes with."""

NO_SCALE_HELPS = "The loss scale multiplies the loss, which is computed from this: no scale changes it."


def site(row: OpRow) -> Place:
    """An operation's line in the script."""
    return Place("call_site", row.name, row.file, row.line)


def op_places(row: OpRow, modules: tuple[str, ...] = ()) -> tuple[Place, ...]:
    """An operation as places: its line, the modules whose code it is, and itself."""
    found = [site(row)] if row.file else []
    named = [module for module in (modules or (row.module,)) if module and module != LOSS]
    found += [Place("module", module) for module in named[:NUM_NAMED]]
    found.append(Place("op", f"{row.name} in {row.module or 'the model'}"))
    return tuple(found)


def line_of(row: OpRow) -> str:
    """An operation's line as people write it, empty where it is unknown: train.py:41."""
    return f"{row.file}:{row.line}" if row.file else ""


def whose(row: OpRow) -> str:
    """In whose code, on which line: "in blocks.3 (Block), train.py:41"."""
    if row.module == LOSS:
        owner = "outside the modules"
    elif row.module:
        kind = row.module_class if row.module_class != row.module else ""
        owner = f"in {row.module}" + (f" ({kind})" if kind else "")
    else:
        owner = f"in the forward of {row.module_class}" if row.module_class else "in the forward"
    return ", ".join(part for part in (owner, line_of(row)) if part)


def what(row: OpRow) -> str:
    """The operation with its place: "the product of two tensors in blocks.3 (Block), train.py:41"."""
    name = words(row)
    if name == row.module_class and row.module and row.module != LOSS:  # a layer: its name says it all
        return ", ".join(part for part in (f"{row.module} ({name})", line_of(row)) if part)
    return f"{name} {whose(row)}"


def magnitude(value: float) -> str:
    """A number as people write it: 66,246 or 0.0123."""
    if not math.isfinite(value):
        return "NaN" if math.isnan(value) else "inf" if value > 0 else "-inf"
    return f"{value:,.0f}" if 100 <= abs(value) < 1e9 else f"{value:.4g}"


def times_limit(value: float) -> str:
    """How often FP16's largest number fits into a value: 1.01 or 12."""
    ratio = value / FP16.max_value
    return f"{ratio:.2f}" if ratio < 10 else magnitude(round(ratio))


def against_limit(value: float) -> str:
    """A value against the limit: "66,246 against 65,504: 1.01 times the limit"."""
    return f"{magnitude(value)} against 65,504: {times_limit(value)} times the limit"


def nearest(trace: Trace, row: OpRow) -> list[OpRow]:
    """The FP16 results of the same step that come nearest to the limit, distinct places, the largest first."""
    rows = (
        other
        for other in trace.rows.values()
        if is_half(other) and other.is_finite and other.amax >= NEAR_FROM and other.op != INPUT
    )
    found: dict[tuple[str, str | None, int | None], OpRow] = {}
    skip = (row.module, row.file, row.line)
    for other in sorted(rows, key=lambda other: -other.amax):
        place = (other.module, other.file, other.line)
        if place != skip and place not in found and not is_other_kind(trace, other):
            found[place] = other
            if len(found) == NUM_NEAR:
                break
    return list(found.values())


def is_other_kind(trace: Trace, row: OpRow) -> bool:
    """Masks and weights are no activations."""
    return is_cast_weight(trace, row) or mask_constant(trace, row) is not None


def near_text(near: list[OpRow]) -> str:
    """A sentence on the tensors near the limit, empty without any."""
    if not near:
        return ""
    return " Next nearest to the limit: " + "; ".join(f"{what(row)} with {magnitude(row.amax)}" for row in near) + "."


def magnitude_evidence(origin: Origin) -> tuple[Evidence, ...]:
    """The numbers of a birth: its size in FP32, and how much of the tensor was hit."""
    row = origin.row
    bad = row.num_nan + row.num_posinf + row.num_neginf
    found = [Evidence("num_nonfinite", bad, f"of {row.numel} elements"), Evidence("amax", row.amax, "largest finite")]
    if row.amax_fp32 is not None:
        largest = max((b.row.amax_fp32 or 0.0 for b in origin.births), default=0.0)
        found.insert(0, Evidence("amax_fp32", row.amax_fp32, "", FP16.max_value))
        if math.isfinite(row.amax_fp32):
            found.insert(1, Evidence("times_limit", round(row.amax_fp32 / FP16.max_value, 3), "", 1.0))
        if math.isfinite(largest) and largest > row.amax_fp32:
            found.append(Evidence("amax_fp32_later", largest, "largest over the traced steps"))
    return tuple(found)


def silent_text(facts: Facts, origin: Origin) -> str:
    """A sentence where loss and gradients stayed finite at all these steps, else empty."""
    clean = clean_steps(facts.analysis.steps)
    if all(birth.row.step in clean for birth in origin.births):
        return " The loss and the gradients stayed finite: nothing else shows it, and the numbers are wrong."
    return ""


def span(facts: Facts, first: int, last: int) -> tuple[int, int]:
    """Two steps, within those on record: a step that an exception ended never closed."""
    known = facts.analysis.steps.step
    end = int(known[-1]) if len(known) else 0
    return min(first, end), min(last, end)


def sentence(text: str) -> str:
    """The beginning of a sentence: names stay as they are."""
    return f"{text[:1].upper()}{text[1:]}" if text.startswith(("a ", "the ", "fused ")) else text
