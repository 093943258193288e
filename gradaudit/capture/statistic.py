"""The one statistic everything else is derived from: a tensor's exponent histogram, in portable torch.

A row is int64 [ROW_WIDTH] on the tensor's own device: NUM_BINS counts of floor(log2 |x|), then zeros, NaNs, infs and
the bits of the largest finite magnitude as float64. Nothing here has an output shape that depends on data, and nothing
reads a value on the host, except `row_values` and `merge_rows`, which take rows already copied there.

Shape letters: N elements, R rows, W ROW_WIDTH.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass

import numpy as np
import torch

from gradaudit.formats import MAX_EXPONENT, MIN_EXPONENT, NUM_BINS

ROW_WIDTH = NUM_BINS + 4
_ZERO, _NAN, _INF, _AMAX = NUM_BINS, NUM_BINS + 1, NUM_BINS + 2, NUM_BINS + 3


@dataclass(frozen=True, slots=True)
class _Field:
    """Where the exponent sits in an IEEE format's bits."""

    integer: torch.dtype
    mantissa_bits: int
    num_exponents: int
    bias: int
    magnitude_mask: int


_FLOAT32 = _Field(torch.int32, 23, 256, 127, 0x7FFFFFFF)
_FLOAT64 = _Field(torch.int64, 52, 2048, 1023, 0x7FFFFFFFFFFFFFFF)


def tensor_row(x: torch.Tensor) -> torch.Tensor:
    """Exponent histogram of one tensor.

    Args:
        x: Any shape, floating dtype (complex by magnitude) and layout; a sparse tensor is counted as if dense, its
            duplicate indices summed first.

    Returns:
        int64 row of shape [ROW_WIDTH] on x's device; rows merge by `merge_rows`.

    Sync: none.
    """
    values_N, num_implicit_zeros = dense_values(x)
    # complex magnitudes are rounded, and may overflow, in float32
    field = _FLOAT64 if values_N.dtype is torch.float64 or values_N.is_complex() else _FLOAT32
    bits_N = _widen(values_N, field).view(field.integer) & field.magnitude_mask
    counts_E = _count(bits_N >> field.mantissa_bits, field.num_exponents)
    special = (field.num_exponents - 1) << field.mantissa_bits
    num_zero = bits_N.numel() - torch.count_nonzero(bits_N)
    num_nan = torch.count_nonzero(bits_N > special)
    num_special = counts_E.narrow(0, field.num_exponents - 1, 1).squeeze(0)
    # the format's exponents -> our bins, what lies outside counted in the end bins; zeros sit in exponent 0.
    # narrow and cat instead of indexing: indexing wants a real device, and the test of this path has none
    low, high = MIN_EXPONENT + field.bias, MAX_EXPONENT + field.bias
    first = counts_E.narrow(0, 0, low + 1).sum() - num_zero
    middle = counts_E.narrow(0, low + 1, high - low - 1)
    last = counts_E.narrow(0, high, field.num_exponents - 1 - high).sum()
    scalars = torch.stack(
        [last, num_zero + num_implicit_zeros, num_nan, num_special - num_nan, _amax_bits(bits_N, special, field)]
    )
    return torch.cat([first.unsqueeze(0), middle, scalars])


def update_row(before: torch.Tensor, after: torch.Tensor, counted: torch.Tensor) -> torch.Tensor:
    """The statistic of a weight's change, over some of its elements only.

    Args:
        before: The weight, dense.
        after: The weight after its update.
        counted: Boolean, of the same shape: the elements to count.

    Returns:
        Row as of `tensor_row`; its zeros are elements that did not change.

    Sync: none.
    """
    change = torch.where(counted, after.detach().float() - before.float(), torch.nan)
    row = tensor_row(change)
    row.narrow(0, _NAN, 1).sub_(counted.numel() - torch.count_nonzero(counted))
    return row


def _count(exponent_N: torch.Tensor, num_exponents: int) -> torch.Tensor:
    if exponent_N.device.type == "cpu":
        # bincount's shape check reads the data, which costs nothing on the host and is twice as fast there
        return torch.bincount(exponent_N, minlength=num_exponents)
    ones = torch.ones(1, dtype=torch.int64, device=exponent_N.device).expand(exponent_N.numel())
    zeros = torch.zeros(num_exponents, dtype=torch.int64, device=exponent_N.device)
    return zeros.scatter_add_(0, exponent_N.long(), ones)


def _amax_bits(bits_N: torch.Tensor, special: int, field: _Field) -> torch.Tensor:
    if bits_N.numel() == 0:
        return torch.zeros((), dtype=torch.int64, device=bits_N.device)
    # magnitudes order like their bits; non-finite ones are masked out rather than selected, to keep the shape static
    largest = torch.where(bits_N < special, bits_N, 0).amax()
    floating = torch.float32 if field is _FLOAT32 else torch.float64
    return largest.view(floating).double().view(torch.int64)


def _widen(values_N: torch.Tensor, field: _Field) -> torch.Tensor:
    if values_N.is_complex():
        return values_N.to(torch.complex128).abs()
    return values_N.to(torch.float32 if field is _FLOAT32 else torch.float64).contiguous()


def dense_values(x: torch.Tensor) -> tuple[torch.Tensor, int]:
    """A tensor's values as one flat strided tensor, and how many implicit zeros come on top.

    Duplicate indices of a sparse tensor are summed into as many slots as there are stored values, so the shape is
    known without looking; unused slots are zero and counted against the implicit zeros.

    Sync: none.
    """
    x = x.detach()
    if hasattr(x, "to_local"):
        x = x.to_local()
    if x.is_nested:
        x = x.values()
    if x.layout is torch.sparse_coo:
        values = x._values() if x.is_coalesced() else _sum_duplicates(x)
        return values.reshape(-1), x.numel() - values.numel()
    if x.layout is not torch.strided:
        values = x.values() if x.layout in _COMPRESSED else x.to_dense()
        return values.reshape(-1), x.numel() - values.numel()
    return x.reshape(-1), 0


_COMPRESSED = (torch.sparse_csr, torch.sparse_csc, torch.sparse_bsr, torch.sparse_bsc)


def _sum_duplicates(x: torch.Tensor) -> torch.Tensor:
    indices, values = x._indices(), x._values()
    if values.shape[0] < 2:
        return values
    linear = torch.zeros_like(indices[0])
    for size, index in zip(x.shape, indices, strict=False):
        linear = linear * size + index
    linear, order = linear.sort()
    starts = torch.ones_like(linear)
    starts[1:] = (linear[1:] != linear[:-1]).long()
    slot = starts.cumsum(0) - 1
    return torch.zeros_like(values).index_add_(0, slot, values.index_select(0, order))


def merge_rows(rows_RW: np.ndarray) -> np.ndarray:
    """Merge rows of one tensor, over micro-steps or ranks: counts add, the largest magnitude stays.

    Args:
        rows_RW: int64, shape [R, ROW_WIDTH], R at least 1.

    Returns:
        One row, shape [ROW_WIDTH].
    """
    merged: np.ndarray = rows_RW.sum(axis=0)
    # non-negative floats order like their bits
    merged[_AMAX] = rows_RW[:, _AMAX].max()
    return merged


def has_nonfinite(rows_RW: np.ndarray) -> bool:
    """Whether one of the tensors held a NaN or an inf."""
    return bool(rows_RW[:, [_NAN, _INF]].any())


def row_values(row_W: np.ndarray) -> dict[str, object]:
    """A row on the host as the statistic's columns of the sample table."""
    (amax,) = struct.unpack("d", struct.pack("q", int(row_W[_AMAX])))
    counts = row_W[:NUM_BINS]
    num_zero, num_nan, num_inf = (int(row_W[i]) for i in (_ZERO, _NAN, _INF))
    return {
        "numel": int(counts.sum()) + num_zero + num_nan + num_inf,
        "num_zero": num_zero,
        "num_nan": num_nan,
        "num_inf": num_inf,
        "amax": amax,
        "counts": counts,
    }
