"""The batch that went wrong, kept so that it can be run again: what `--save-batch` adds to a recording.

While it is on, the arguments of every outermost forward are copied on their device until the step is over, and the
weights once per step: it costs that memory and that time, and is off unless asked for.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch.nn.parameter import is_lazy
from torch.utils._python_dispatch import _disable_current_modes

from gradaudit.capture.guard import one_line
from gradaudit.capture.names import unwrap
from gradaudit.capture.recorder import Packet
from gradaudit.capture.rerun.state import RandomState, random_state
from gradaudit.capture.trace.escalation import Judge

BATCH_FORMAT = "gradaudit-batch"
BATCH_VERSION = 1

MAX_BATCHES = 3
"""Files a run: a fault that repeats is the same batch in another guise, and each file holds the weights."""

MAX_CALLS = 64
"""Forwards kept for one step; a loop that never steps would otherwise keep every batch it sees."""

_PLAIN = (bool, int, float, complex, str, bytes, type(None), torch.dtype, torch.device, torch.Size)

_TENSORS = (torch.Tensor, torch.nn.Parameter)


@dataclass(slots=True)
class _Model:
    """A model's class and its parameters and buffers, copied; `left_out` are those that cannot be."""

    module: torch.nn.Module
    state: dict[str, torch.Tensor] = field(default_factory=dict)
    left_out: list[str] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class _Call:
    """One outermost forward: which model, what it was given, and what it depended on."""

    model: int
    args: Any
    kwargs: Any
    left_out: list[str]
    training: list[str]
    autocast: list[dict[str, Any]]
    random: RandomState


class Batches:
    """Holds what the step under way was made of, and writes it where the step fails. Closed with the recording.

    `saved` is run.json's list of files; `errors` says why no more are kept, if something went wrong.

    Args:
        folder: This rank's folder in the run. None: nothing is kept.
    """

    def __init__(self, folder: Path | None) -> None:
        self.saved: list[dict[str, Any]] = []
        self.errors: list[str] = []
        self._folder = folder
        self._models: list[_Model] = []
        self._calls: list[_Call] = []
        self._num_calls = 0
        self._is_over = self._is_saved = False
        self._judge = Judge()

    @property
    def off(self) -> bool:
        """Whether nothing more is kept."""
        return self._folder is None or bool(self.errors) or len(self.saved) >= MAX_BATCHES

    def keep(self, module: torch.nn.Module, args: tuple[Any, ...]) -> None:
        """A model's forward begins, called by no other module. Sync: none."""
        if self.off:
            return
        if self._is_over:
            self._forget()
        if next(module.parameters(), None) is None:
            return
        self._num_calls += 1
        if self._num_calls > MAX_CALLS:
            return
        with self._failing_here(), torch.no_grad(), _disable_current_modes():
            self._calls.append(self._copy_call(module, args))

    def _copy_call(self, called: torch.nn.Module, args: tuple[Any, ...]) -> _Call:
        left_out: list[str] = []
        kwargs = _keywords(called)
        if kwargs is None:
            kwargs, left_out = {}, ["the keyword arguments"]
        module = unwrap(called)
        return _Call(
            self._model(module),
            tuple(_copied(arg, f"argument {i + 1}", left_out) for i, arg in enumerate(args)),
            {key: _copied(value, f"argument {key}", left_out) for key, value in kwargs.items()},
            left_out,
            [name for name, part in module.named_modules() if part.training],
            [_autocast_state(device) for device in sorted({"cpu", *(p.device.type for p in module.parameters())})],
            random_state(),
        )

    def _model(self, module: torch.nn.Module) -> int:
        for i, model in enumerate(self._models):
            if model.module is module:
                return i
        model = _Model(module)
        copies: dict[int, torch.Tensor] = {}
        tensors = [*module.named_parameters(remove_duplicate=False), *module.named_buffers(remove_duplicate=False)]
        for name, tensor in tensors:
            if type(tensor) not in _TENSORS or is_lazy(tensor):
                model.left_out.append(name)
            else:
                model.state[name] = copies.setdefault(id(tensor), tensor.detach().clone())
        self._models.append(model)
        return len(self._models) - 1

    def step_closed(self, packet: Packet) -> None:
        """A step is over. Writes what it was made of if it failed.

        Sync: waits for the step's numbers, and for the batch where it failed.
        """
        if self.off:
            return
        self._is_over = True
        row = packet.row()
        if self._judge.is_fault(row) and not self._is_saved:
            self._save(row["step"], row["scale"])

    def close(self, step: int, *, failed: bool) -> None:
        """The recording ends; `failed`: with an exception, before the step under way was over.

        Sync: waits for the device where it failed.
        """
        if failed and not self._is_over:
            self._save(step, 1.0)
        self._forget()

    def _forget(self) -> None:
        self._models, self._calls, self._num_calls = [], [], 0
        self._is_over = self._is_saved = False

    def _save(self, step: int, scale: float) -> None:
        if self._calls and not self.off:
            with self._failing_here():
                self._write(step, scale)
        if self.off:
            self._forget()

    def _write(self, step: int, scale: float) -> None:
        assert self._folder is not None
        file = self._folder / f"batch-{step:06d}.pt"
        temporary = file.with_name(f".{file.name}.tmp")
        models = [
            {"class": type(model.module).__name__, "device": next(model.module.parameters()).device.type}
            | {"state": _on_cpu(model.state), "left_out": model.left_out}
            for model in self._models
        ]
        calls = [
            {"model": call.model, "args": _on_cpu(call.args), "kwargs": _on_cpu(call.kwargs)}
            | {"left_out": call.left_out, "training": call.training, "autocast": call.autocast, "random": call.random}
            for call in self._calls
        ]
        content = {
            "format": BATCH_FORMAT, "version": BATCH_VERSION, "torch_version": str(torch.__version__), "step": step,
            "scale": scale, "models": models, "calls": calls, "num_calls": self._num_calls,
        }  # fmt: skip
        torch.save(content, temporary)
        os.replace(temporary, file)
        self.saved.append({"step": step, "file": f"{self._folder.name}/{file.name}"})
        self._is_saved = True

    @contextmanager
    def _failing_here(self) -> Iterator[None]:
        """A batch that cannot be kept or written ends this alone, not the recording."""
        try:
            yield
        except Exception as error:
            self.errors.append(f"no batch is saved any more: {one_line(error)}")
            self._forget()


def _keywords(module: torch.nn.Module) -> dict[str, Any] | None:
    """Keyword arguments of the forward that is about to run; None where they cannot be told.

    A global pre-hook is not given them, so they are read where torch holds them: in the call that runs the hooks.
    """
    frame = sys._getframe(1)
    while frame is not None:
        if frame.f_code.co_filename == torch.nn.modules.module.__file__:
            variables = frame.f_locals
            if variables.get("self") is module and isinstance(variables.get("kwargs"), dict):
                return dict(variables["kwargs"])
        frame = frame.f_back  # type: ignore[assignment]
    return None


def _copied(value: Any, name: str, left_out: list[str]) -> Any:
    """A copy of tensors and plain containers; anything else is left out, and its name noted."""
    if type(value) in _TENSORS:
        copy: torch.Tensor = value.detach().clone()
        return copy.requires_grad_(value.requires_grad)
    if type(value) in _PLAIN:
        return value
    if type(value) in (tuple, list):
        return type(value)(_copied(item, f"{name}[{i}]", left_out) for i, item in enumerate(value))
    if type(value) is dict and all(type(key) in (str, int) for key in value):
        return {key: _copied(item, f"{name}[{key!r}]", left_out) for key, item in value.items()}
    left_out.append(f"{name} (a {type(value).__name__})")
    return None


def _on_cpu(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return value.detach().cpu().requires_grad_(value.requires_grad)
    if type(value) in (tuple, list):
        return type(value)(_on_cpu(item) for item in value)
    if type(value) is dict:
        return {key: _on_cpu(item) for key, item in value.items()}
    return value


def _autocast_state(device: str) -> dict[str, Any]:
    dtype = str(torch.get_autocast_dtype(device)).removeprefix("torch.")
    return {"device": device, "enabled": torch.is_autocast_enabled(device), "dtype": dtype}
