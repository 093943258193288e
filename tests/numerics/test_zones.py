"""Zones against the definition, for every FP16 number there is, at the recorded scale and at others."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from gradaudit.analysis.zones import ZONES, headroom_log2, zone_counts, zone_fractions
from gradaudit.capture.statistic import row_values, tensor_row
from gradaudit.formats import BF16, FORMATS, FP8_E4M3, FP8_E5M2, FP16, MAX_EXPONENT, MIN_EXPONENT, NumberFormat

PATTERNS = np.arange(65536, dtype=np.uint16).view(np.float16)
"""Every FP16 number, infinities and NaNs included."""


def zones_of(x: torch.Tensor, *, shift_log2: int = 0, fmt: NumberFormat = FP16) -> dict[str, int]:
    """What gradaudit counts, from a tensor to its zones."""
    row = row_values(tensor_row(x).numpy())
    columns = [np.array([row[name]]) for name in ("counts", "num_zero", "num_nan", "num_inf", "amax")]
    (counts,) = zone_counts(*columns, shift_log2=shift_log2, fmt=fmt)
    return dict(zip(ZONES, counts.tolist(), strict=True))


def zone_by_definition(value: float, fmt: NumberFormat = FP16) -> str:
    """The zone of one value before it is rounded to the format, in float64."""
    size = abs(value)
    if np.isnan(value):
        return "nan"
    if size == 0:
        return "zero"
    if size >= fmt.overflow_at:
        return "overflow"
    if size <= 2.0**fmt.flush_log2:
        return "flushed"
    if size < 2.0**fmt.min_normal_log2:
        return "subnormal"
    return "near_max" if size >= 2.0 ** (fmt.max_exponent - 1) else "normal"


def multiplied(values: np.ndarray, shift: int) -> np.ndarray:
    with np.errstate(invalid="ignore"):  # signalling NaNs
        return values.astype(np.float64) * 2.0**shift


def counted(values: np.ndarray, fmt: NumberFormat = FP16) -> dict[str, int]:
    zones = [zone_by_definition(float(value), fmt) for value in values]
    return {zone: zones.count(zone) for zone in ZONES}


def test_every_fp16_number_lies_in_the_zone_of_the_definition() -> None:
    defined = np.array([zone_by_definition(float(value)) for value in PATTERNS])
    for zone in ZONES:
        members = PATTERNS[defined == zone]

        # all of them, and so each
        assert zones_of(torch.from_numpy(members)) == {**dict.fromkeys(ZONES, 0), zone: len(members)}


def test_all_fp16_numbers_at_once_are_counted_as_the_definition_has_it() -> None:
    assert zones_of(torch.from_numpy(PATTERNS)) == counted(PATTERNS.astype(np.float64))
    assert zones_of(torch.from_numpy(PATTERNS)) == {
        "zero": 2,
        "flushed": 0,
        "subnormal": 2 * 1023,
        "normal": 2 * 28 * 1024,
        "near_max": 2 * 2 * 1024,
        "overflow": 2,
        "nan": 2 * 1023,
    }


@pytest.mark.parametrize("shift", [-30, -17, -12, -11, -2, -1, 1, 2, 5, 14, 15, 16, 31])
def test_at_another_scale_zones_are_those_of_the_multiplied_numbers(shift: int) -> None:
    """One bin holds 2^-25, which flushes, and what lies just above, which does not: that much is not known."""
    values = multiplied(PATTERNS, shift)
    exactly_at_the_edge = int((np.abs(values) == 2.0**FP16.flush_log2).sum())
    expected = counted(values)

    zones = zones_of(torch.from_numpy(PATTERNS), shift_log2=shift)

    assert zones["subnormal"] - expected["subnormal"] == exactly_at_the_edge
    assert expected["flushed"] - zones["flushed"] == exactly_at_the_edge
    for zone in ("zero", "normal", "nan"):
        assert zones[zone] == expected[zone]
    # of the values between 65,520 and 65,536 only the largest can be told
    assert zones["near_max"] + zones["overflow"] == expected["near_max"] + expected["overflow"]
    assert abs(zones["overflow"] - expected["overflow"]) <= sum((np.abs(values) >= 65520) & (np.abs(values) < 65536))


@pytest.mark.parametrize("shift", [-30, -17, -12, -11, -2, -1, 1, 2, 5, 14, 15, 16, 31])
def test_zones_tell_what_casting_does(shift: int) -> None:
    finite = PATTERNS[np.isfinite(PATTERNS)]
    with np.errstate(over="ignore"):
        cast = multiplied(finite, shift).astype(np.float16)
    zones = zones_of(torch.from_numpy(finite), shift_log2=shift)

    became_zero = int(((cast == 0) & (finite != 0)).sum())
    at_the_edge = int((np.abs(multiplied(finite, shift)) == 2.0**-25).sum())
    assert zones["flushed"] == became_zero - at_the_edge
    assert zones["overflow"] == int(np.isinf(cast).sum())


@pytest.mark.parametrize(
    ("value", "zone"),
    [
        (65504.0, "near_max"), (65519.9, "near_max"), (65520.0, "overflow"), (65535.9, "overflow"),
        (65536.0, "overflow"), (2.0**14, "near_max"), (2.0**14 * (1 - 2**-20), "normal"), (2.0**-14, "normal"),
        (2.0**-14 * (1 - 2**-20), "subnormal"), (2.0**-25 * (1 + 2**-20), "subnormal"),
        (2.0**-25 * (1 - 2**-20), "flushed"), (2.0**-70, "flushed"), (2.0**40, "overflow"),
        (float("inf"), "overflow"), (float("-inf"), "overflow"), (float("nan"), "nan"), (-0.0, "zero"),
    ],
)  # fmt: skip
def test_the_edges_are_those_of_rounding_to_nearest(value: float, zone: str) -> None:
    assert zones_of(torch.tensor([value], dtype=torch.float64))[zone] == 1


numbers = st.lists(st.floats(width=32, allow_subnormal=True), max_size=60)


@given(values=numbers, shift=st.integers(-80, 80), fmt=st.sampled_from(list(FORMATS.values())))
@settings(max_examples=150, deadline=None)
def test_zones_share_out_all_elements_in_every_format(values: list[float], shift: int, fmt: NumberFormat) -> None:
    zones = zones_of(torch.tensor(values, dtype=torch.float32), shift_log2=shift, fmt=fmt)

    assert sum(zones.values()) == len(values)
    assert min(zones.values()) >= 0
    (fractions,) = zone_fractions(np.array([list(zones.values())]))
    assert fractions.sum() == pytest.approx(1.0 if values else 0.0, abs=1e-12)


@given(values=numbers, shift=st.integers(-40, 40))
@settings(max_examples=80, deadline=None)
def test_a_larger_scale_flushes_fewer_and_overflows_more(values: list[float], shift: int) -> None:
    x = torch.tensor(values, dtype=torch.float32)
    here, there = zones_of(x, shift_log2=shift), zones_of(x, shift_log2=shift + 1)

    assert there["flushed"] <= here["flushed"]
    assert there["overflow"] >= here["overflow"]
    assert (there["zero"], there["nan"]) == (here["zero"], here["nan"])


@pytest.mark.parametrize(
    ("fmt", "dtype"), [(FP16, torch.float16), (FP8_E5M2, torch.float8_e5m2), (FP8_E4M3, torch.float8_e4m3fn)]
)
def test_a_formats_edges_are_those_of_torchs_own_cast(fmt: NumberFormat, dtype: torch.dtype) -> None:
    limits = torch.finfo(dtype)
    above, below = 1 + 2.0**-10, 1 - 2.0**-10

    def cast(value: float) -> float:
        return float(torch.tensor(value, dtype=torch.float64).float().to(dtype).float())

    assert limits.max == fmt.max_value
    assert limits.smallest_normal == 2.0**fmt.min_normal_log2
    assert cast(2.0**fmt.min_subnormal_log2) == 2.0**fmt.min_subnormal_log2
    assert cast(2.0**fmt.flush_log2) == 0.0 == cast(2.0**fmt.flush_log2 * below)
    assert cast(2.0**fmt.flush_log2 * above) > 0.0
    assert cast(fmt.overflow_at * (1 - 2.0**-7 * 2.0**-fmt.mantissa_bits)) == fmt.max_value
    assert cast(1 + 2.0**-fmt.mantissa_bits) > 1.0 == cast(1 + 2.0 ** -(fmt.mantissa_bits + 1))


def test_bf16_keeps_what_fp16_loses_but_for_precision() -> None:
    limits = torch.finfo(torch.bfloat16)
    assert limits.max == BF16.max_value
    assert limits.smallest_normal == 2.0**BF16.min_normal_log2
    x = torch.tensor([2.0**-60, 2.0**-30, 1.0, 2.0**20, 2.0**31])

    assert zones_of(x, fmt=BF16) == {**dict.fromkeys(ZONES, 0), "normal": 5}
    assert zones_of(x) == {**dict.fromkeys(ZONES, 0), "flushed": 2, "normal": 1, "overflow": 2}


def test_a_tensor_without_elements_has_no_zones() -> None:
    assert set(zones_of(torch.empty(0)).values()) == {0}
    assert zone_fractions(np.zeros((1, 7))).tolist() == [[0.0] * 7]


def test_headroom_counts_binades_up_to_the_largest_number() -> None:
    headroom = headroom_log2(np.array([65504.0, 32752.0, 0.0, np.inf, np.nan]))

    assert headroom[:2].tolist() == [0.0, 1.0]
    assert headroom[2:4].tolist() == [np.inf, -np.inf]
    assert np.isnan(headroom[4])
    assert headroom_log2(np.array([448.0]), FP8_E4M3).tolist() == [0.0]


def test_what_lies_outside_the_histogram_is_counted_at_its_ends() -> None:
    x = torch.tensor([2.0 ** (MIN_EXPONENT - 20), 2.0 ** (MAX_EXPONENT + 20)])

    assert zones_of(x)["flushed"] == 1
    assert zones_of(x)["overflow"] == 1
