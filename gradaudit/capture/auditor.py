"""The state of one recording: what hooks and wrapped calls report, put together into steps.

A step opens when an optimizer's gradients are first touched at the boundary (`unscale_`, else `step`) and closes when
`step` returns; what backward handed over since the last step closed belongs to it. Everything here runs inside the
user's training loop: nothing raises, nothing waits for the device, no tensor of the user's is kept.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from gradaudit.capture.forward import Forward
from gradaudit.capture.graph import GradientPlace
from gradaudit.capture.guard import guarded, one_line, warn_once
from gradaudit.capture.names import Names
from gradaudit.capture.order.calls import CallLog, Calls, Moment, Row, known_number
from gradaudit.capture.order.gradwatch import GradWatch
from gradaudit.capture.order.losses import Losses
from gradaudit.capture.passes import Backward, Passes
from gradaudit.capture.reading import found_inf, known_on_host
from gradaudit.capture.recorder import Recorder
from gradaudit.capture.registry import Known, Registry
from gradaudit.capture.rerun.batches import Batches
from gradaudit.capture.settings import CaptureSettings, Sampler
from gradaudit.capture.setup import Setup, without_gradient
from gradaudit.capture.steps import OpenStep, Window, joins_outer_step, make_packet, open_step, traced_ops, unfinished
from gradaudit.capture.trace.escalation import Escalation
from gradaudit.capture.weights import Buffers


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
        always = settings.origin == "always"
        self.forward = Forward(self.names, self._registry, self, self._window, armed=always)
        self._escalation = Escalation(always=always, initial=self._registry.scale_settings)
        self._losses = Losses()
        self._gradients = GradWatch()
        self._buffers = Buffers(self.names)
        self._setup = Setup(self._registry)
        self._open: dict[int, OpenStep] = {}
        self._stepping: dict[int, bool] = {}
        self._num_updates: dict[int, int] = {}
        self._log = CallLog()
        parts = (self._losses, self._gradients, self._log)
        self._passes = Passes(self.names, self._registry, self.forward, *parts, self._now)
        self.calls = Calls(self, self._registry, *parts, self._now)
        self._errors: list[str] = []

    def start(self, recorder: Recorder, batches: Batches) -> None:
        """Begin to hand over rows, and to keep batches."""
        self._recorder = self._log.recorder = recorder
        recorder.on_step = self._escalation.finished
        self.forward.batches = batches

    @guarded
    def introduce(self, model: torch.nn.Module | None, optimizer: Any, scaler: Any) -> None:
        """Note a model, an optimizer and a scaler before their first use. Sync: none."""
        if model is not None:
            self.names.add_root(model)
            self._buffers.look()
        if scaler is not None:
            self._registry.scaler(scaler)
        if optimizer is not None:
            self._registry.optimizer(optimizer)

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Nothing that happens inside is recorded, or counted as time of a step."""
        self._gradients.stop_looking()  # every gradient will be set aside for a while
        was_tracing = self.forward.tracing.pause()
        off, self.off, start = self.off, True, time.perf_counter()
        try:
            yield
        finally:
            self.off = off
            self._last_close += time.perf_counter() - start
            if was_tracing:
                self._resume_trace()

    def known(self) -> Known:
        """The models, parameters and scalers seen so far and still alive. Sync: none."""
        return self._registry.known()

    def fail(self, error: Exception) -> None:
        """Switch capture off, say so once, let go of what was gathered, and leave a note in the run."""
        if self.off:
            return
        self.off = True
        self._gradients.stop_looking()
        self._window, self._shared_window = Window(), Window()
        self._open.clear()
        self.forward.clear()
        reason = one_line(error)
        self._errors.append(f"capture stopped at step {self._step}: {reason}")
        warn_once(self._step, reason)

    # Forward

    @guarded
    def on_forward_start(self, module: torch.nn.Module, args: tuple[Any, ...]) -> None:
        """A module's forward begins. Sync: none."""
        self.forward.start(module, args)
        self._buffers.look()

    @guarded
    def on_forward_end(self, module: torch.nn.Module, inputs: Any, output: Any) -> None:
        """A module's forward is over, even when it raised. Sync: none."""
        self.forward.end(module, inputs, output)

    @guarded
    def on_op_start(self, func: Any, args: Any, kwargs: Any) -> Any:
        """torch is about to run an operation of a traced forward. Sync: none."""
        return self.forward.tracing.start(func, args, kwargs)

    @guarded
    def on_op_end(self, started: Any, out: Any) -> None:
        """It returned. Sync: none."""
        self.forward.tracing.end(started, out)

    # Loss and backward

    @guarded
    def on_scale(self, scaler: Any, outputs: Any, scaled: Any) -> None:
        """`scaler.scale` returned. Sync: none."""
        identity = self._registry.scaler(scaler)
        self._log.put(self._log.row("scaler.scale", self._now(), scaler=identity))
        if scaler.is_enabled():
            self._losses.scaled(identity, outputs, scaled)

    @guarded
    def on_backward_start(self, tensors: Any) -> Backward:
        """`backward` was called on these tensors; what is returned is for `on_backward_end`. Sync: none."""
        return self._passes.start(tensors, self._on_gradient)

    def on_backward_end(self, backward: Backward | None, error: BaseException | None) -> None:
        """`backward` returned or raised; capture may have been switched off meanwhile. Sync: none."""
        self.forward.in_backward = max(self.forward.in_backward - 1, 0)
        if backward is not None and backward.walk is not None:
            backward.walk.remove()
        self._end_backward(backward, error)

    @guarded
    def _end_backward(self, backward: Backward | None, error: BaseException | None) -> None:
        if backward is not None:
            self._passes.end(backward, error)
        self._passes.resume_trace()

    @guarded
    def _resume_trace(self) -> None:
        self._passes.resume_trace()

    @guarded
    def _on_gradient(self, place: GradientPlace, grad: torch.Tensor) -> None:
        self._passes.take(place, grad)

    # The optimizer boundary

    @guarded
    def on_unscale(self, scaler: Any, optimizer: Any) -> Row | None:
        """`scaler.unscale_` is about to divide the gradients; the row is for `calls.on_scaler_end`. Sync: none."""
        self.forward.tracing.pause()
        if not scaler.is_enabled():
            return None
        fresh = id(optimizer) not in self._open
        self._look_for_changes(optimizer)
        row = self._row("scaler.unscale_", optimizer, scaler, scaled=fresh)
        if fresh:
            self._open_step(optimizer, scaler)
        return row

    @guarded
    def on_scaler_step_start(self, scaler: Any, optimizer: Any) -> Row | None:
        """`scaler.step` was called; the row is for `calls.on_scaler_end`. Sync: none."""
        self.forward.tracing.pause()
        if not scaler.is_enabled():
            return None
        fresh = id(optimizer) not in self._open
        if fresh:
            self._look_for_changes(optimizer)
        row = self._row("scaler.step", optimizer, scaler, scaled=fresh)
        if fresh:
            self._open_step(optimizer, scaler)
        if not any(self._open[id(optimizer)].present):
            row["detail"] = without_gradient(optimizer, self.names, self.forward.ran)
        self._stepping[id(optimizer)] = False
        return row

    @guarded
    def on_scaler_step_end(self, scaler: Any, optimizer: Any, *, raised: bool) -> None:
        """`scaler.step` returned or raised. Sync: none."""
        called = self._stepping.pop(id(optimizer), True) or not isinstance(optimizer, torch.optim.Optimizer)
        if scaler.is_enabled() and id(optimizer) in self._open:
            self._close_step(optimizer, found=found_inf(scaler, optimizer), given_up=raised, held_back=not called)

    @guarded
    def on_update(self, scaler: Any, new_scale: Any = None) -> Row | None:
        """`scaler.update` was called, the scale is still the old one; for `calls.on_scaler_end`. Sync: none."""
        if not scaler.is_enabled():
            return None
        row = self._row("scaler.update", None, scaler, scaled=None)
        if new_scale is not None:
            row["detail"] = {"new_scale": known_number(new_scale)}
        identity = self._registry.scaler(scaler)
        for optimizer in self._registry.known_optimizers():
            opened = self._open.get(id(optimizer))
            if opened is not None and opened.scaler == identity:
                # unscaled, then left alone: an attempt that the script itself gave up
                self._close_step(optimizer, found=found_inf(scaler, optimizer), given_up=True)
        self._num_updates[identity] = self._num_updates.get(identity, 0) + 1
        return row

    @guarded
    def on_optimizer_start(self, optimizer: Any, *, has_closure: bool) -> None:
        """`optimizer.step` begins, called by the scaler or by the script. Sync: none."""
        self.forward.tracing.pause()
        if joins_outer_step(self._registry, self._open, self._stepping, optimizer):
            return
        opened = self._open.get(id(optimizer))
        if opened is None:
            self._look_for_changes(optimizer)
        scaled = self._now().is_scaled([self._registry.optimizer(optimizer)])
        self._log.put(self._row("optimizer.step", optimizer, None, scaled=scaled))
        if opened is not None and opened.scaler is None:
            self._close_step(optimizer, found=[], given_up=True)  # the last one raised, and the script went on
        if not has_closure and id(optimizer) not in self._open:
            self._open_step(optimizer, None)

    @guarded
    def on_optimizer_end(self, optimizer: Any) -> None:
        """`optimizer.step` returned. Sync: none."""
        if joins_outer_step(self._registry, self._open, self._stepping, optimizer):
            return
        if id(optimizer) not in self._open:
            self._open_step(optimizer, None)  # a closure computed the gradients inside the step
        self._close_step(optimizer, found=[])

    @guarded
    def on_zero_grad(self, optimizer: Any) -> None:
        """`optimizer.zero_grad` was called. Sync: none."""
        self._resume_trace()  # a step without modules begins with that, if with anything
        self.calls.on_optimizer_call("optimizer.zero_grad", optimizer)

    @guarded
    def on_autocast(self, device: str, dtype: str, enabled: bool) -> None:
        """An autocast region was entered. Sync: none."""
        self._log.autocast(device, dtype, enabled=enabled)
        self.forward.tracing.enter_autocast(device, enabled=enabled)
        if enabled and torch.is_grad_enabled():
            self._resume_trace()

    @guarded
    def on_autocast_exit(self) -> None:
        """An autocast region was left. Sync: none."""
        self.forward.tracing.exit_autocast()

    @guarded
    def close_open_steps(self, *, failed: bool) -> None:
        """End of recording, with an exception if it `failed`: unfinished attempts are kept as such. Sync: none."""
        self.forward.batches.close(self._step, failed=failed)
        self._gradients.stop_looking()
        self._log.put(self.forward.unfinished.event(self._window, self._log, self._now()))
        for optimizer in self._registry.known_optimizers():
            if id(optimizer) in self._open:
                self._close_step(optimizer, found=[], given_up=True)
        ops = traced_ops(self.forward.tracing.notes, self.names.full)
        if failed and self._recorder is not None and (self._window.rows or ops is not None):
            self._recorder.put(unfinished(self._step, self._window, ops))
        self.forward.clear()

    def _look_for_changes(self, optimizer: Any) -> None:
        """Whether somebody changed the gradients that are about to be used."""
        identity, now = self._registry.optimizer(optimizer), self._now()
        change = self._gradients.step_opens(identity, optimizer, scaled=now.is_scaled([identity]))
        self._log.changed(change, now, identity)

    def _open_step(self, optimizer: Any, scaler: Any) -> None:
        scaled = True if scaler is not None else self._passes.gradients_scaled
        self._open[id(optimizer)] = open_step(
            self._registry, self._window, optimizer, scaler, scaled=scaled, sampling=self._sampling
        )

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
        tracing = self.forward.tracing
        step["traced"] = tracing.is_whole
        ops = traced_ops(tracing.notes, self.names.full)
        was_applied = not given_up and not held_back
        if was_applied:
            window.add_updates(opened.halves)
        packet = make_packet(
            step,
            opened,
            seen,
            window,
            found,
            buffers=self._buffers.magnitudes() if self._sampling else None,
            identify=self._registry.identify,
            ops=ops,
            armed=self._escalation.armed,
        )
        self.forward.batches.step_closed(packet)
        armed = self._escalation.closed(
            packet,
            held_back=held_back,
            saw_fault=tracing.notes is not None and tracing.notes.saw_fault,
            num_optimizers=self._registry.num_optimizers,
        )
        self._recorder.put(packet)
        if self._sampling:
            self._log.put(self._setup.look(opened.optimizer, optimizer, was_applied=was_applied))
        self._next_step(overflowed=held_back or known_on_host(found), armed=armed)

    def _next_step(self, *, overflowed: bool, armed: bool) -> None:
        now = time.perf_counter()
        is_typical = bool(self._window.rows) and self.forward.tracing.notes is None  # a traced step costs more
        self._sampler.measured(self.cost_s - self._cost_at_close_s, now - self._last_close, sampled=is_typical)
        self._last_close, self._cost_at_close_s = now, self.cost_s
        self._step += 1
        self._sampling = self._sampler.next(self._step, self._registry.num_optimizers, overflowed=overflowed)
        self._sampling |= armed
        if self._window.num_backward:
            window = self._window
            self._shared_window = Window(window.num_backward, window.losses, window.inputs, window.scaled_losses)
        self._losses.step_closed()
        self._window = Window()
        self.forward.begin_step(self._window, sampling=self._sampling, armed=armed)

    def _row(self, name: str, optimizer: Any, scaler: Any, *, scaled: bool | None) -> Row:
        return self._log.row(
            name,
            self._now(),
            optimizer=None if optimizer is None else self._registry.optimizer(optimizer),
            scaler=None if scaler is None else self._registry.scaler(scaler),
            scaled=scaled,
        )

    def _now(self) -> Moment:
        unscaled = [opened.optimizer for opened in self._open.values() if opened.scaler is not None]
        return Moment(self._step, self._window.num_backward, self._passes.gradients_scaled, unscaled)

    def describe(self) -> dict[str, Any]:
        """run.json as of now; called in the writer thread."""
        return {
            **self._run,
            "heartbeat_at": time.time(),
            **self._registry.describe(),
            **self._setup.describe(self.names, self.forward.hidden),
            "autocast": list(self._log.autocasts),
            "errors": [*self._errors, *self.forward.tracing.errors, *self.forward.batches.errors],
            "batches": list(self.forward.batches.saved),
            "drops": {"sampled_steps": self._recorder.num_dropped if self._recorder is not None else 0},
            "cost": {
                "recording_s": round(self.cost_s, 3),
                "wall_s": round(time.perf_counter() - self._started, 3),
                "every": self._sampler.every,
            },
        }
