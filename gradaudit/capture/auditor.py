"""The state of one recording: what hooks and wrapped calls report, put together into steps.

A step opens when an optimizer's gradients are first touched at the boundary (`unscale_`, else `step`) and closes when
`step` returns; what backward handed over since the last step closed belongs to it. Everything here runs inside the
user's training loop: nothing raises, nothing waits for the device, no tensor of the user's is kept.
"""

from __future__ import annotations

import threading
import time
from typing import Any

import torch

from gradaudit.capture.calls import CallLog
from gradaudit.capture.graph import GradientPlace, Marks, Walk, hook_graph
from gradaudit.capture.guard import guarded, one_line, warn_once
from gradaudit.capture.names import LOSS, Name, Names, Running
from gradaudit.capture.reading import (
    descends_from,
    floating_tensors,
    found_inf,
    known_on_host,
    largest,
    largest_each,
    mean,
    next_sequence,
    noise_gain,
)
from gradaudit.capture.recorder import Recorder
from gradaudit.capture.registry import Registry, TensorEntry
from gradaudit.capture.settings import CaptureSettings, Sampler
from gradaudit.capture.statistic import tensor_row
from gradaudit.capture.steps import OpenStep, Window, copy_of, make_packet

NUM_SCALED_OUTPUTS = 256
"""Outputs of scaler.scale remembered by sequence number; a step makes one per loss and micro-step."""


class Auditor:
    """Receives what `patches` and the hooks see; made and closed by `attach`.

    Args:
        settings: What to record.
        run: Fixed part of run.json.
    """

    def __init__(self, settings: CaptureSettings, run: dict[str, Any]) -> None:
        self.off = False
        self.names = Names()
        self._registry = Registry(self.names, settings)
        self._run = run
        self._sampler = Sampler(settings)
        self._recorder: Recorder | None = None
        self._thread = threading.get_ident()
        self._started = self._last_close = time.perf_counter()
        self.cost_s = self._cost_at_close_s = 0.0
        self._step = 0
        self._sampling = True
        self._window = Window()
        self._shared_window = Window()
        self._marks = Marks()
        self._depth = 0
        self._in_backward = 0
        self._running: list[Running] = []
        self._scaled_losses: dict[int, torch.Tensor] = {}
        self._gradients_scaled = False
        self._open: dict[int, OpenStep] = {}
        self._stepping: dict[int, bool] = {}
        self._num_updates: dict[int, int] = {}
        self._calls = CallLog()
        self._errors: list[str] = []

    def start(self, recorder: Recorder) -> None:
        """Begin to hand over rows."""
        self._recorder = recorder

    @guarded
    def introduce(self, model: torch.nn.Module | None, optimizer: Any, scaler: Any) -> None:
        """Note a model, an optimizer and a scaler before their first use. Sync: none."""
        if model is not None:
            self.names.add_root(model)
        if scaler is not None:
            self._registry.scaler(scaler)
        if optimizer is not None:
            self._registry.optimizer(optimizer)

    def fail(self, error: Exception) -> None:
        """Switch capture off, say so once, let go of what was gathered, and leave a note in the run."""
        if self.off:
            return
        self.off = True
        self._window, self._shared_window = Window(), Window()
        self._open.clear()
        self._running.clear()
        reason = one_line(error)
        self._errors.append(f"capture stopped at step {self._step}: {reason}")
        warn_once(self._step, reason)

    # Forward

    @guarded
    def on_forward_start(self, module: torch.nn.Module) -> None:
        """A module's forward begins. Sync: none."""
        if threading.get_ident() != self._thread:
            return
        self._depth += 1
        if not torch.is_grad_enabled():
            return
        if self._depth == 1 and not self._in_backward:
            self.names.add_root(module)
            self._running.clear()
            self._marks.trim()
        if self._sampling:
            name = self.names.module(module)
            if name is None:
                caller = self._running[-1] if self._running else None
                name = LOSS if caller is None else self.names.child(module, caller)
            self._running.append(Running(name, type(module).__name__, module))
            self._marks.mark(next_sequence(), name, type(module).__name__)

    @guarded
    def on_forward_end(self, module: torch.nn.Module, inputs: Any, output: Any) -> None:
        """A module's forward is over, even when it raised. Sync: none."""
        if threading.get_ident() != self._thread:
            return
        self._depth = max(self._depth - 1, 0)
        if not torch.is_grad_enabled():
            return
        if self._depth == 0 and not self._in_backward and not self._window.full:
            self._window.inputs += [largest(x) for x in floating_tensors(inputs)]
        if self._sampling and self._running:
            ended = self._running.pop()
            caller = self._running[-1] if self._running else None
            self._marks.mark(next_sequence(), caller.name if caller else LOSS, caller.module_class if caller else "")
            if not self._in_backward and not self._window.full:
                self._note_outputs(ended.name, ended.module_class, output)
                self._note_noise_gain(module, inputs)

    def _note_outputs(self, name: Name, module_class: str, output: Any) -> None:
        for i, tensor in enumerate(floating_tensors(output)):
            if tensor.grad_fn is not None:
                place = (tensor.grad_fn._sequence_nr(), tensor.output_nr)
                self._marks.outputs.setdefault(place, (name, module_class))
            if self._registry.wanted(name):
                entry = self._registry.tensor(("output", name, i), "output", name, module_class)
                self._add_row(entry, tensor, scaled=False, keep_histogram=False)

    def _note_noise_gain(self, module: torch.nn.Module, inputs: Any) -> None:
        found = noise_gain(module, inputs)
        entry = None if found is None else self._registry.param(found[0])
        if found is not None and entry is not None:
            self._window.gain_tensors.append(entry.id)
            self._window.gains.append(found[1])

    # Loss and backward

    @guarded
    def on_scale(self, scaler: Any, outputs: Any, scaled: Any) -> None:
        """`scaler.scale` returned. Sync: none."""
        self._event("scaler.scale", scaler=scaler)
        if not scaler.is_enabled():
            return
        for loss, tensor in zip(floating_tensors(outputs), floating_tensors(scaled), strict=True):
            if tensor.grad_fn is not None:
                self._scaled_losses[tensor.grad_fn._sequence_nr()] = mean(loss)
        while len(self._scaled_losses) > NUM_SCALED_OUTPUTS:
            del self._scaled_losses[next(iter(self._scaled_losses))]

    @guarded
    def on_backward_start(self, tensors: Any) -> Walk | None:
        """`backward` was called on these tensors. Sync: none."""
        roots = [tensor for tensor in floating_tensors(tensors) if tensor.grad_fn is not None]
        self._in_backward += 1
        if self._in_backward == 1:
            window = self._window
            scaled = descends_from(roots, self._scaled_losses)
            self._gradients_scaled = bool(scaled) or (self._gradients_scaled and window.num_backward > 0)
            window.num_backward += 1
            window.losses += [self._scaled_losses[number] for number in scaled] or [mean(root) for root in roots]
            self._event("backward", scaled=bool(scaled))
        if not self._sampling:
            return None
        walk = hook_graph(roots, self._marks, self.names, self._on_gradient)
        for param, parents in walk.param_parents:
            entry = self._registry.param(param)
            if entry is not None:
                entry.parent_keys = parents
        return walk

    def on_backward_end(self, walk: Walk | None) -> None:
        """`backward` returned or raised; capture may have been switched off meanwhile. Sync: none."""
        self._in_backward = max(self._in_backward - 1, 0)
        if walk is not None:
            walk.remove()

    @guarded
    def _on_gradient(self, place: GradientPlace, grad: torch.Tensor) -> None:
        if self._sampling and not self._window.full and self._registry.wanted(place.name):
            entry = self._registry.tensor(
                place.key, place.kind, place.name, place.module, op=place.op, exact=place.exact
            )
            entry.parent_keys = entry.parent_keys or place.parents
            self._add_row(entry, grad, scaled=self._gradients_scaled, keep_histogram=True)

    # The optimizer boundary

    @guarded
    def on_unscale(self, scaler: Any, optimizer: Any) -> None:
        """`scaler.unscale_` is about to divide the gradients. Sync: none."""
        if scaler.is_enabled():
            self._event("scaler.unscale_", optimizer=optimizer, scaler=scaler, scaled=True)
            if id(optimizer) not in self._open:
                self._open_step(optimizer, scaler)

    @guarded
    def on_scaler_step_start(self, scaler: Any, optimizer: Any) -> None:
        """`scaler.step` was called. Sync: none."""
        if scaler.is_enabled():
            fresh = id(optimizer) not in self._open
            self._event("scaler.step", optimizer=optimizer, scaler=scaler, scaled=fresh)
            if fresh:
                self._open_step(optimizer, scaler)
            self._stepping[id(optimizer)] = False

    @guarded
    def on_scaler_step_end(self, scaler: Any, optimizer: Any, *, raised: bool) -> None:
        """`scaler.step` returned or raised. Sync: none."""
        called = self._stepping.pop(id(optimizer), True) or not isinstance(optimizer, torch.optim.Optimizer)
        if scaler.is_enabled() and id(optimizer) in self._open:
            self._close_step(optimizer, found=found_inf(scaler, optimizer), given_up=raised, held_back=not called)

    @guarded
    def on_update(self, scaler: Any) -> None:
        """`scaler.update` was called; the scale it holds is still the old one. Sync: none."""
        if not scaler.is_enabled():
            return
        self._event("scaler.update", scaler=scaler)
        identity = self._registry.scaler(scaler)
        for optimizer in self._registry.known_optimizers():
            opened = self._open.get(id(optimizer))
            if opened is not None and opened.scaler == identity:
                # unscaled, then left alone: an attempt that the script itself gave up
                self._close_step(optimizer, found=found_inf(scaler, optimizer), given_up=True)
        self._num_updates[identity] = self._num_updates.get(identity, 0) + 1

    @guarded
    def on_load_state(self, scaler: Any) -> None:
        """`scaler.load_state_dict` returned. Sync: none."""
        self._event("scaler.load_state_dict", scaler=scaler)
        self._registry.mark_loaded(scaler)

    @guarded
    def on_optimizer_start(self, optimizer: Any, *, has_closure: bool) -> None:
        """`optimizer.step` begins, called by the scaler or by the script. Sync: none."""
        if id(optimizer) in self._stepping:
            self._stepping[id(optimizer)] = True
            return
        self._event("optimizer.step", optimizer=optimizer, scaled=self._gradients_scaled)
        opened = self._open.get(id(optimizer))
        if opened is not None and opened.scaler is None:
            self._close_step(optimizer, found=[], given_up=True)  # the last one raised, and the script went on
        if not has_closure and id(optimizer) not in self._open:
            self._open_step(optimizer, None)

    @guarded
    def on_optimizer_end(self, optimizer: Any) -> None:
        """`optimizer.step` returned. Sync: none."""
        if id(optimizer) in self._stepping:
            return
        if id(optimizer) not in self._open:
            self._open_step(optimizer, None)  # a closure computed the gradients inside the step
        self._close_step(optimizer, found=[])

    @guarded
    def on_call(self, name: str, *, optimizer: Any = None, detail: str | None = None) -> None:
        """Any other call of the call-order log. Sync: none."""
        unscaled = any(opened.scaler is not None for opened in self._open.values())
        self._event(name, optimizer=optimizer, scaled=self._gradients_scaled and not unscaled, detail=detail)

    @guarded
    def on_autocast(self, device: str, dtype: str, enabled: bool) -> None:
        """An autocast region was entered. Sync: none."""
        self._calls.autocast(device, dtype, enabled=enabled)

    @guarded
    def close_open_steps(self) -> None:
        """End of recording: attempts that were never finished are kept as such. Sync: none."""
        for optimizer in self._registry.known_optimizers():
            if id(optimizer) in self._open:
                self._close_step(optimizer, found=[], given_up=True)

    def _open_step(self, optimizer: Any, scaler: Any) -> None:
        identity = self._registry.optimizer(optimizer)
        slots = self._registry.param_slots(optimizer)
        with_gradient = [(entry, param.grad) for _, param, entry in slots if param.grad is not None]
        scaled = True if scaler is not None else self._gradients_scaled
        self._open[id(optimizer)] = OpenStep(
            optimizer=identity,
            scaler=None if scaler is None else self._registry.scaler(scaler),
            scaled=scaled,
            # copies, since update() changes both in place
            scale=copy_of(scaler, "_scale"),
            tracker=copy_of(scaler, "_growth_tracker"),
            present=[param.grad is not None for _, param, _ in slots],
            amax=largest_each([grad for _, grad in with_gradient]),
        )
        if self._sampling:
            for entry, grad in with_gradient:
                if self._registry.wanted(entry.name):
                    self._add_row(entry, grad, scaled=scaled, keep_histogram=True)

    def _close_step(
        self, optimizer: Any, *, found: list[torch.Tensor], given_up: bool = False, held_back: bool = False
    ) -> None:
        """`held_back`: the scaler did not call the optimizer, so the host knows of what only a device saw."""
        opened = self._open.pop(id(optimizer))
        window = self._window
        # a second optimizer stepping on the same backward shares what was seen of it
        seen = window if window.num_backward else self._shared_window
        step = {
            "step": self._step,
            "time_s": time.perf_counter() - self._started,
            "update": None if opened.scaler is None else self._num_updates.get(opened.scaler, 0),
            "params": self._registry.param_ids(opened.optimizer),
            "given_up": given_up,
        }
        assert self._recorder is not None
        if self._recorder.error is not None:
            self.fail(self._recorder.error)
            return
        self._recorder.put(make_packet(step, opened, seen, window, found))
        self._next_step(overflowed=held_back or known_on_host(found))

    def _next_step(self, *, overflowed: bool) -> None:
        now = time.perf_counter()
        self._sampler.measured(
            self.cost_s - self._cost_at_close_s, now - self._last_close, sampled=bool(self._window.rows)
        )
        self._last_close, self._cost_at_close_s = now, self.cost_s
        self._step += 1
        was_sampling = self._sampling
        self._sampling = self._sampler.next(self._step, self._registry.num_optimizers, overflowed=overflowed)
        if self._sampling and not was_sampling:
            self._marks = Marks()
        if self._window.num_backward:
            self._shared_window = Window(self._window.num_backward, self._window.losses, self._window.inputs)
        self._window = Window()

    def _add_row(self, entry: TensorEntry, tensor: torch.Tensor, *, scaled: bool, keep_histogram: bool) -> None:
        if entry.dtype is None:
            entry.shape = () if tensor.is_nested else tuple(tensor.shape)
            entry.dtype = str(tensor.dtype).removeprefix("torch.")
        window = self._window
        with torch.no_grad():
            window.rows.append(tensor_row(tensor))
        window.columns.append((entry.id, scaled, len(window.columns), keep_histogram))

    def _event(
        self,
        name: str,
        *,
        optimizer: Any = None,
        scaler: Any = None,
        scaled: bool | None = None,
        detail: str | None = None,
    ) -> None:
        event = self._calls.event(
            name,
            None if optimizer is None else self._registry.optimizer(optimizer),
            scaler=None if scaler is None else self._registry.scaler(scaler),
            step=self._step,
            micro_step=self._window.num_backward,
            scaled=scaled,
            detail=detail,
        )
        if self._recorder is not None:
            self._recorder.put_event(event)

    def describe(self) -> dict[str, Any]:
        """run.json as of now; called in the writer thread."""
        return {
            **self._run,
            "heartbeat_at": time.time(),
            **self._registry.describe(),
            "autocast": list(self._calls.autocasts),
            "errors": list(self._errors),
            "drops": {"sampled_steps": self._recorder.num_dropped if self._recorder is not None else 0},
            "cost": {
                "recording_s": round(self.cost_s, 3),
                "wall_s": round(time.perf_counter() - self._started, 3),
                "every": self._sampler.every,
            },
        }
