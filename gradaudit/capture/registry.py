"""The tables of run.json: tensors, optimizers and scalers, each known by a small integer from its first sight on."""

from __future__ import annotations

import math
import sys
import threading
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
from gradaudit.capture.setup import group_facts, has_stepped, hook_sites, wrapped_optimizers


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
    file: str | None = None
    line: int | None = None


@dataclass(frozen=True, slots=True)
class Tracked:
    """A weight, its update or a buffer; gets its row of the tensors table only when there is something to say of it."""

    name: Name
    kind: str
    shape: tuple[int, ...]
    dtype: str


@dataclass(frozen=True, slots=True)
class Known:
    """What a recording has met and what is still alive; `params` with their names."""

    models: Sequence[torch.nn.Module]
    params: Sequence[tuple[str, torch.Tensor]]
    scalers: Sequence[Any]


class Registry:
    """Identities for the length of a recording. Weakly keyed: it keeps no optimizer, scaler or parameter alive."""

    def __init__(self, names: Names, settings: CaptureSettings) -> None:
        self._names = names
        self._settings = settings
        self._tensors: dict[Key, TensorEntry] = {}
        self._lock = threading.Lock()  # the writer thread names what it finds to be non-finite
        self._optimizers: list[dict[str, Any]] = []
        self._optimizer_ids: weakref.WeakKeyDictionary[Any, int] = weakref.WeakKeyDictionary()
        self._optimizer_refs: list[tuple[int, weakref.ref[Any]]] = []  # gone through at every backward
        self._slots: dict[int, dict[int, tuple[int, TensorEntry]]] = {}
        self._strays: dict[int, tuple[weakref.ref[Any], TensorEntry]] = {}
        self._scalers: list[dict[str, Any]] = []
        self._scaler_ids: weakref.WeakKeyDictionary[Any, int] = weakref.WeakKeyDictionary()
        self._unused_scalers: set[int] = set()
        self._missed_one_made = False

    @property
    def num_optimizers(self) -> int:
        """Optimizers that have been used so far: those that were only made do not take turns."""
        return len(self._slots)

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
            with self._lock:
                new = TensorEntry(len(self._tensors), kind, name, module, op, exact, trainable)
                entry = self._tensors.setdefault(key, new)
        return entry

    def entry_of(self, tracked: Tracked) -> TensorEntry:
        """The row of something that has none of its own so far; may run in the writer thread."""
        entry = self.tensor(("tracked", tracked.kind, tracked.name), tracked.kind, tracked.name, "")
        entry.shape, entry.dtype = tracked.shape, tracked.dtype
        return entry

    def identify(self, tracked: Tracked) -> int:
        """The id of that row."""
        return self.entry_of(tracked).id

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
        """The identity of an optimizer that is used; its settings are read at its first use."""
        identity = self._optimizer_ids.get(optimizer)
        if identity is None:
            identity = self.made_optimizer(optimizer, None, None)
            self._missed_one_made = True
        if identity not in self._slots:
            self._slots[identity] = {}
            self._take_in(optimizer, identity)
            groups = optimizer.param_groups
            self._optimizers[identity] |= {
                "lr": _plain_number(groups[0].get("lr")) if groups else None,
                # state before the first step was loaded from a checkpoint, or made before gradaudit came
                "resumed": has_stepped(optimizer),
                **group_facts(optimizer),
            }
        return identity

    def _take_in(self, wrapper: Any, identity: int) -> None:
        """Optimizers that another one steps for it are that one from now on: one step, one identity."""
        inner = wrapped_optimizers(wrapper)
        for optimizer in inner:
            self._optimizer_ids[optimizer] = identity
        if inner:
            self._optimizer_refs = [entry for entry in self._optimizer_refs if entry[1]() not in inner]

    def made_optimizer(self, optimizer: Any, file: str | None, line: int | None) -> int:
        """The identity of an optimizer just made, which may never be used; `file` and `line` are where."""
        identity = self._optimizer_ids[optimizer] = len(self._optimizers)
        self._optimizer_refs = [entry for entry in self._optimizer_refs if entry[1]() is not None]
        self._optimizer_refs.append((identity, weakref.ref(optimizer)))
        self._optimizers.append(
            {
                "id": identity,
                "class": type(optimizer).__name__,
                "params": [],
                "lr": None,
                "resumed": False,
                "param_dtypes": [],
                "param_devices": [],
                "gradient_hooks": [],
                "eps": None,
                "fused": False,
                "state_dtypes": {},
                "keeps_masters": False,
                "file": file,
                "line": line,
            }
        )
        return identity

    @property
    def saw_all_made(self) -> bool:
        """Whether every optimizer that was used was seen when it was made."""
        return bool(self._optimizers) and not self._missed_one_made

    def note_state(self, identity: int, dtypes: dict[str, str]) -> None:
        """Note what an optimizer keeps for its parameters."""
        self._optimizers[identity]["state_dtypes"] = dtypes

    def note_masters(self, identity: int) -> None:
        """Note that an optimizer's state holds FP32 copies of half weights; may run in the writer thread."""
        self._optimizers[identity]["keeps_masters"] = True

    def param_slots(self, optimizer: Any) -> list[tuple[int, torch.Tensor, TensorEntry]]:
        """An optimizer's parameters, each with its position in run.json's list; parameters added later come last.

        Not asked for before the first step: `zero_grad` comes before the first forward, when no name is known yet.
        """
        identity = self.optimizer(optimizer)
        slots = self._slots[identity]
        described = self._optimizers[identity]
        found = []
        for group_index, group in enumerate(optimizer.param_groups):
            for index, param in enumerate(group["params"]):
                known = slots.get(id(param))
                if known is None:
                    entry = self.param(param) or self._stray(optimizer, f"{group_index}.{index}", param)
                    known = slots[id(param)] = (len(slots), entry)
                    described["params"].append(entry.id)
                    described["param_dtypes"].append(str(param.dtype).removeprefix("torch."))
                    hooks = described["gradient_hooks"]
                    hooks += [site for site in hook_sites(param) if site not in hooks]
                    described["param_devices"] = sorted({*described["param_devices"], param.device.type})
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

    def optimizers(self) -> list[tuple[int, Any]]:
        """Optimizers that are still alive, with their identities; those that were only made included."""
        held = [(identity, held()) for identity, held in self._optimizer_refs]
        return [(identity, optimizer) for identity, optimizer in held if optimizer is not None]

    def known_optimizers(self) -> list[Any]:
        """Optimizers that are still alive."""
        return list(self._optimizer_ids)

    def known(self) -> Known:
        """Everything that is still alive."""
        roots = self._names.roots()
        held = [param for root in roots for param in root.parameters()]
        for optimizer in self.known_optimizers():
            held += [param for group in optimizer.param_groups for param in group["params"]]
        entries = {id(param): (self.param(param), param) for param in held}
        params = [(self._names.full(entry.name), param) for entry, param in entries.values() if entry is not None]
        return Known(roots, params, list(self._scaler_ids))

    def scaler(self, scaler: Any) -> int:
        """The identity of a GradScaler; its settings are read anew as long as it has not scaled anything."""
        identity = self._scaler_ids.get(scaler)
        if identity is None:
            identity = self.made_scaler(scaler, None, None, None)
        if identity in self._unused_scalers:
            entry = self._scalers[identity]
            was_loaded = entry["loaded"]
            entry |= _scaler_settings(scaler, fresh=entry["fresh"])
            entry["loaded"] |= was_loaded
            if scaler._scale is not None:
                self._unused_scalers.discard(identity)
        return identity

    def made_scaler(self, scaler: Any, requested: bool | None, file: str | None, line: int | None) -> int:
        """The identity of a GradScaler just made; `requested` is the `enabled` it was made with, if that was seen."""
        identity = self._scaler_ids[scaler] = len(self._scalers)
        entry: dict[str, Any] = {"id": identity, "class": type(scaler).__name__, "enabled": scaler.is_enabled()}
        if scaler.is_enabled():
            entry |= _scaler_settings(scaler, fresh=scaler._scale is None)
            self._unused_scalers.add(identity)
        entry |= {"device": getattr(scaler, "_device", None), "requested": requested, "file": file, "line": line}
        self._scalers.append(entry)
        return identity

    def scale_settings(self, scaler: int) -> tuple[float, float]:
        """An enabled scaler's init_scale and backoff_factor."""
        entry = self._scalers[scaler]
        return entry["init_scale"], entry["backoff_factor"]

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
                "file": entry.file,
                "line": entry.line,
            }
            for _, entry in entries
        ]
        return {
            "scalers": [dict(scaler) for scaler in list(self._scalers)],
            "optimizers": [_copied(entry) for entry in list(self._optimizers)],
            "tensors": tensors,
        }


def _copied(optimizer: dict[str, Any]) -> dict[str, Any]:
    return {**optimizer, **{key: list(optimizer[key]) for key in ("params", "param_dtypes", "gradient_hooks")}}


def _matches(name: str, patterns: Sequence[str]) -> bool:
    return any(fnmatchcase(name, pattern) for pattern in patterns)


def _plain_number(value: Any) -> float | None:
    """None for a tensor, which would have to be waited for, and for what JSON has no word for."""
    return float(value) if isinstance(value, Real) and math.isfinite(value) else None


def _scaler_settings(scaler: Any, *, fresh: bool) -> dict[str, Any]:
    return {
        "init_scale": _setting(scaler._init_scale),
        "growth_factor": _setting(scaler.get_growth_factor()),
        "backoff_factor": _setting(scaler.get_backoff_factor()),
        "growth_interval": int(scaler.get_growth_interval()),
        # a tracker above zero before the first scale() came from a checkpoint
        "loaded": bool(scaler._init_growth_tracker),
        "fresh": fresh,
    }


def _setting(value: Any) -> float:
    """A scaler's setting; infinity as the largest number there is, since JSON has no word for it."""
    return min(float(value), sys.float_info.max)
