"""Everything that one more forward and backward may change, kept and put back bit for bit."""

from __future__ import annotations

import random
import sys
from collections.abc import Callable, Iterable
from contextlib import ExitStack
from functools import partial
from typing import Any, TypedDict

import torch
from torch.nn.parameter import is_lazy

Undo = Callable[[], object]


class RandomState(TypedDict):
    """Where the random numbers stand: Python's, NumPy's global ones, torch's on the CPU and on every CUDA device.

    Built of what `torch.load(weights_only=True)` reads.
    """

    python: tuple[Any, ...]
    numpy: list[Any] | None
    cpu: torch.Tensor
    cuda: list[torch.Tensor]


def random_state() -> RandomState:
    """The state as of now. Sync: none."""
    numpy: Any = sys.modules.get("numpy")
    found = None
    if numpy is not None:
        name, keys, *rest = numpy.random.get_state()
        found = [name, keys.tolist(), *rest]
    # a device that nobody has used yet has no random numbers either
    cuda = list(torch.cuda.get_rng_state_all()) if torch.cuda._initialized else []
    return {"python": random.getstate(), "numpy": found, "cpu": torch.get_rng_state(), "cuda": cuda}


def set_random_state(state: RandomState) -> None:
    """Put the state back; a CUDA device that is not there is left out. Sync: none."""
    random.setstate(state["python"])
    if state["numpy"] is not None:
        import numpy

        name, keys, *rest = state["numpy"]
        numpy.random.set_state((name, numpy.array(keys, dtype=numpy.uint32), *rest))
    torch.set_rng_state(state["cpu"])
    if torch.cuda.is_available():
        for device, cuda in enumerate(state["cuda"][: torch.cuda.device_count()]):
            torch.cuda.set_rng_state(cuda, device)


def keep(modules: Iterable[torch.nn.Module], params: Iterable[torch.Tensor], scalers: Iterable[Any]) -> ExitStack:
    """Note what a pass through these may change, and set every gradient aside.

    Kept are the parameters and buffers (the objects and their values), gradients, `requires_grad` and training flags,
    random numbers, and the scalers' state. While it is kept no parameter has a gradient.

    Args:
        modules: Models whose parameters and buffers may change.
        params: Parameters beside theirs.
        scalers: GradScalers.

    Returns:
        A context at whose end all of it is put back.

    Sync: none; putting back compares values and so waits for the device.
    """
    undos: list[Undo] = [partial(set_random_state, random_state())]
    tensors: dict[int, torch.Tensor] = {id(param): param for param in params}
    for module in {id(part): part for model in modules for part in model.modules()}.values():
        undos.append(partial(setattr, module, "training", module.training))
        for table in (module._parameters, module._buffers):
            undos.append(partial(_refill, table, dict(table)))
            tensors |= {id(tensor): tensor for tensor in table.values() if tensor is not None}
    for scaler in scalers:
        undos += _keep_scaler(scaler)
    undos += [undo for tensor in tensors.values() if not is_lazy(tensor) for undo in _keep_tensor(tensor)]
    undos.append(_keep_autocast_cache())
    kept = ExitStack()
    for undo in undos:
        kept.callback(undo)
    return kept


def _refill(table: dict[str, Any], entries: dict[str, Any]) -> None:
    if [(key, id(value)) for key, value in table.items()] != [(key, id(value)) for key, value in entries.items()]:
        table.clear()
        table.update(entries)


def _keep_tensor(tensor: torch.Tensor) -> list[Undo]:
    undos: list[Undo] = [partial(_put_back, tensor, tensor.detach().clone())]
    if tensor.is_leaf:
        undos.append(partial(_set_requires_grad, tensor, tensor.requires_grad))
        grad = tensor.grad
        if grad is not None:
            # distributed training writes new gradients into the memory of the old ones
            undos.append(partial(_put_back, grad, grad.detach().clone()))
        undos.append(partial(setattr, tensor, "grad", grad))
        tensor.grad = None
    return undos


def _set_requires_grad(tensor: torch.Tensor, value: bool) -> None:
    if tensor.requires_grad != value:
        tensor.requires_grad_(value)


def _put_back(tensor: torch.Tensor, value: torch.Tensor) -> None:
    """Copy only what changed, and past the version counter: a graph of the user's may still need this tensor."""
    if not _same_bits(tensor.detach(), value):
        tensor.data.copy_(value)


def _same_bits(a: torch.Tensor, b: torch.Tensor) -> bool:
    if a.layout is not torch.strided or a.is_quantized:
        return False
    a, b = (x.contiguous().reshape(-1).view(torch.uint8) for x in (a, b))
    return bool(torch.equal(a, b))


def _keep_scaler(scaler: Any) -> list[Undo]:
    states = scaler._per_optimizer_states
    kept = {
        key: {**state, "found_inf_per_device": dict(state["found_inf_per_device"])} for key, state in states.items()
    }
    undos: list[Undo] = [partial(_refill, states, kept)]
    tensors = [scaler._scale, scaler._growth_tracker]
    tensors += [value for state in kept.values() for value in state["found_inf_per_device"].values()]
    undos += [partial(_put_back, tensor, tensor.clone()) for tensor in tensors if tensor is not None]
    undos += [partial(setattr, scaler, name, getattr(scaler, name)) for name in ("_scale", "_growth_tracker")]
    return undos


def _keep_autocast_cache() -> Undo:
    """Inside a region of the user's, its cache of half weights is neither read nor added to."""
    nesting = torch.autocast_increment_nesting() - 1
    torch.autocast_decrement_nesting()
    enabled = torch.is_autocast_cache_enabled()
    if nesting > 0:
        torch.set_autocast_cache_enabled(False)
    return partial(torch.set_autocast_cache_enabled, enabled)
