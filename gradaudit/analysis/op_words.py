"""Kinds of operations of a traced forward, and how people call them."""

from __future__ import annotations

import math

import numpy as np

from gradaudit.formats import FP16, FP16_DTYPES
from gradaudit.store.tables import OpRow

INPUT = "input"
LOSS = "loss"
"""Stands for the module of what ran outside every module."""

MATMULS = frozenset(["mm", "bmm", "addmm", "baddbmm", "addbmm", "addmv", "mv", "dot", "matmul", "linear"])

CONVOLUTIONS = frozenset(["convolution", "mkldnn_convolution", "cudnn_convolution", "conv2d", "conv1d", "conv3d"])

REDUCTIONS = frozenset(
    {
        "sum", "mean", "prod", "cumsum", "cumprod", "norm", "linalg_vector_norm", "var", "std", "var_mean", "std_mean",
        "logsumexp", "logcumsumexp", "nansum", "nanmean", "trace", "cdist_forward", "euclidean_dist",
    }
)  # fmt: skip

ELEMENTWISE = frozenset(["mul", "div", "add", "sub", "rsub", "neg", "to_copy", "clone", "copy", "addcmul", "addcdiv"])

SHAPING = frozenset(
    {
        "select", "slice", "split", "split_with_sizes", "chunk", "unbind", "index", "cat", "stack", "expand", "repeat",
        "clone", "copy", "to_copy", "gather", "index_select", "constant_pad_nd", "roll", "flip", "view", "unfold",
        "masked_fill", "where", "tril", "triu", "dropout", "native_dropout", "index_put", "unsafe_view",
    }
)  # fmt: skip

FILLS = frozenset(
    {
        "full", "full_like", "new_full", "fill", "masked_fill", "where", "scalar_tensor", "index_put", "index_fill",
        "constant_pad_nd", "masked_scatter", "ones", "zeros", "lift_fresh",
    }
)  # fmt: skip

SOFTMAXES = frozenset(["softmax", "log_softmax"])

CRITERIA = frozenset(
    {
        "mse_loss", "smooth_l1_loss", "huber_loss", "soft_margin_loss", "multi_margin_loss", "multilabel_margin_loss",
        "multilabel_margin_loss_forward", "nll_loss_forward", "nll_loss2d_forward", "nll_loss", "nll_loss2d",
        "binary_cross_entropy", "binary_cross_entropy_with_logits", "ctc_loss", "l1_loss",
    }
)  # fmt: skip

POLES = frozenset(
    {
        "div", "reciprocal", "rsqrt", "sqrt", "log", "log2", "log10", "log1p", "pow", "acos", "asin", "atanh", "acosh",
        "logit", "xlogy", "erfinv", "tan", "addcdiv",
    }
)  # fmt: skip
"""Operations that have no finite value, or no finite slope, somewhere in FP16's range."""

_WORDS = {
    "div": "a division", "add": "a sum of two tensors", "sub": "a difference", "rsub": "a difference",
    "neg": "a change of sign", "to_copy": "the cast to FP16", "copy": "the copy into an FP16 tensor",
    "mm": "a matmul", "bmm": "a batched matmul", "addmm": "a matmul", "baddbmm": "a batched matmul",
    "addmv": "a matrix-vector product", "mv": "a matrix-vector product", "dot": "a dot product",
    "convolution": "a convolution", "exp": "exp", "exp2": "exp2", "expm1": "expm1", "square": "a square",
    "linalg_vector_norm": "a norm", "norm": "a norm", "var": "a variance", "std": "a standard deviation",
    "var_mean": "a variance", "std_mean": "a standard deviation", "cumsum": "a running sum",
    "cumprod": "a running product", "prod": "a product over elements", "sum": "a sum over elements",
    "mean": "a mean", "log_softmax": "log_softmax", "softmax": "softmax", "reciprocal": "a reciprocal",
    "masked_fill": "masked_fill", "where": "where", "full": "a constant", "fill": "a constant",
    "scalar_tensor": "a constant",
    "native_layer_norm": "a layer norm", "native_group_norm": "a group norm", "native_batch_norm": "a batch norm",
    "nll_loss_forward": "nll_loss", "nll_loss2d_forward": "nll_loss",
}  # fmt: skip

LAYERS_WITH_WEIGHTS = ("Linear", "Conv", "LSTM", "GRU", "RNN")
"""In names of classes: a matrix product in their own code has a weight in it."""


def words(row: OpRow) -> str:
    """An operation as people call it: "the product of two tensors", "Linear", "a matmul"."""
    if row.name in MATMULS | CONVOLUTIONS and any(part in row.module_class for part in LAYERS_WITH_WEIGHTS):
        return row.module_class
    if is_square(row):
        return "a square"
    if row.name == "mul":
        if row.module != LOSS or len(row.inputs) > 1:
            return "the product of two tensors" if len(row.inputs) > 1 else "a multiplication by a number"
        return "a multiplication"
    if row.name == "add" and len(row.inputs) < 2:
        return "the addition of a number"
    if row.name.startswith("scaled_dot_product") or "attention" in row.name:
        return "fused attention"
    return _WORDS.get(row.name, row.name)


def is_half(row: OpRow) -> bool:
    """Whether the operation's result is FP16."""
    return row.dtype in FP16_DTYPES


def is_square(row: OpRow) -> bool:
    """Whether it squares: pow with 2, or a tensor times itself."""
    if row.name == "pow":
        return row.constants == (2.0,)
    return row.name == "square" or (row.name == "mul" and len(row.inputs) == 1 and not row.constants)


def is_attention(row: OpRow) -> bool:
    """Whether it is a fused attention."""
    return row.name.startswith("scaled_dot_product") or "efficient_attention" in row.name


def in_loss(row: OpRow) -> bool:
    """Whether it belongs to the loss: outside every module, or in a criterion."""
    return row.module == LOSS or row.module_class.endswith(("Loss", "Criterion"))


def flushed_constants(row: OpRow) -> tuple[float, ...]:
    """Numbers of an operation in FP16 that it uses as an eps or a bound and that are 0 or 1 there.

    Factors are none: what is merely small is not lost by that.
    """
    if not is_half(row) or not (_bounds(row) or (_adds(row) and len(row.inputs) < 2)):
        return ()  # of a sum of two tensors it is the factor of the second
    return tuple(c for c in row.constants if is_flushed(c) or is_one(c))


def flushed_operand(row: OpRow, operand: OpRow) -> float | None:
    """The same for a constant that an operation is given as a tensor of one element; None where it is none."""
    if not is_half(row) or not (_bounds(row) or _adds(row)) or operand.numel != 1 or operand.sequence is not None:
        return None
    if operand.op == INPUT and operand.module_class == "other":
        constant = operand.amax
    elif operand.name in ("scalar_tensor", "full") and operand.constants:
        constant = operand.constants[0]
    else:
        return None
    return constant if is_flushed(constant) or is_one(constant) else None


def _adds(row: OpRow) -> bool:
    return row.name in ("add", "sub", "rsub")


def _bounds(row: OpRow) -> bool:
    name = row.name
    return name.startswith("clamp") or name in ("maximum", "minimum", "max", "min", "hardtanh", "threshold")


def is_flushed(constant: float) -> bool:
    """Whether a number is 0 in FP16 and not itself 0."""
    return 0 < abs(constant) <= 2.0**FP16.flush_log2


def is_one(constant: float) -> bool:
    """Whether a number is 1 in FP16 and not itself 1."""
    if constant == 1 or not math.isfinite(constant) or abs(constant) > FP16.max_value:
        return False
    return float(np.float16(constant)) == 1.0
