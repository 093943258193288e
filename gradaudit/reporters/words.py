"""The words and number formats every reporter uses, so that one number reads the same in a log, a page and a comment.

Loss scales are powers of two with the plain number behind; shares are percentages with three significant digits that
never round something to nothing (`<0.01 %`) or nearly everything to all (`>99.9 %`). Rounding happens here only.
"""

from __future__ import annotations

import math
import re
import unicodedata
from dataclasses import replace

from gradaudit.analysis.report import Evidence, LayerRow, Outlook, Place

UNKNOWN = "not known"

NO_BREAK = "\N{NO-BREAK SPACE}"

SEVERITY_WORDS = {"error": "ERROR", "warning": "WARNING", "info": "INFO"}
LEVEL_WORDS = {"healthy": "HEALTHY", "attention": "ATTENTION", "failing": "FAILING"}
SEVERITY_ORDER = ("error", "warning", "info")

ZONE_WORDS = {
    "zero": "zero",
    "flushed": "flushed",
    "subnormal": "subnormal",
    "normal": "normal",
    "near_max": "near max",
    "overflow": "overflow",
    "nan": "NaN",
}

ZONE_MEANINGS = {
    "zero": "exact zeros as recorded",
    "flushed": "2^-25 or less: becomes 0 in FP16",
    "subnormal": "up to 2^-14: keeps fewer than 11 bits",
    "normal": "2^-14 to 2^14",
    "near_max": "2^14 to 65,520: two binades of headroom or less",
    "overflow": "65,520 or more, or inf",
    "nan": "NaN",
}

ENDED_WORDS = {
    "ok": "normally",
    "exception": "with an exception",
    "killed": "killed: the process went away without closing the run",
    "running": "still running when it was read",
}

CAN_FIX_WORDS = {
    "yes": "another loss scale fixes this",
    "partly": "another loss scale fixes part of this",
    "no": "no loss scale fixes this",
}

PRECISION_WORDS = {
    "fp16": "stay in FP16",
    "bf16": "train in BF16, which needs no loss scale",
    "fp32-modules": "no loss scale will do; take what fails out of FP16",
}

_ACRONYMS = {"sqnr": "SQNR", "nan": "NaN", "inf": "inf", "fp16": "FP16", "bf16": "BF16", "fp32": "FP32"}

# categories whose characters a terminal acts on or shows as nothing: escape sequences, direction overrides, surrogates
_INVISIBLE = frozenset({"Cc", "Cf", "Cs", "Zl", "Zp"})


_BEFORE_UNIT = re.compile(r"(?<=\d) (?=%|dB\b|\(\d)")


def clean(name: str) -> str:
    """A name in one line that shows what it holds: control and invisible characters become `\\x1b`-like escapes.

    Layer names come from whoever wrote the model; printed raw, one could move the cursor or reverse the text.
    """
    if name.isascii() and name.isprintable():
        return name
    return "".join(_escaped(char) if unicodedata.category(char) in _INVISIBLE else char for char in name)


def _escaped(char: str) -> str:
    return char.encode("unicode_escape").decode("ascii")


def unbroken(name: str) -> str:
    """A cleaned name whose spaces no line break may fall on; layout turns them back into spaces."""
    return clean(name).replace(" ", NO_BREAK)


def prose(text: str) -> str:
    """A sentence in one line: runs of white space become one space, invisible characters become escapes."""
    return clean(" ".join(text.split()))


def glued(text: str) -> str:
    """Text in which no line break may part a number from its unit or a power from the number it stands for."""
    return _BEFORE_UNIT.sub(NO_BREAK, text)


def plural(count: int, noun: str) -> str:
    """`1 step`, `2,000 steps`."""
    return f"{count:,} {noun}" if count == 1 else f"{count:,} {noun}s"


def format_share(share: float | None) -> str:
    """A share of a whole (0 to 1) as a percentage: `12.3 %`, `<0.01 %`, `>99.9 %`; `not known` for None and NaN."""
    if share is None or math.isnan(share):
        return UNKNOWN
    if share <= 0:
        return "0 %"
    if share >= 1:
        return "100 %"
    if share < 1e-4:
        return "<0.01 %"
    percent = float(f"{share * 100:.2e}")
    if percent >= 100:
        return ">99.9 %"
    return f"{percent:.{2 - math.floor(math.log10(percent))}f} %"


def format_scale(scale: float | None) -> str:
    """A loss scale as a power of two and as a number: `2^16 (65,536)`, `2^11.55 (3,000)`; `none` without a scaler."""
    if scale is None:
        return "none"
    if not math.isfinite(scale) or scale <= 0:
        return f"{scale:g}"
    mantissa, exponent = math.frexp(scale)
    power = f"2^{exponent - 1}" if mantissa == 0.5 else f"2^{math.log2(scale):.2f}"
    return f"{power} ({format_number(scale)})"


def format_log2(exponent: int | None) -> str:
    """An exponent of two as a loss scale: 16 is `2^16 (65,536)`; `unbounded` for None."""
    return "unbounded" if exponent is None else format_scale(math.ldexp(1.0, exponent))


def format_number(value: float) -> str:
    """A plain number: whole ones in full with thousands separators, others with four significant digits."""
    if isinstance(value, int) or (math.isfinite(value) and value == int(value) and abs(value) < 1e15):
        return f"{int(value):,}"
    return "NaN" if math.isnan(value) else f"{value:.4g}"


def format_db(value: float | None) -> str:
    """A ratio in decibels: `12.3 dB`."""
    return UNKNOWN if value is None or math.isnan(value) else f"{value:.1f} dB"


def format_steps(steps: tuple[int, int]) -> str:
    """`step 7` or `steps 7 to 90`."""
    first, last = steps
    return f"step {first:,}" if first == last else f"steps {first:,} to {last:,}"


def format_skipped(outlook: Outlook) -> str:
    """Skipped steps, with the bounds where the record leaves the count open: `3 (between 1 and 5)`."""
    low, high = outlook.num_skipped_low, outlook.num_skipped_high
    if low is None or high is None or low == high:
        return f"{outlook.num_skipped:,}"
    return f"{outlook.num_skipped:,} (between {low:,} and {high:,})"


def format_evidence(evidence: Evidence) -> str:
    """One number behind a finding: `SQNR 12.3 dB (threshold 40.0 dB)`."""
    text = f"{evidence_label(evidence.name)} {_quantity(evidence.value, evidence)}"
    if evidence.threshold is None:
        return text
    # what it is a share of, or a count of, has just been said
    unit = "" if " " in evidence.unit else evidence.unit
    return f"{text} (threshold {_quantity(evidence.threshold, replace(evidence, unit=unit))})"


def evidence_label(name: str) -> str:
    """A field name as words: `min_sqnr_db` is `min SQNR`; the unit stands behind the number anyway."""
    for suffix in ("_db", "_frac", "_log2", "_s", "_bytes"):
        name = name.removesuffix(suffix)
    words = name.removeprefix("num_").split("_")
    return clean(" ".join(_ACRONYMS.get(word, word) for word in words))


def _quantity(value: float | int | str, evidence: Evidence) -> str:
    if isinstance(value, str):
        return f"{clean(value)} {evidence.unit}".rstrip()
    if evidence.unit == "dB":
        return format_db(value)
    if evidence.name.endswith("_log2"):
        return f"2^{value:g} {evidence.unit}".rstrip()
    if evidence.name.endswith("_frac") or evidence.name.endswith("_rate"):
        return f"{format_share(value)} {evidence.unit}".rstrip()
    if evidence.name.endswith("scale"):
        return f"{format_scale(float(value))} {evidence.unit}".rstrip()
    return f"{format_number(value)} {evidence.unit}".rstrip()


def place_detail(place: Place) -> str:
    """What a place is and which line of the user's code made it: `module, train.py:41`."""
    kind = place.type.replace("_", " ")
    if place.file is None:
        return kind
    return f"{kind}, {clean(place.file)}" + (f":{place.line}" if place.line is not None else "")


def layer_label(layer: LayerRow) -> str:
    """Name unique enough to show: the fqn, and the operation where a module has several. Agrees with TensorInfo."""
    return f"{layer.fqn} [{layer.op}]" if layer.op and layer.kind == "op_grad" else layer.fqn
