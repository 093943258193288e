"""The exponent histogram against numpy in float64, over every bit pattern that Hypothesis comes up with."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from gradaudit.capture.statistic import ROW_WIDTH, merge_rows, row_values, tensor_row
from gradaudit.formats import MAX_EXPONENT, MIN_EXPONENT, NUM_BINS

pytestmark = [
    pytest.mark.filterwarnings("ignore:ComplexHalf support is experimental"),
    pytest.mark.filterwarnings("ignore:Sparse"),
    pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors"),
]

QUICK = settings(max_examples=60, deadline=None, derandomize=True)


def decode_e4m3(bits: np.ndarray) -> np.ndarray:
    """Sign, four exponent bits of bias 7, three of mantissa; no inf, and one NaN a sign."""
    exponent, mantissa = (bits >> 3) & 15, bits & 7
    value = np.where(exponent == 0, np.ldexp(mantissa, -9), np.ldexp(8 + mantissa, exponent.astype(int) - 10))
    value = np.where(bits & 127 == 127, np.nan, value)
    return np.where(bits >> 7 == 1, -value, value)


def decode_float32(bits: np.ndarray) -> np.ndarray:
    with np.errstate(invalid="ignore"):  # signalling NaNs
        return bits.view(np.float32).astype(np.float64)


# dtype: (bits of one real number, those bits as float64)
REAL: dict[torch.dtype, tuple[type, Callable[[np.ndarray], np.ndarray]]] = {
    torch.float16: (np.uint16, lambda bits: bits.view(np.float16).astype(np.float64)),
    torch.bfloat16: (np.uint16, lambda bits: decode_float32(bits.astype(np.uint32) << 16)),
    torch.float32: (np.uint32, decode_float32),
    torch.float64: (np.uint64, lambda bits: bits.view(np.float64)),
    torch.float8_e5m2: (np.uint8, lambda bits: (bits.astype(np.uint16) << 8).view(np.float16).astype(np.float64)),
    torch.float8_e4m3fn: (np.uint8, decode_e4m3),
}
COMPLEX = {torch.complex32: torch.float16, torch.complex64: torch.float32, torch.complex128: torch.float64}


def tensor_of(bits: np.ndarray, dtype: torch.dtype) -> torch.Tensor:
    signed = bits.view(bits.dtype.name.removeprefix("u"))
    return torch.from_numpy(signed.copy()).view(dtype) if bits.size else torch.empty(0, dtype=dtype)


def expected(values: np.ndarray) -> dict[str, Any]:
    """The statistic of float64 magnitudes, straight from its definition."""
    magnitudes = np.abs(values).ravel()
    finite = magnitudes[np.isfinite(magnitudes)]
    _, exponents = np.frexp(finite[finite > 0])
    bins = np.clip(exponents - 1, MIN_EXPONENT, MAX_EXPONENT) - MIN_EXPONENT
    return {
        "numel": values.size,
        "num_zero": int((magnitudes == 0).sum()),
        "num_nan": int(np.isnan(magnitudes).sum()),
        "num_inf": int(np.isinf(magnitudes).sum()),
        "amax": float(finite.max()) if finite.size else 0.0,
        "counts": np.bincount(bins, minlength=NUM_BINS).tolist(),
    }


def measured(x: torch.Tensor) -> dict[str, Any]:
    row = tensor_row(x)
    assert row.shape == (ROW_WIDTH,)
    assert row.dtype is torch.int64
    values = row_values(row.numpy())
    return {**values, "counts": np.asarray(values["counts"]).tolist()}


def bit_patterns(dtype: torch.dtype, *, complex_pairs: bool = False) -> st.SearchStrategy[np.ndarray]:
    unsigned, _ = REAL[dtype]
    lengths = st.integers(0, 40).map(lambda n: 2 * n if complex_pairs else n)
    return hnp.arrays(unsigned, lengths, elements=st.integers(0, np.iinfo(unsigned).max))


@pytest.mark.parametrize("dtype", REAL, ids=str)
def test_the_row_of_any_bits_is_what_numpy_counts(dtype: torch.dtype) -> None:
    @QUICK
    @given(bit_patterns(dtype))
    def check(bits: np.ndarray) -> None:
        assert measured(tensor_of(bits, dtype)) == expected(REAL[dtype][1](bits))

    check()


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float8_e5m2, torch.float8_e4m3fn], ids=str)
def test_every_value_of_a_small_format_is_counted_right(dtype: torch.dtype) -> None:
    unsigned, decode = REAL[dtype]
    bits = np.arange(np.iinfo(unsigned).max + 1, dtype=unsigned)
    assert measured(tensor_of(bits, dtype)) == expected(decode(bits))
    for one in np.random.default_rng(0).choice(bits, 200):
        assert measured(tensor_of(bits[[one]], dtype)) == expected(decode(bits[[one]]))


@pytest.mark.parametrize("dtype", COMPLEX, ids=str)
def test_a_complex_number_counts_by_its_magnitude(dtype: torch.dtype) -> None:
    real = COMPLEX[dtype]

    @QUICK
    @given(bit_patterns(real, complex_pairs=True))
    def check(bits: np.ndarray) -> None:
        parts = REAL[real][1](bits)
        with np.errstate(over="ignore", under="ignore", invalid="ignore"):
            magnitudes = np.hypot(parts[::2], parts[1::2])
        got, wanted = measured(tensor_of(bits, dtype)), expected(magnitudes)
        assert got.pop("amax") == pytest.approx(wanted.pop("amax"), rel=1e-15)
        assert got == wanted

    check()


EDGES = [
    0.0, -0.0, np.nan, np.inf, -np.inf, 2.0**-149, 2.0**-126, -(2.0**-127), 2.0**-64, 2.0**-65,
    np.nextafter(2.0**-64, 0), 2.0**31, 2.0**32, np.nextafter(2.0**32, 0), -(2.0**127), 65504.0, 65520.0,
    2.0**-24, 2.0**-25, 1.0,
]  # fmt: skip


@pytest.mark.parametrize("value", [*EDGES, 5e-324, 2.0**-1022, 2.0**1023, 1.7e308])
def test_an_edge_value_in_float64_lands_where_it_should(value: float) -> None:
    assert measured(torch.tensor([value], dtype=torch.float64)) == expected(np.array([value]))


@pytest.mark.parametrize("value", EDGES)
def test_an_edge_value_in_float32_lands_where_it_should(value: float) -> None:
    rounded = np.array([value], dtype=np.float32)
    assert measured(torch.from_numpy(rounded)) == expected(rounded.astype(np.float64))


def test_what_lies_outside_the_bins_is_counted_in_the_end_bins() -> None:
    row = measured(torch.tensor([2.0**-65, 2.0**-100, 2.0**-64, 2.0**31, 2.0**32, 3e38]))
    assert row["counts"][0] == 3
    assert row["counts"][-1] == 3
    assert sum(row["counts"]) == 6
    assert row["amax"] == float(np.float32(3e38))


def test_a_subnormal_is_counted_even_where_the_host_flushes_them() -> None:
    x = torch.tensor([2.0**-24, 2.0**-15, 0.0], dtype=torch.float16)
    flushing = torch.set_flush_denormal(True)
    try:
        row = measured(x)
    finally:
        torch.set_flush_denormal(False)
    assert flushing
    assert row == expected(np.array([2.0**-24, 2.0**-15, 0.0]))


LAYOUTS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "contiguous": lambda x: x,
    "no dimension": lambda x: x.reshape(-1)[5],
    "no element": lambda x: x[:, :0],
    "transposed": lambda x: x.transpose(1, 3),
    "expanded": lambda x: x[:1].expand(5, -1, -1, -1),
    "strided": lambda x: x[:, ::2, 1:, ::3],
    "channels last": lambda x: x.contiguous(memory_format=torch.channels_last),
    "flipped rows": lambda x: torch.flip(x, (0,)),
    "a diagonal": lambda x: torch.diagonal(x, dim1=2, dim2=3),
}


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("dtype", [*REAL, *COMPLEX], ids=str)
def test_a_view_counts_its_own_elements(dtype: torch.dtype, layout: str) -> None:
    values = np.random.default_rng(1).normal(size=(2, 4, 3, 6)) * 2.0 ** np.arange(-15, -9)
    view = LAYOUTS[layout](torch.from_numpy(values).to(dtype))
    wide = view.to(torch.complex128 if dtype.is_complex else torch.float64)
    assert measured(view) == expected(np.abs(wide.numpy()))


@pytest.mark.parametrize(
    "dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.complex64], ids=str
)
def test_a_sparse_tensor_counts_as_if_dense_with_its_duplicates_summed(dtype: torch.dtype) -> None:
    @QUICK
    @given(
        shape=st.lists(st.integers(1, 4), min_size=1, max_size=3),
        dense=st.lists(st.integers(0, 3), max_size=2),
        num_stored=st.integers(0, 12),
        seed=st.integers(0, 10**6),
    )
    @example(shape=[3], dense=[], num_stored=0, seed=0)
    @example(shape=[1], dense=[], num_stored=12, seed=0)
    def check(shape: list[int], dense: list[int], num_stored: int, seed: int) -> None:
        rng = np.random.default_rng(seed)
        indices = np.stack([rng.integers(0, size, num_stored) for size in shape])
        values = rng.integers(-4, 5, (num_stored, *dense)) * 0.25  # sums exactly in every format
        whole = np.zeros((*shape, *dense))
        np.add.at(whole, tuple(indices), values)
        x = torch.sparse_coo_tensor(torch.from_numpy(indices), torch.from_numpy(values).to(dtype), whole.shape)
        assert measured(x) == expected(whole)
        assert measured(x.coalesce()) == expected(whole)

    check()


def test_a_large_sparse_tensor_is_never_made_dense() -> None:
    indices = torch.tensor([[0, 2**40, 2**40], [1, 2, 2]])
    x = torch.sparse_coo_tensor(indices, torch.tensor([1.0, 2.0, 2.0]), (2**41, 2**20))
    row = measured(x)
    assert row["numel"] == 2**61
    assert row["num_zero"] == 2**61 - 2
    assert row["amax"] == 4.0


@pytest.mark.parametrize("convert", ["to_sparse_csr", "to_sparse_csc", "to_sparse_bsr", "to_sparse_bsc", "to_mkldnn"])
def test_a_compressed_tensor_counts_as_if_dense(convert: str) -> None:
    dense = torch.tensor([[0.0, 2.0, 0.0, 0.0], [0.5, 0.0, 0.0, torch.nan]])
    arguments = [(2, 2)] if "_bs" in convert else []
    assert measured(getattr(dense, convert)(*arguments)) == expected(dense.double().numpy())


@pytest.mark.parametrize("layout", [torch.strided, torch.jagged], ids=str)
def test_a_nested_tensor_counts_the_elements_it_holds(layout: torch.layout) -> None:
    x = torch.nested.nested_tensor([torch.full((2, 3), 2.0), torch.full((1, 3), 0.25)], layout=layout)
    assert measured(x) == expected(np.array([2.0] * 6 + [0.25] * 3))


def test_a_tensor_that_requires_grad_is_counted_without_growing_the_graph() -> None:
    x = torch.ones(3, requires_grad=True)
    assert not tensor_row(x * 2).requires_grad


ROWS = hnp.arrays(np.int64, st.tuples(st.integers(1, 6), st.just(ROW_WIDTH)), elements=st.integers(0, 2**40))


@QUICK
@given(ROWS, st.randoms(use_true_random=False), st.integers(0, 6))
def test_merging_rows_is_associative_and_free_of_order(rows: np.ndarray, random: Any, cut: int) -> None:
    whole = merge_rows(rows)
    shuffled = rows[random.sample(range(len(rows)), len(rows))]
    parts = [part for part in (shuffled[:cut], shuffled[cut:]) if len(part)]
    assert (merge_rows(shuffled) == whole).all()
    assert (merge_rows(np.stack([merge_rows(part) for part in parts])) == whole).all()


@QUICK
@given(bit_patterns(torch.float32), bit_patterns(torch.float32))
def test_merged_rows_are_the_row_of_the_tensors_put_together(first: np.ndarray, second: np.ndarray) -> None:
    rows = np.stack([tensor_row(tensor_of(bits, torch.float32)).numpy() for bits in (first, second)])
    merged = row_values(merge_rows(rows))
    assert {**merged, "counts": np.asarray(merged["counts"]).tolist()} == expected(
        REAL[torch.float32][1](np.concatenate([first, second]))
    )
