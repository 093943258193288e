"""The forward half of a step: which module is running, what it made, and whose code made which autograd node."""

from __future__ import annotations

import threading
from typing import Any

import torch

from gradaudit.capture.graph import Marks
from gradaudit.capture.names import LOSS, Name, Names, Running
from gradaudit.capture.reading import floating_tensors, largest, next_sequence, noise_gain
from gradaudit.capture.registry import Registry
from gradaudit.capture.rerun.batches import Batches
from gradaudit.capture.steps import Window
from gradaudit.capture.trace.optrace import Observer
from gradaudit.capture.trace.tracing import Tracing
from gradaudit.capture.unfinished import Unfinished


class Forward:
    """Follows module calls; on sampled steps it also takes their outputs.

    `window` and `sampling` are those of the step under way, `in_backward` the number of backward calls that are
    running: modules called there are recomputations. `ran` are the modules that ran with gradients on a sampled step,
    `hidden` those that hooks cannot look into, and why.
    """

    def __init__(self, names: Names, registry: Registry, observer: Observer, window: Window, *, armed: bool) -> None:
        self.window = window
        self.sampling = True
        self.in_backward = 0
        self.marks = Marks()
        self.batches = Batches(None)
        self.unfinished = Unfinished(names)
        self.running: list[Running] = []
        self.ran: set[Name] = set()
        self.hidden: dict[Name, str] = {}
        self.tracing = Tracing(observer, names, lambda: self.running, armed=armed)
        self._names = names
        self._registry = registry
        self._thread = threading.get_ident()
        self._depth = 0

    def begin_step(self, window: Window, *, sampling: bool, armed: bool) -> None:
        """The last step closed; what comes belongs to the next."""
        if sampling and not self.sampling:
            self.marks = Marks()
        self.window, self.sampling = window, sampling
        self.unfinished.clear()
        self.tracing.begin_step(armed=armed, in_backward=self.in_backward > 0)

    def clear(self) -> None:
        """Let go of what was gathered."""
        self.window, self.sampling = Window(), False
        self.unfinished.clear()
        self.running.clear()
        self.tracing.end_recording()

    def passes_start(self) -> bool:
        """Whether the module that begins lies inside another one on a step that is not sampled: then it only counts.

        Nearly all calls do, and they should cost next to nothing. Sync: none.
        """
        if self.sampling or self._depth == 0 or threading.get_ident() != self._thread:
            return False
        self._depth += 1
        return True

    def passes_end(self) -> bool:
        """The same for one that ends. Sync: none."""
        if self.sampling or self._depth <= 1 or threading.get_ident() != self._thread:
            return False
        self._depth -= 1
        return True

    def start(self, module: torch.nn.Module, args: tuple[Any, ...]) -> None:
        """A module's forward begins. Sync: none."""
        if threading.get_ident() != self._thread:
            return
        self._depth += 1
        if not torch.is_grad_enabled():
            return
        if self._depth == 1 and not self.in_backward:
            self._names.add_root(module)
            self.running.clear()
            self.marks.trim()
            self.tracing.forward_begins(self.window.num_backward)
            self.batches.keep(module, args)
        if self.sampling:
            name = self._names.module(module)
            if name is None:
                caller = self.running[-1] if self.running else None
                name = LOSS if caller is None else self._names.child(module, caller)
            self.running.append(Running(name, type(module).__name__, module))
            self.ran.add(name)
            kind = _hidden_kind(module)
            if kind is not None:
                self.hidden[name] = kind
            self.marks.mark(next_sequence(), name, type(module).__name__)

    def end(self, module: torch.nn.Module, inputs: Any, output: Any) -> None:
        """A module's forward is over, even when it raised. Sync: none."""
        if threading.get_ident() != self._thread:
            return
        self._depth = max(self._depth - 1, 0)
        if not torch.is_grad_enabled():
            return
        if self._depth == 0 and not self.in_backward and not self.window.full:
            # what has a history is another module's output: a loss module is given those
            tensors = [tensor for tensor in floating_tensors(inputs) if tensor.grad_fn is None]
            self.window.inputs += [largest(x) for x in tensors]
            self.tracing.mark_batch(tensors)
            name = self._names.module(module)
            if name is not None and self.tracing.notes is None:  # a trace sees more than that
                self.unfinished.keep(name, output)
        if self.sampling and self.running:
            ended = self.running.pop()
            caller = self.running[-1] if self.running else None
            self.marks.mark(next_sequence(), caller.name if caller else LOSS, caller.module_class if caller else "")
            if not self.in_backward and not self.window.full:
                self._note_outputs(ended.name, ended.module_class, output)
                self._note_noise_gain(module, inputs)

    def _note_outputs(self, name: Name, module_class: str, output: Any) -> None:
        for i, tensor in enumerate(floating_tensors(output)):
            if tensor.grad_fn is not None:
                place = (tensor.grad_fn._sequence_nr(), tensor.output_nr)
                self.marks.outputs.setdefault(place, (name, module_class))
            if self._registry.wanted(name):
                entry = self._registry.tensor(("output", name, i), "output", name, module_class)
                self.window.add_row(entry, tensor, scaled=False, keep_histogram=False)

    def _note_noise_gain(self, module: torch.nn.Module, inputs: Any) -> None:
        found = noise_gain(module, inputs)
        entry = None if found is None else self._registry.param(found[0])
        if found is not None and entry is not None:
            self.window.gain_tensors.append(entry.id)
            self.window.gains.append(found[1])


def _hidden_kind(module: torch.nn.Module) -> str | None:
    if isinstance(module, torch.jit.ScriptModule):
        return "scripted"
    return "compiled" if type(module).__name__ == "OptimizedModule" else None
