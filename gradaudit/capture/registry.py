"""The tables of run.json: tensors, optimizers and scalers, each known by a small integer from its first sight on."""

from __future__ import annotations

import math
import sys
import weakref
from collections.abc import Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from numbers import Real
from typing import Any

import torch

from gradaudit.capture.graph import Key
from gradaudit.capture.names import Name, Names
from gradaudit.capture.settings import CaptureSettings


@dataclass(slots=True)
class TensorEntry:
    """One row of the tensors table; shape and dtype are filled in when the tensor is first seen."""

    id: int
    kind: str
    name: Name
    module: str
    op: str
    exact: bool
    trainable: bool
    parent_keys: tuple[Key, ...] = ()
    shape: tuple[int, ...] = ()
    dtype: str | None = None


class Registry:
    """Identities for the length of a recording. Weakly keyed: it keeps no optimizer, scaler or parameter alive."""

    def __init__(self, names: Names, settings: CaptureSettings) -> None:
        self._names = names
        self._settings = settings
        self._tensors: dict[Key, TensorEntry] = {}
        self._optimizers: list[dict[str, Any]] = []
        self._optimizer_ids: weakref.WeakKeyDictionary[Any, int] = weakref.WeakKeyDictionary()
        self._slots: dict[int, dict[int, tuple[int, TensorEntry]]] = {}
        self._strays: dict[int, tuple[weakref.ref[Any], TensorEntry]] = {}
        self._scalers: list[dict[str, Any]] = []
        self._scaler_ids: weakref.WeakKeyDictionary[Any, int] = weakref.WeakKeyDictionary()

    @property
    def num_optimizers(self) -> int:
        """Optimizers seen so far."""
        return len(self._optimizers)

    def wanted(self, name: Name) -> bool:
        """Whether include and exclude let this name have histograms."""
        include, exclude = self._settings.include, self._settings.exclude
        if not include and not exclude:
            return True
        full = self._names.full(name)
        return (not include or _matches(full, include)) and not _matches(full, exclude)

    def tensor(
        self, key: Key, kind: str, name: Name, module: str, *, op: str = "", exact: bool = False, trainable: bool = True
    ) -> TensorEntry:
        """The entry of a tensor, made at its first sight."""
        entry = self._tensors.get(key)
        if entry is None:
            entry = self._tensors[key] = TensorEntry(len(self._tensors), kind, name, module, op, exact, trainable)
        return entry

    def param(self, param: torch.Tensor) -> TensorEntry | None:
        """The entry of a parameter's gradient, None for a leaf that no module or optimizer is known to hold."""
        name = self._names.param(param)
        if name is not None:
            return self._param_entry(name, param)
        optimizer, entry = self._strays.get(id(param), (None, None))
        return entry if optimizer is not None and optimizer() is not None else None

    def _param_entry(self, name: Name, param: torch.Tensor) -> TensorEntry:
        entry = self.tensor(("param", name), "param_grad", name, "", trainable=param.requires_grad)
        entry.shape = entry.shape or tuple(param.shape)
        return entry

    def optimizer(self, optimizer: Any) -> int:
        """The identity of an optimizer; its settings are read at its first sight."""
        identity = self._optimizer_ids.get(optimizer)
        if identity is None:
            identity = self._optimizer_ids[optimizer] = len(self._optimizers)
            groups = optimizer.param_groups
            self._optimizers.append(
                {
                    "id": identity,
                    "class": type(optimizer).__name__,
                    "params": [],
                    "lr": _plain_number(groups[0].get("lr")) if groups else None,
                    # state before the first step was loaded from a checkpoint, or made before gradaudit came
                    "resumed": any(len(state) > 0 for state in optimizer.state.values()),
                }
            )
            self._slots[identity] = {}
        return identity

    def param_slots(self, optimizer: Any) -> list[tuple[int, torch.Tensor, TensorEntry]]:
        """An optimizer's parameters, each with its position in run.json's list; parameters added later come last.

        Not asked for before the first step: `zero_grad` comes before the first forward, when no name is known yet.
        """
        identity = self.optimizer(optimizer)
        slots = self._slots[identity]
        listed = self._optimizers[identity]["params"]
        found = []
        for group_index, group in enumerate(optimizer.param_groups):
            for index, param in enumerate(group["params"]):
                known = slots.get(id(param))
                if known is None:
                    entry = self.param(param) or self._stray(optimizer, f"{group_index}.{index}", param)
                    known = slots[id(param)] = (len(slots), entry)
                    listed.append(entry.id)
                known[1].trainable |= param.requires_grad  # layers may be unfrozen on the way
                found.append((known[0], param, known[1]))
        return sorted(found, key=lambda entry: entry[0])

    def _stray(self, optimizer: Any, place: str, param: torch.Tensor) -> TensorEntry:
        identity, label = self.optimizer(optimizer), type(optimizer).__name__
        if any(entry["class"] == label for entry in self._optimizers[:identity]):
            label = f"{label}_{identity}"
        entry = self._param_entry(Name(None, f"{label}.{place}"), param)
        self._strays[id(param)] = (weakref.ref(optimizer), entry)
        return entry

    def param_ids(self, optimizer: int) -> list[int]:
        """Tensor ids of an optimizer's parameters, by position."""
        ids: list[int] = list(self._optimizers[optimizer]["params"])
        return ids

    def known_optimizers(self) -> list[Any]:
        """Optimizers that are still alive."""
        return list(self._optimizer_ids)

    def scaler(self, scaler: Any) -> int:
        """The identity of a GradScaler; its settings are read at its first sight."""
        identity = self._scaler_ids.get(scaler)
        if identity is None:
            identity = self._scaler_ids[scaler] = len(self._scalers)
            entry: dict[str, Any] = {"id": identity, "class": type(scaler).__name__, "enabled": scaler.is_enabled()}
            if scaler.is_enabled():
                entry |= {
                    "init_scale": _setting(scaler._init_scale),
                    "growth_factor": _setting(scaler.get_growth_factor()),
                    "backoff_factor": _setting(scaler.get_backoff_factor()),
                    "growth_interval": int(scaler.get_growth_interval()),
                    # a tracker above zero before the first scale() came from a checkpoint
                    "loaded": bool(scaler._init_growth_tracker),
                    "fresh": scaler._scale is None,
                }
            self._scalers.append(entry)
        return identity

    def mark_loaded(self, scaler: Any) -> None:
        """Note that a scaler's state came from a checkpoint."""
        self._scalers[self.scaler(scaler)]["loaded"] = True

    def describe(self) -> dict[str, Any]:
        """The tables as of now. May run in another thread: it copies before it reads."""
        entries = list(self._tensors.items())
        ids = {key: entry.id for key, entry in entries}
        tensors = [
            {
                "id": entry.id,
                "kind": entry.kind,
                "fqn": self._names.full(entry.name),
                "module": entry.module,
                "op": entry.op,
                "shape": list(entry.shape),
                "dtype": entry.dtype or "unknown",
                "parents": [ids[key] for key in entry.parent_keys if key in ids],
                "exact": entry.exact,
                "trainable": entry.trainable,
            }
            for _, entry in entries
        ]
        return {
            "scalers": [dict(scaler) for scaler in list(self._scalers)],
            "optimizers": [{**entry, "params": list(entry["params"])} for entry in list(self._optimizers)],
            "tensors": tensors,
        }


def _matches(name: str, patterns: Sequence[str]) -> bool:
    return any(fnmatchcase(name, pattern) for pattern in patterns)


def _plain_number(value: Any) -> float | None:
    """None for a tensor, which would have to be waited for, and for what JSON has no word for."""
    return float(value) if isinstance(value, Real) and math.isfinite(value) else None


def _setting(value: Any) -> float:
    """A scaler's setting; infinity as the largest number there is, since JSON has no word for it."""
    return min(float(value), sys.float_info.max)
