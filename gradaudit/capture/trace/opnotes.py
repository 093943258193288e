"""The rows of a traced forward: what each operation made, from what, and on which line of the user's."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch.multiprocessing.reductions import StorageWeakRef

from gradaudit.capture.callsite import user_call_site
from gradaudit.capture.names import LOSS, Name, Names, Running
from gradaudit.capture.trace.opvalues import (
    FP32_VALUE,
    MASKED_ROWS,
    OpInfo,
    Values,
    in_fp32,
    is_finite,
    largest_in_fp32,
    masked_rows,
    numbers_of,
    op_info,
    read_output,
    shows_fault,
    values_of,
    with_reading,
    worth_recomputing,
)

if TYPE_CHECKING:
    from gradaudit.capture.host_copy import HostCopy

MAX_OPS = 20_000
"""Rows of one step; only loops over time written by hand come this far, and they repeat themselves."""

MAX_INPUTS = 64
"""Rows that one row may name as its inputs: a tensor written slice by slice has as many makers as slices."""

INPUT = "input"

Site = tuple[str | None, int | None]


@dataclass(slots=True)
class OpNote:
    """One row of the ops table; `values` may still be on the device, names are put together when it is written."""

    micro_step: int
    op: str
    module: Name
    module_class: str
    site: Site
    dtype: str
    shape: tuple[int, ...]
    numel: int
    values: Values
    inputs: tuple[int, ...] = ()
    constants: tuple[float, ...] = ()
    sequence: int | None = None
    autocast: bool = False
    has_fp32: bool = False
    has_masked_rows: bool = False


@dataclass(slots=True)
class _Storage:
    """Which rows made what lies in a storage: all of it, and parts of it by (offset, elements)."""

    alive: StorageWeakRef  # its address is not given to another storage meanwhile
    whole: tuple[int, ...]
    parts: dict[tuple[int, int], tuple[int, ...]] = field(default_factory=dict)


@dataclass(slots=True)
class _Started:
    func: Any
    args: Any
    kwargs: Any
    info: OpInfo
    arguments: dict[str, Any]
    tensors: list[torch.Tensor]
    sequence: int | None
    inputs: tuple[int, ...] | None = None
    constants: list[float] = field(default_factory=list)
    copies: tuple[Any, Any] | None = None


@dataclass(frozen=True, slots=True)
class Surroundings:
    """What the notes ask of whoever follows the modules: those running, and whether autocast is on for a device."""

    running: Callable[[], Sequence[Running]]
    in_autocast: Callable[[str], bool]


@dataclass(frozen=True, slots=True)
class TracedOps:
    """The notes of a closed step; `copies` hold, in order, the readings of those that the host does not know yet."""

    rows: Sequence[OpNote]
    copies: Sequence[HostCopy]
    full_name: Callable[[Name], str]


def op_rows(ops: TracedOps, step: int) -> list[dict[str, Any]]:
    """Rows of the ops table. Sync: waits for the copies; for the writer thread."""
    from_device = (values for copy in ops.copies for values in copy.numpy())
    rows = []
    for order, note in enumerate(ops.rows):
        values = next(from_device) if isinstance(note.values, torch.Tensor) else note.values
        amax, num_nan, num_posinf, num_neginf, amax_fp32, num_masked = values
        rows.append(
            {
                "step": step, "micro_step": note.micro_step, "order": order, "op": note.op,
                "module": ops.full_name(note.module), "module_class": note.module_class,
                "file": note.site[0], "line": note.site[1], "dtype": note.dtype, "shape": list(note.shape),
                "numel": note.numel, "amax": float(amax), "num_nan": int(num_nan), "num_posinf": int(num_posinf),
                "num_neginf": int(num_neginf), "amax_fp32": float(amax_fp32) if note.has_fp32 else None,
                "num_masked_rows": int(num_masked) if note.has_masked_rows else None, "inputs": list(note.inputs),
                "constants": list(note.constants), "sequence": note.sequence, "autocast": note.autocast,
            }
        )  # fmt: skip
    return rows


_infos: dict[Any, OpInfo] = {}


class OpNotes:
    """The rows of one step. With `everything` unset only operations with FP16 tensors get one, without FP32 values.

    Keeps no tensor alive.
    """

    def __init__(self, names: Names, around: Surroundings, *, everything: bool) -> None:
        self.everything = everything
        self.rows: list[OpNote] = []
        self.sites: dict[int, Site] = {}
        self.micro_step = 0
        self.saw_fault = False
        self._names = names
        self._around = around
        self._storages: dict[int, _Storage] = {}
        self._last_sequence = 0

    @property
    def full(self) -> bool:
        """Whether no further row is taken."""
        return len(self.rows) >= MAX_OPS

    def start(self, func: Any, args: Any, kwargs: Any) -> _Started | None:
        """An operation is about to run. Sync: none."""
        if self.full or not isinstance(func, torch._ops.OpOverload):
            return None
        number = int(torch._C._autograd._get_sequence_nr())
        is_new, self._last_sequence = number > self._last_sequence, number
        if not torch.is_grad_enabled() and not self._around.running():
            return None
        info = _infos.get(func)
        if info is None:
            info = _infos[func] = op_info(func)
        if info.is_scalers:
            return None
        arguments = {**dict(zip(info.arg_names, args, strict=False)), **kwargs}
        tensors = values_of(list(arguments.values()))
        # the node was made just before, by the layer of dispatch above
        makes_node = is_new and torch.is_grad_enabled() and any(t.requires_grad for t in tensors)
        started = _Started(func, args, kwargs, info, arguments, tensors, number - 1 if makes_node else None)
        if info.mutates and self._concerns(tensors):
            with _undisturbed():
                self._find_inputs(started)
                if self.everything and worth_recomputing(info, tensors):
                    started.copies = in_fp32(args), in_fp32(kwargs)
        return started

    def end(self, started: _Started, out: Any) -> None:
        """It returned. Sync: none."""
        outputs = values_of(out)
        if not outputs:
            return
        concerns = self._concerns([*outputs, *started.tensors])
        site = user_call_site() if concerns or started.sequence is not None else (None, None)
        if started.sequence is not None:
            self.sites[started.sequence] = site
        with _undisturbed():
            if concerns:
                self._find_inputs(started)
                self._note(started, outputs, site, is_list=isinstance(out, list))
            else:
                # no row, but what it made descends from rows
                makers = dict.fromkeys(order for tensor in started.tensors for order in self._makers(tensor) or ())
                for result in outputs:
                    self._made_by(tuple(makers)[-MAX_INPUTS:], result)

    def mark_batch(self, tensors: Iterable[torch.Tensor]) -> None:
        """These were the arguments of the outermost module. Sync: none."""
        for tensor in tensors:
            storage = self._storages.get(_address(tensor) or 0)
            for order in storage.whole if storage is not None else ():
                row = self.rows[order]
                if row.op == INPUT and row.module_class == "other":
                    row.module, row.module_class = Name(None, "batch"), "batch"

    def _concerns(self, tensors: Sequence[torch.Tensor]) -> bool:
        return self.everything or any(tensor.dtype is torch.float16 for tensor in tensors)

    def _note(self, started: _Started, outputs: list[torch.Tensor], site: Site, *, is_list: bool) -> None:
        info = started.info
        if info.allocates:
            for out in outputs:
                self._made_by((), out)
            return
        base = None if info.mutates else _shared_with(outputs[0], started.tensors)
        if base is not None:
            self._note_views(started, outputs, base, site)
            return
        for group in [[out] for out in outputs] if is_list else [outputs]:
            order = self._add(started, group, site)
            self._measure(started, group[0], self.rows[order])
            for out in group:
                self._made_by((order,), out, onto=info.mutates)

    def _note_views(self, started: _Started, outputs: list[torch.Tensor], base: torch.Tensor, site: Site) -> None:
        """A view that shows less than what it is taken of has values of its own; any other has none."""
        for out in outputs if self.everything else []:
            storage = self._storages.get(_address(out) or 0)
            if storage is not None and out.numel() < base.numel():
                storage.parts[_part(out)] = (self._add(started, [out], site),)

    def _measure(self, started: _Started, out: torch.Tensor, row: OpNote) -> None:
        info, finite = started.info, is_finite(row.values)
        self.saw_fault = self.saw_fault or (out.dtype is torch.float16 and shows_fault(row.values))
        masked = masked_rows(info, started.arguments)
        if masked is not None:
            row.values = with_reading(row.values, MASKED_ROWS, masked)
            row.has_masked_rows = True
        if out.dtype is not torch.float16 or not worth_recomputing(info, [out, *started.tensors]):
            return
        copies = started.copies
        if copies is None and not info.mutates and (self.everything or finite is False):
            copies = in_fp32(started.args), in_fp32(started.kwargs)
        value = None if copies is None else largest_in_fp32(started.func, info, *copies)
        if value is not None:
            row.values = with_reading(row.values, FP32_VALUE, value)
            row.has_fp32 = True

    def _add(self, started: _Started, outputs: list[torch.Tensor], site: Site) -> int:
        out = outputs[0]
        running = self._around.running()
        name, module_class = (running[-1].name, running[-1].module_class) if running else (LOSS, "")
        row = _row_of(self.micro_step, started.info.name, name, module_class, outputs)
        row.site, row.sequence = site, started.sequence
        row.inputs, row.constants = started.inputs or (), tuple(started.constants)
        row.autocast = self._around.in_autocast(out.device.type)
        self.rows.append(row)
        return len(self.rows) - 1

    def _find_inputs(self, started: _Started) -> None:
        if started.inputs is not None:
            return
        started.constants = numbers_of(started.info, started.arguments)
        found: dict[int, None] = {}
        tensors = started.tensors[1:] if started.info.write_only else started.tensors
        for tensor in tensors:
            makers = self._makers(tensor)
            if makers is None and not started.info.wraps:
                owner = self._owner(tensor)
                if owner is None and tensor.dim() == 0 and tensor.device.type == "cpu":
                    started.constants.append(float(tensor))
                elif self.everything:
                    makers = (self._add_input(tensor, owner),)
            found.update(dict.fromkeys(makers or ()))
        started.inputs = tuple(found)[-MAX_INPUTS:]

    def _makers(self, tensor: torch.Tensor) -> tuple[int, ...] | None:
        """The rows that made a tensor, None where it was there before."""
        storage = self._storages.get(_address(tensor) or 0)
        return None if storage is None else storage.parts.get(_part(tensor), storage.whole)

    def _made_by(self, makers: tuple[int, ...], out: torch.Tensor, *, onto: bool = False) -> None:
        """Note who made a tensor. `onto`: it was written into a storage, and what lies around it is still there."""
        address = _address(out)
        if address is None:
            return
        storage = out.untyped_storage()
        old = self._storages.get(address) if onto and storage.nbytes() > out.numel() * out.element_size() else None
        whole = makers if old is None else (*old.whole, *makers)[-MAX_INPUTS:]
        self._storages[address] = _Storage(_weak(storage), whole, {_part(out): makers})

    def _add_input(self, tensor: torch.Tensor, owner: tuple[Name, str] | None) -> int:
        name, source = owner or (Name(None, ""), "other")
        self.rows.append(_row_of(self.micro_step, INPUT, name, source, [tensor]))
        self._made_by((len(self.rows) - 1,), tensor)
        return len(self.rows) - 1

    def _owner(self, tensor: torch.Tensor) -> tuple[Name, str] | None:
        """The name of a parameter, a buffer of the modules that are running, or a gradient, and which of them it is."""
        name = self._names.param(tensor)
        if name is not None:
            return name, "param"
        running = self._around.running()
        for owner in reversed(running):
            for attribute, buffer in owner.module._buffers.items():
                if buffer is tensor:
                    return owner.name.below(attribute), "buffer"
        for path, buffer in running[0].module.named_buffers() if running else ():
            if buffer is tensor:
                return running[0].name.below(path), "buffer"
        gradient = self._names.gradient(tensor) if self.micro_step and not running else None
        return None if gradient is None else (gradient, "grad")


@contextmanager
def _undisturbed() -> Iterator[None]:
    """Own operations run in plain eager torch: no autocast, no gradients, no function mode of the user's."""
    with torch._C._DisableAutocast(), torch._C.DisableTorchFunction(), torch.no_grad():
        yield


def _row_of(micro_step: int, op: str, name: Name, module_class: str, outputs: Sequence[torch.Tensor]) -> OpNote:
    values, numel = read_output(outputs)
    out = outputs[0]
    dtype = str(out.dtype).removeprefix("torch.")
    shape = () if out.is_nested else tuple(out.shape)
    return OpNote(micro_step, op, name, module_class, (None, None), dtype, shape, numel, values)


_PLAIN = (torch.Tensor, torch.nn.Parameter)


def _address(tensor: torch.Tensor) -> int | None:
    """Identity of the memory behind a tensor, None where there is none of its own."""
    if type(tensor) not in _PLAIN or tensor.layout is not torch.strided or tensor.is_nested:
        return None
    return int(tensor.untyped_storage()._cdata)


def _weak(storage: torch.UntypedStorage) -> StorageWeakRef:
    reference: StorageWeakRef = StorageWeakRef(storage)  # type: ignore[no-untyped-call]
    return reference


def _part(tensor: torch.Tensor) -> tuple[int, int]:
    return int(tensor.storage_offset()), tensor.numel()


def _shared_with(out: torch.Tensor, tensors: Sequence[torch.Tensor]) -> torch.Tensor | None:
    """The argument whose memory an operation's result lies in."""
    address = _address(out)
    return next((t for t in tensors if address is not None and _address(t) == address), None)
