"""What is measured of one operation of a traced forward, on the tensor's own device.

A reading is six numbers: the output's largest finite magnitude, its NaNs, infs and negative infs, the largest magnitude
of the same operation in FP32, and the masked rows of a softmax. On the CPU they are read at once, elsewhere they are
one float64 vector on the device.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.nn.parameter import is_lazy

from gradaudit.capture.statistic import dense_values

NUM_VALUES = 6

FP32_VALUE, MASKED_ROWS = 4, 5
"""Where in a reading the two stand that are not of the output itself."""

MAX_RECOMPUTED = 2**28
"""Elements of an operation's tensors up to which it is computed again in FP32: 1 GiB for a moment."""

Values = list[float] | torch.Tensor

_ALLOCATING = frozenset(["empty", "empty_like", "empty_strided", "empty_permuted", "new_empty", "new_empty_strided"])
"""Their values are whatever lay in memory."""

_WRITE_ONLY = frozenset(["copy_", "fill_", "zero_", "normal_", "uniform_", "bernoulli_", "random_", "exponential_"])
"""In-place operations that do not read what they overwrite."""

_SOFTMAXES = frozenset(["_softmax", "_log_softmax"])

_NUMBER_TYPES = ("Tensor", "number", "Scalar", "float")


@dataclass(frozen=True, slots=True)
class OpInfo:
    """What the schema says of an operation, read once.

    `number_args` are the names of the arguments that may be a number among the values, not a size or a dimension.
    """

    name: str
    mutates: bool
    allocates: bool
    is_scalers: bool
    write_only: bool
    recomputable: bool
    softmax: bool
    has_mask: bool
    wraps: bool
    arg_names: tuple[str, ...]
    number_args: frozenset[str]


def op_info(func: Any) -> OpInfo:
    """Read an operation's schema."""
    schema = func._schema
    namespace, name = schema.name.split("::")
    random = torch.Tag.nondeterministic_seeded in func.tags
    allocates = namespace == "aten" and name in _ALLOCATING
    numbers = [arg.name for arg in schema.arguments if any(kind in str(arg.type) for kind in _NUMBER_TYPES)]
    names = tuple(arg.name for arg in schema.arguments)
    return OpInfo(
        name=str(func),
        mutates=schema.is_mutable,
        allocates=allocates,
        is_scalers=name.startswith("_amp_"),
        write_only=name in _WRITE_ONLY,
        recomputable=namespace == "aten" and not random and not allocates and "out" not in names,
        softmax=name in _SOFTMAXES,
        has_mask="attn_mask" in names or "attn_bias" in names,
        wraps=name == "lift_fresh",  # torch.tensor(...): what it is given nobody else has seen
        arg_names=names,
        number_args=frozenset(numbers),
    )


def worth_recomputing(info: OpInfo, tensors: Sequence[torch.Tensor]) -> bool:
    """Whether an operation may and should be run again in FP32."""
    # some operations have no deterministic form in FP32, and warn or raise
    small = sum(tensor.numel() for tensor in tensors) <= MAX_RECOMPUTED
    return info.recomputable and small and not torch.are_deterministic_algorithms_enabled()


def read_output(outputs: Sequence[torch.Tensor]) -> tuple[Values, int]:
    """Readings of an operation's output, the last two NaN, and of how many elements.

    Outputs of the first one's dtype and shape count together.

    Sync: none.
    """
    first = outputs[0]
    plain = [_plain(out) for out in outputs if out is first or (out.dtype is first.dtype and out.shape == first.shape)]
    values = _read(plain[0])
    for other in plain[1:]:
        values = _together(values, _read(other))
    return values, sum(x.numel() for x in plain)


def is_finite(values: Values) -> bool | None:
    """Whether all elements are, None where the host does not know. Sync: none."""
    return None if isinstance(values, torch.Tensor) else sum(values[1:FP32_VALUE]) == 0


def shows_fault(values: Values) -> bool:
    """Whether the host knows of a NaN or a positive inf; a negative inf may be a mask. Sync: none."""
    return not isinstance(values, torch.Tensor) and values[1] + values[2] > 0


def with_reading(values: Values, index: int, value: torch.Tensor) -> Values:
    """Readings with one of them filled in. Sync: none."""
    if isinstance(values, torch.Tensor):
        # not in place: writing into a part wants a real device, and the test of this path has none
        rest = values.narrow(0, index + 1, NUM_VALUES - index - 1)
        return torch.cat([values.narrow(0, 0, index), value.double().reshape(1), rest])
    number = float(value) if value.device.type == "cpu" else math.nan
    return [*values[:index], number, *values[index + 1 :]]


def _together(a: Values, b: Values) -> Values:
    if isinstance(a, torch.Tensor) and isinstance(b, torch.Tensor):
        return torch.cat([torch.maximum(a, b).narrow(0, 0, 1), (a + b).narrow(0, 1, NUM_VALUES - 1)])
    return [max(a[0], b[0]), *(x + y for x, y in zip(a[1:], b[1:], strict=True))]


def _read(x: torch.Tensor) -> Values:
    if x.device.type == "cpu":
        if x.numel() == 0:
            return [0.0, 0.0, 0.0, 0.0, math.nan, math.nan]
        largest = float(_largest(x))
        if math.isfinite(largest):
            return [largest, 0.0, 0.0, 0.0, math.nan, math.nan]
        return [*_count(x).tolist(), math.nan, math.nan]
    unknown = torch.full((2,), math.nan, dtype=torch.float64, device=x.device)
    return torch.cat([_count(x), unknown])


def _count(x: torch.Tensor) -> torch.Tensor:
    wide = x if x.dtype is torch.float64 else x.float()
    magnitudes = torch.where(torch.isfinite(wide), wide.abs(), 0.0)
    amax = magnitudes.amax() if wide.numel() else wide.new_zeros(())
    infinite = torch.isinf(wide)
    numbers = [amax, torch.isnan(wide).sum(), (infinite & (wide > 0)).sum(), (infinite & (wide < 0)).sum()]
    return torch.stack([number.double() for number in numbers])


def _plain(tensor: torch.Tensor) -> torch.Tensor:
    if type(tensor) is torch.Tensor and tensor.layout is torch.strided and not tensor.is_nested:
        x = tensor.detach()
    else:
        x = dense_values(tensor)[0]
    return x.float() if x.element_size() == 1 else x


def _largest(x: torch.Tensor) -> torch.Tensor:
    """Largest magnitude, NaN or inf if there is one."""
    low, high = torch.aminmax(x)
    return torch.maximum(low.abs(), high.abs())


def in_fp32(args: Any) -> Any:
    """Copies of an operation's arguments with everything FP16 made FP32. Sync: none.

    All floating tensors are copied: some operations write into an argument without saying so.
    """
    if isinstance(args, torch.Tensor):
        if args.dtype is torch.float16:
            return args.detach().float()
        return args.detach().clone() if args.is_floating_point() else args
    if isinstance(args, (list, tuple)):
        return type(args)([in_fp32(arg) for arg in args])
    if isinstance(args, dict):
        return {key: in_fp32(value) for key, value in args.items()}
    return torch.float32 if args is torch.float16 else args


def largest_in_fp32(func: Any, info: OpInfo, args: Any, kwargs: Any) -> torch.Tensor | None:
    """Largest magnitude of an operation run on arguments from `in_fp32`, None where it cannot run on those.

    Sync: none.
    """
    if info.softmax:
        args, kwargs = (
            (*args[:2], False),
            {},
        )  # the last says whether to widen FP16 inputs, of which there are none left
    try:
        result = func(*args, **kwargs)
    except Exception:
        return None
    out = next(iter(values_of(result)), None)
    return None if out is None or out.numel() == 0 else _largest(_plain(out)).double()


def masked_rows(info: OpInfo, arguments: dict[str, Any]) -> torch.Tensor | None:
    """How many rows of a softmax's input, or of an attention mask, leave nothing. Sync: none."""
    if info.softmax:
        x, dim = arguments["self"], arguments["dim"]
        return None if x.numel() == 0 else (x.amax(dim) == -math.inf).sum()
    mask = arguments.get("attn_mask", arguments.get("attn_bias")) if info.has_mask else None
    if not isinstance(mask, torch.Tensor) or mask.numel() == 0 or mask.dim() == 0:
        return None
    allowed = mask if mask.dtype is torch.bool else mask > -math.inf
    return torch.logical_not(allowed.any(-1)).sum()


def numbers_of(info: OpInfo, arguments: dict[str, Any]) -> list[float]:
    """Numeric arguments of an operation: eps, bounds, factors; neither sizes nor dimensions nor flags."""
    found = []
    for name in info.arg_names:
        value = arguments.get(name)
        if name in info.number_args:
            items = value if isinstance(value, (list, tuple)) else [value]
            found += [float(item) for item in items if isinstance(item, (int, float)) and not isinstance(item, bool)]
    return found


def values_of(value: Any) -> list[torch.Tensor]:
    """Floating tensors among an operation's arguments or results that hold values of their own."""
    return [tensor for tensor in _tensors(value) if tensor.is_floating_point() and _has_values(tensor)]


def _has_values(tensor: torch.Tensor) -> bool:
    """Not so on the meta device, inside torch.func, for zeros of forward-mode derivatives, and before a first call."""
    wrapped = torch._C._functorch.is_functorch_wrapped_tensor(tensor)
    return not (wrapped or tensor.is_meta or tensor._is_zerotensor() or is_lazy(tensor))


def _tensors(value: Any) -> list[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        return [value]
    if isinstance(value, (list, tuple)):
        return [tensor for item in value for tensor in _tensors(item)]
    return []
