"""Number formats as one table, and where a magnitude falls in each.

Multiplying by a power of two only shifts exponents, so everything gradaudit says about another loss scale follows
from these few constants and an exponent histogram. Edges are those of rounding to nearest even, not of the largest
representable value: FP16 turns 65,520 and more into inf and 2^-25 and less into zero.
"""

from __future__ import annotations

from dataclasses import dataclass

MIN_EXPONENT = -64
MAX_EXPONENT = 31
NUM_BINS = MAX_EXPONENT - MIN_EXPONENT + 1
"""Exponent histograms count floor(log2 |x|) from -64 to 31; what lies outside is counted in the end bins."""


@dataclass(frozen=True, slots=True)
class NumberFormat:
    """A floating format by its exponent range and the bits it keeps.

    `max_value` is the largest finite value; `overflow_at` the smallest magnitude that rounds to inf (or saturates);
    `min_normal_log2` and `min_subnormal_log2` are exponents; `mantissa_bits` counts stored bits, not the hidden one.
    """

    name: str
    mantissa_bits: int
    max_value: float
    overflow_at: float
    min_normal_log2: int
    min_subnormal_log2: int

    @property
    def flush_log2(self) -> int:
        """Magnitudes of at most 2^flush_log2 round to zero (ties go to even, which is zero)."""
        return self.min_subnormal_log2 - 1

    @property
    def max_exponent(self) -> int:
        """floor(log2(max_value)): the bin in which overflow begins."""
        return int(self.max_value).bit_length() - 1 if self.max_value >= 1 else 0


FP16 = NumberFormat("FP16", 10, 65504.0, 65520.0, -14, -24)
BF16 = NumberFormat("BF16", 7, (2 - 2.0**-7) * 2.0**127, (2 - 2.0**-8) * 2.0**127, -126, -133)
FP8_E5M2 = NumberFormat("FP8 E5M2", 2, 57344.0, 61440.0, -14, -16)
FP8_E4M3 = NumberFormat("FP8 E4M3", 3, 448.0, 464.0, -6, -9)

FORMATS = {fmt.name: fmt for fmt in (FP16, BF16, FP8_E5M2, FP8_E4M3)}

FP16_DTYPES = frozenset({"float16"})
"""dtype names whose values passed through FP16."""
