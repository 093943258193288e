"""Small device-side readings for the every-step pass. None of them waits for the device or keeps a tensor alive."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any

import torch

from gradaudit.capture.host_copy import HostCopy
from gradaudit.capture.statistic import dense_values


def next_sequence() -> int:
    """The number the next autograd node of this thread will get."""
    return int(torch._C._autograd._get_sequence_nr())


def floating_tensors(value: Any, depth: int = 0) -> list[torch.Tensor]:
    """Tensors with a fractional part in nested tuples, lists, dicts and dataclasses."""
    if isinstance(value, torch.Tensor):
        return [value] if value.is_floating_point() or value.is_complex() else []
    if depth > 4 or value is None or isinstance(value, (str, int, float)):
        return []
    items: Iterable[Any] = ()
    if isinstance(value, (tuple, list)):
        items = value
    elif isinstance(value, dict):
        items = value.values()
    elif hasattr(value, "__dataclass_fields__"):
        items = [getattr(value, name, None) for name in value.__dataclass_fields__]
    return [tensor for item in items for tensor in floating_tensors(item, depth + 1)]


def mean(tensor: torch.Tensor) -> torch.Tensor:
    """Mean value, of magnitudes if complex, in float64."""
    values, num_zeros = dense_values(tensor)
    return (_magnitudes(values) if values.is_complex() else values).double().sum() / (values.numel() + num_zeros)


def mean_square(tensor: torch.Tensor) -> torch.Tensor:
    """Mean of squared magnitudes, in float32."""
    values, num_zeros = dense_values(tensor)
    return _magnitudes(values).float().square().sum() / (values.numel() + num_zeros)


def _magnitudes(values: torch.Tensor) -> torch.Tensor:
    """Values in a dtype that reductions know and in which no magnitude overflows; signs are kept unless complex."""
    if values.is_complex():
        return values.to(torch.complex128 if values.dtype is torch.complex128 else torch.complex64).abs()
    return values.float() if values.element_size() == 1 else values


def noise_gain(module: torch.nn.Module, inputs: Any) -> tuple[torch.nn.Parameter, torch.Tensor] | None:
    """A layer's weight, and fan-in times the mean square of the layer's input; None where it is no trained layer."""
    weight, fan_in = layer_weight(module)
    x = next(iter(floating_tensors(inputs)), None)
    return None if weight is None or x is None or not weight.requires_grad else (weight, mean_square(x) * fan_in)


def layer_weight(module: torch.nn.Module) -> tuple[torch.nn.Parameter | None, int]:
    """The matrix that a module multiplies its first input with, and how many inputs go into one output."""
    # not by attribute: a parametrized weight is computed when it is looked at, and may change with every look
    params = module._parameters
    weight = next((params[name] for name in ("weight", "in_proj_weight") if name in params), None)
    if not isinstance(weight, torch.nn.Parameter) or weight.dim() < 2 or weight.numel() == 0:
        return None, 0
    num_outputs = getattr(module, "out_channels", weight.shape[0])
    return weight, weight.numel() // max(int(num_outputs), 1)


def largest(tensor: torch.Tensor) -> torch.Tensor:
    """Largest magnitude, inf or NaN if there is one: one pass that also answers whether all is finite."""
    return largest_each([tensor])[0]


def largest_each(tensors: list[torch.Tensor]) -> list[torch.Tensor]:
    """`largest` of many tensors in one multi-tensor call; 0 where there is no element."""
    flat = []
    for tensor in tensors:
        values = _magnitudes(dense_values(tensor)[0])
        flat.append(values if values.numel() else values.new_zeros(1))
    if not flat:
        return []
    with torch.no_grad():
        return list(torch._foreach_norm(flat, float("inf")))


def norm_each(tensors: list[torch.Tensor]) -> list[torch.Tensor]:
    """2-norm of many tensors in one multi-tensor call, in FP32 at least: in half it would overflow."""
    flat = [_magnitudes(dense_values(tensor)[0]) for tensor in tensors]
    if not flat:
        return []
    with torch.no_grad():
        return list(torch._foreach_norm([x if x.element_size() > 2 else x.float() for x in flat], 2.0))


def stack_scalars(values: list[torch.Tensor]) -> list[HostCopy]:
    """0-dim values as one copy per run of equal devices, in order."""
    copies: list[HostCopy] = []
    start = 0
    for i in range(1, len(values) + 1):
        if i == len(values) or values[i].device != values[start].device:
            scalars = [v if v.dim() == 0 else v.reshape(()) for v in values[start:i]]
            # stack widens to the widest of them
            copies.append(HostCopy(torch.stack(scalars).detach().double()))
            start = i
    return copies


def stack_rows(rows: list[torch.Tensor]) -> list[HostCopy]:
    """Histogram rows, or readings of operations, as one copy per run of equal devices, in order."""
    copies: list[HostCopy] = []
    start = 0
    for i in range(1, len(rows) + 1):
        if i == len(rows) or rows[i].device != rows[start].device:
            copies.append(HostCopy(torch.stack(rows[start:i])))
            start = i
    return copies


def plain(value: float) -> float | str:
    """A number for JSON, which has no word for infinity and NaN."""
    return float(value) if math.isfinite(value) else str(float(value))


def found_inf(scaler: Any, optimizer: Any) -> list[torch.Tensor]:
    """A scaler's verdict on an optimizer's gradients, one value per device; none if it has not looked."""
    state = scaler._per_optimizer_states.get(id(optimizer), {})
    return [found.detach().clone() for found in state.get("found_inf_per_device", {}).values()]


def known_on_host(found: list[torch.Tensor]) -> bool:
    """Whether an overflow can be told without waiting for a device: only on the CPU."""
    return any(value.device.type == "cpu" and bool(value > 0) for value in found)
