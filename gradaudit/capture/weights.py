"""What a step does to weights and buffers, looked at on sampled steps: non-finite ones, and updates that round to
nothing."""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from dataclasses import dataclass
from numbers import Real
from typing import Any

import torch

from gradaudit.capture.names import Name, Names
from gradaudit.capture.reading import largest_each
from gradaudit.capture.registry import Registry, TensorEntry, Tracked
from gradaudit.capture.statistic import update_row

MAX_BUFFER_NUMEL = 2**20
"""Larger buffers are masks and tables that no step changes; statistics are as long as a layer is wide."""

Slots = Sequence[tuple[int, torch.Tensor, TensorEntry]]


@dataclass(frozen=True, slots=True)
class Magnitudes:
    """Largest magnitudes of some tensors, inf or NaN where one is not finite; `before` from when they were first seen.

    `before` is empty where it does not matter.
    """

    tracked: list[Tracked]
    now: list[torch.Tensor]
    before: list[torch.Tensor]


@dataclass(frozen=True, slots=True)
class HalfWeight:
    """A weight that is not FP32 before its update, and which of its elements have a gradient."""

    entry: TensorEntry
    param: torch.Tensor
    before: torch.Tensor
    counted: torch.Tensor


def track(kind: str, name: Name, tensor: torch.Tensor) -> Tracked:
    """What is kept of a tensor to name it later."""
    return Tracked(name, kind, tuple(tensor.shape), str(tensor.dtype).removeprefix("torch."))


def weight_magnitudes(slots: Slots) -> Magnitudes:
    """The weights of an optimizer. Sync: none."""
    looked_at = [(param, entry) for _, param, entry in slots if not param.is_nested and param.is_floating_point()]
    tracked = [track("param", entry.name, param) for param, entry in looked_at]
    return Magnitudes(tracked, largest_each([param for param, _ in looked_at]), [])


def half_weights(optimizer: Any, slots: Slots, registry: Registry) -> list[HalfWeight]:
    """Copies of the weights that an update may be too small for; none where the learning rate is known to be 0.

    Sync: none.
    """
    frozen = {id(p) for group in optimizer.param_groups if _is_zero(group.get("lr")) for p in group["params"]}
    found = []
    for _, param, entry in slots:
        grad = param.grad
        is_half = param.dtype in (torch.float16, torch.bfloat16) and param.layout is torch.strided
        if not is_half or grad is None or grad.layout is not torch.strided or id(param) in frozen:
            continue
        if registry.wanted(entry.name):
            update = registry.entry_of(track("update", entry.name, param))
            found.append(HalfWeight(update, param, param.detach().clone(), grad.detach() != 0))
    return found


def _is_zero(lr: Any) -> bool:
    return isinstance(lr, Real) and lr == 0


def change_of(weight: HalfWeight) -> torch.Tensor:
    """The statistic of what the update did. Sync: none."""
    with torch.no_grad():
        return update_row(weight.before, weight.param, weight.counted)


_Found = tuple[int, str, torch.nn.Module, Name, torch.Tensor]
"""A buffer: the id of its module, its attribute there, the module, its name and itself."""


class Buffers:
    """The floating-point buffers of all models seen, and how large they were at first sight."""

    def __init__(self, names: Names) -> None:
        self._names = names
        self._num_roots = 0
        self._before: dict[tuple[int, str], tuple[weakref.ref[torch.nn.Module], torch.Tensor]] = {}

    def look(self) -> None:
        """Take the first reading of what is new; cheap where nothing is. Sync: none."""
        if self._names.num_roots == self._num_roots:
            return
        self._num_roots = self._names.num_roots
        found = [item for item in self._present() if self._first_reading(item) is None]
        readings = largest_each([buffer for *_, buffer in found])
        for (key, attribute, module, _, _), reading in zip(found, readings, strict=True):
            self._before[(key, attribute)] = (weakref.ref(module), reading)

    def magnitudes(self) -> Magnitudes:
        """The buffers as they are now, those that have been there from first sight on. Sync: none."""
        found = []
        for key, attribute, module, name, buffer in self._present():
            before = self._first_reading((key, attribute, module, name, buffer))
            if before is not None:
                found.append((track("buffer", name, buffer), buffer, before))
        return Magnitudes(
            [tracked for tracked, _, _ in found],
            largest_each([buffer for _, buffer, _ in found]),
            [before for *_, before in found],
        )

    def _first_reading(self, item: _Found) -> torch.Tensor | None:
        key, attribute, module, _, _ = item
        held, before = self._before.get((key, attribute), (None, None))
        return before if held is not None and held() is module else None

    def _present(self) -> list[_Found]:
        seen: dict[tuple[int, str], _Found] = {}
        for root in self._names.roots():
            for module in root.modules():
                name = self._names.module(module)
                for attribute, buffer in module._buffers.items():
                    if name is not None and _is_looked_at(buffer):
                        assert buffer is not None
                        seen[(id(module), attribute)] = (id(module), attribute, module, name.below(attribute), buffer)
        return list(seen.values())


def _is_looked_at(buffer: torch.Tensor | None) -> bool:
    return (
        buffer is not None
        and buffer.is_floating_point()
        and not buffer.is_nested
        and buffer.layout is torch.strided
        and 0 < buffer.numel() <= MAX_BUFFER_NUMEL
    )
