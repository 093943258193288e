"""The tables of run.json: tensors, optimizers and scalers, each known by a small integer from its first sight on."""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
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
        self._slots: dict[int, dict[int, int]] = {}
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

    def param(self, param: torch.Tensor) -> TensorEntry:
        """The entry of a parameter's gradient."""
        name = self._names.param(param)
        if name is None:
            name = self._names.name_param(param, f"parameter {len(self._tensors)}")
        entry = self.tensor(("param", name), "param_grad", name, "", trainable=param.requires_grad)
        if not entry.shape:
            entry.shape = tuple(param.shape)
        return entry

    def optimizer(self, optimizer: Any) -> int:
        """The identity of an optimizer; its parameters are named with it."""
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
            self.param_slots(optimizer)
        return identity

    def param_slots(self, optimizer: Any) -> list[tuple[int, torch.Tensor]]:
        """An optimizer's parameters, each with its position in run.json's list; parameters added later come last."""
        slots = self._slots[self._optimizer_ids[optimizer]]
        listed = self._optimizers[self._optimizer_ids[optimizer]]["params"]
        found = []
        for group_index, group in enumerate(optimizer.param_groups):
            for index, param in enumerate(group["params"]):
                slot = slots.get(id(param))
                if slot is None:
                    if self._names.param(param) is None:
                        self._names.name_param(param, f"{type(optimizer).__name__}.{group_index}.{index}")
                    slot = slots[id(param)] = len(slots)
                    listed.append(self.param(param).id)
                found.append((slot, param))
        return sorted(found, key=lambda entry: entry[0])

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
                    "init_scale": float(scaler._init_scale),
                    "growth_factor": float(scaler.get_growth_factor()),
                    "backoff_factor": float(scaler.get_backoff_factor()),
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
    return float(value) if isinstance(value, (int, float)) else None
