"""The state of one recording: what hooks and wrapped calls report, put together into steps.

A step opens when an optimizer's gradients are first touched at the boundary (`unscale_`, else `step`) and closes when
`step` returns; what backward handed over since the last step closed belongs to it. Everything here runs inside the
user's training loop: nothing raises, nothing waits for the device, no tensor of the user's is kept.
"""

from __future__ import annotations

import threading
import time
import warnings
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import wraps
from typing import Any, TypeVar

import numpy as np
import torch

from gradaudit.capture.callsite import user_call_site
from gradaudit.capture.graph import GradientPlace, Marks, Walk, hook_graph
from gradaudit.capture.names import LOSS, Name, Names
from gradaudit.capture.reading import (
    descends_from,
    floating_tensors,
    found_inf,
    known_on_host,
    largest,
    largest_each,
    layer_weight,
    mean,
    mean_square,
    next_sequence,
    stack_rows,
    stack_scalars,
)
from gradaudit.capture.recorder import Packet, Recorder, SampledTensors
from gradaudit.capture.registry import Registry, TensorEntry
from gradaudit.capture.settings import CaptureSettings, Sampler
from gradaudit.capture.statistic import tensor_row

_Method = TypeVar("_Method", bound=Callable[..., Any])

NUM_CALL_SITES = 3
"""The user's line is looked up for the first few calls of each kind only: it costs microseconds."""

NUM_SCALED_OUTPUTS = 256
"""Outputs of scaler.scale remembered by sequence number; a step makes one per loss and micro-step."""


@dataclass(slots=True)
class _Window:
    """What has been seen since the last step closed."""

    num_backward: int = 0
    losses: list[torch.Tensor] = field(default_factory=list)
    inputs: list[torch.Tensor] = field(default_factory=list)
    columns: list[tuple[int, bool, int, bool]] = field(default_factory=list)
    rows: list[torch.Tensor] = field(default_factory=list)
    gain_tensors: list[int] = field(default_factory=list)
    gains: list[torch.Tensor] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class _OpenStep:
    """A step whose gradients have been read and whose outcome is not known yet."""

    optimizer: int
    scaler: int | None
    scaled: bool
    scale: list[torch.Tensor]
    tracker: list[torch.Tensor]
    present: list[bool]
    amax: list[torch.Tensor]


def _guarded(method: _Method) -> _Method:
    """A failure inside gradaudit turns capture off, and the user's training goes on; the time spent is counted."""

    @wraps(method)
    def call(self: Auditor, *args: Any, **kwargs: Any) -> Any:
        if self.off:
            return None
        start, before = time.perf_counter(), self._cost_s
        try:
            return method(self, *args, **kwargs)
        except Exception as error:
            self.fail(error)
            return None
        finally:
            # nested calls have added their share already; the outer one's includes it
            self._cost_s = before + time.perf_counter() - start

    return call  # type: ignore[return-value]


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
        self._cost_s = self._cost_at_close_s = 0.0
        self._step = 0
        self._sampling = True
        self._window = _Window()
        self._shared_window = _Window()
        self._marks = Marks()
        self._depth = 0
        self._in_backward = 0
        self._owners: list[tuple[Name, str]] = []
        self._scaled_outputs: deque[int] = deque(maxlen=NUM_SCALED_OUTPUTS)
        self._gradients_scaled = False
        self._open: dict[int, _OpenStep] = {}
        self._stepping: set[int] = set()
        self._num_updates: dict[int, int] = {}
        self._autocasts: list[dict[str, Any]] = []
        self._errors: list[str] = []
        self._num_events = 0
        self._num_calls: dict[tuple[str, int | None], int] = {}

    def start(self, recorder: Recorder) -> None:
        """Begin to hand over rows."""
        self._recorder = recorder

    @_guarded
    def introduce(self, optimizer: Any, scaler: Any) -> None:
        """Note an optimizer and a scaler before their first use. Sync: none."""
        if scaler is not None:
            self._registry.scaler(scaler)
        if optimizer is not None:
            self._registry.optimizer(optimizer)

    def fail(self, error: Exception) -> None:
        """Switch capture off, say so once, and leave it in the run."""
        if not self.off:
            self.off = True
            text = f"{type(error).__name__}: {error}".rstrip(".")
            self._errors.append(f"capture stopped at step {self._step}: {text}")
            warnings.warn(
                f"gradaudit stopped recording at step {self._step} ({text}); training goes on unobserved.",
                RuntimeWarning,
                stacklevel=4,
            )

    # Forward

    @_guarded
    def on_forward_start(self, module: torch.nn.Module) -> None:
        """A module's forward begins. Sync: none."""
        if threading.get_ident() != self._thread:
            return
        self._depth += 1
        if not torch.is_grad_enabled():
            return
        if self._depth == 1 and not self._in_backward:
            self.names.add_root(module)
            self._owners.clear()
        if self._sampling:
            name = self.names.module(module)
            if name is None:
                self.names.refresh(module)
                name = self.names.module(module) or LOSS
            self._owners.append((name, type(module).__name__))
            self._marks.mark(next_sequence(), *self._owners[-1])

    @_guarded
    def on_forward_end(self, module: torch.nn.Module, inputs: Any, output: Any) -> None:
        """A module's forward is over, even when it raised. Sync: none."""
        if threading.get_ident() != self._thread:
            return
        self._depth = max(self._depth - 1, 0)
        if not torch.is_grad_enabled():
            return
        if self._depth == 0 and not self._in_backward:
            self._window.inputs += [largest(x) for x in floating_tensors(inputs)]
        if self._sampling and self._owners:
            owner = self._owners.pop()
            self._marks.mark(next_sequence(), *(self._owners[-1] if self._owners else (LOSS, "")))
            if not self._in_backward:
                self._note_outputs(owner, output)
                self._note_noise_gain(module, inputs)

    def _note_outputs(self, owner: tuple[Name, str], output: Any) -> None:
        name, module_class = owner
        for i, tensor in enumerate(floating_tensors(output)):
            if tensor.grad_fn is not None:
                self._marks.outputs.setdefault((tensor.grad_fn._sequence_nr(), tensor.output_nr), owner)
            if self._registry.wanted(name):
                entry = self._registry.tensor(("output", name, i), "output", name, module_class)
                self._add_row(entry, tensor, scaled=False, keep_histogram=False)

    def _note_noise_gain(self, module: torch.nn.Module, inputs: Any) -> None:
        weight, fan_in = layer_weight(module)
        x = next(iter(floating_tensors(inputs)), None)
        if weight is not None and x is not None and weight.requires_grad:
            self._window.gain_tensors.append(self._registry.param(weight).id)
            self._window.gains.append(mean_square(x) * fan_in)

    # Loss and backward

    @_guarded
    def on_scale(self, scaler: Any, outputs: Any, scaled: Any) -> None:
        """`scaler.scale` returned. Sync: none."""
        self._event("scaler.scale", scaler=scaler)
        if not scaler.is_enabled():
            return
        self._window.losses += [mean(loss) for loss in floating_tensors(outputs)]
        for tensor in floating_tensors(scaled):
            if tensor.grad_fn is not None:
                self._scaled_outputs.append(tensor.grad_fn._sequence_nr())

    @_guarded
    def on_backward_start(self, tensors: Any) -> Walk | None:
        """`backward` was called on these tensors. Sync: none."""
        roots = [tensor for tensor in floating_tensors(tensors) if tensor.grad_fn is not None]
        self._in_backward += 1
        if self._in_backward == 1:
            window = self._window
            scaled = any(descends_from(root.grad_fn, self._scaled_outputs) for root in roots)
            self._gradients_scaled = scaled or (self._gradients_scaled and window.num_backward > 0)
            window.num_backward += 1
            if not scaled:
                window.losses += [mean(root) for root in roots]
            self._event("backward", scaled=scaled)
        if not self._sampling:
            return None
        walk = hook_graph(roots, self._marks, self.names, self._on_gradient)
        for param, parents in walk.param_parents:
            self._registry.param(param).parent_keys = parents
        return walk

    @_guarded
    def on_backward_end(self, walk: Walk | None) -> None:
        """`backward` returned or raised. Sync: none."""
        self._in_backward = max(self._in_backward - 1, 0)
        if walk is not None:
            walk.remove()

    @_guarded
    def _on_gradient(self, place: GradientPlace, grad: torch.Tensor) -> None:
        if self._sampling and self._registry.wanted(place.name):
            entry = self._registry.tensor(
                place.key, place.kind, place.name, place.module, op=place.op, exact=place.exact
            )
            entry.parent_keys = entry.parent_keys or place.parents
            self._add_row(entry, grad, scaled=self._gradients_scaled, keep_histogram=True)

    # The optimizer boundary

    @_guarded
    def on_unscale(self, scaler: Any, optimizer: Any) -> None:
        """`scaler.unscale_` is about to divide the gradients. Sync: none."""
        if scaler.is_enabled():
            self._event("scaler.unscale_", optimizer=optimizer, scaler=scaler, scaled=True)
            if id(optimizer) not in self._open:
                self._open_step(optimizer, scaler)

    @_guarded
    def on_scaler_step_start(self, scaler: Any, optimizer: Any) -> None:
        """`scaler.step` was called. Sync: none."""
        if scaler.is_enabled():
            fresh = id(optimizer) not in self._open
            self._event("scaler.step", optimizer=optimizer, scaler=scaler, scaled=fresh)
            if fresh:
                self._open_step(optimizer, scaler)
            self._stepping.add(id(optimizer))

    @_guarded
    def on_scaler_step_end(self, scaler: Any, optimizer: Any) -> None:
        """`scaler.step` returned or raised. Sync: none."""
        self._stepping.discard(id(optimizer))
        if scaler.is_enabled() and id(optimizer) in self._open:
            self._close_step(optimizer, found=found_inf(scaler, optimizer))

    @_guarded
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

    @_guarded
    def on_load_state(self, scaler: Any) -> None:
        """`scaler.load_state_dict` returned. Sync: none."""
        self._event("scaler.load_state_dict", scaler=scaler)
        self._registry.mark_loaded(scaler)

    @_guarded
    def on_optimizer_start(self, optimizer: Any, *, has_closure: bool) -> None:
        """`optimizer.step` begins, called by the scaler or by the script. Sync: none."""
        if id(optimizer) in self._stepping:
            return
        self._event("optimizer.step", optimizer=optimizer, scaled=self._gradients_scaled)
        if not has_closure and id(optimizer) not in self._open:
            self._open_step(optimizer, None)

    @_guarded
    def on_optimizer_end(self, optimizer: Any) -> None:
        """`optimizer.step` returned. Sync: none."""
        if id(optimizer) in self._stepping:
            return
        if id(optimizer) not in self._open:
            self._open_step(optimizer, None)  # a closure computed the gradients inside the step
        self._close_step(optimizer, found=[])

    @_guarded
    def on_call(self, name: str, *, optimizer: Any = None, detail: str | None = None) -> None:
        """Any other call of the call-order log. Sync: none."""
        self._event(name, optimizer=optimizer, scaled=self._gradients_scaled, detail=detail)

    @_guarded
    def on_autocast(self, device: str, dtype: str, enabled: bool) -> None:
        """An autocast region was entered. Sync: none."""
        entry = {"device": device, "dtype": dtype, "enabled": enabled}
        if not any(entry.items() <= seen.items() for seen in self._autocasts):
            file, line = user_call_site()
            self._autocasts.append({**entry, "file": file, "line": line})

    @_guarded
    def close_open_steps(self) -> None:
        """End of recording: attempts that were never finished are kept as such. Sync: none."""
        for optimizer in self._registry.known_optimizers():
            if id(optimizer) in self._open:
                self._close_step(optimizer, found=[], given_up=True)

    def _open_step(self, optimizer: Any, scaler: Any) -> None:
        identity = self._registry.optimizer(optimizer)
        slots = self._registry.param_slots(optimizer)
        with_gradient = [(param, param.grad) for _, param in slots if param.grad is not None]
        scaled = True if scaler is not None else self._gradients_scaled
        self._open[id(optimizer)] = _OpenStep(
            optimizer=identity,
            scaler=None if scaler is None else self._registry.scaler(scaler),
            scaled=scaled,
            # copies, since update() changes both in place
            scale=_copy(scaler, "_scale"),
            tracker=_copy(scaler, "_growth_tracker"),
            present=[param.grad is not None for _, param in slots],
            amax=largest_each([grad for _, grad in with_gradient]),
        )
        if self._sampling:
            for param, grad in with_gradient:
                entry = self._registry.param(param)
                if self._registry.wanted(entry.name):
                    self._add_row(entry, grad, scaled=scaled, keep_histogram=True)

    def _close_step(self, optimizer: Any, *, found: list[torch.Tensor], given_up: bool = False) -> None:
        opened = self._open.pop(id(optimizer))
        window = self._window
        # a second optimizer stepping on the same backward shares what was seen of it
        seen = window if window.num_backward else self._shared_window
        groups = [opened.scale, opened.tracker, found, seen.losses, seen.inputs, opened.amax]
        step = {
            "step": self._step,
            "time_s": time.perf_counter() - self._started,
            "optimizer": opened.optimizer,
            "scaler": opened.scaler,
            "update": None if opened.scaler is None else self._num_updates.get(opened.scaler, 0),
            "num_micro_steps": seen.num_backward,
            "sampled": bool(window.rows),
            "scaled": opened.scaled,
            "present": opened.present,
            "params": self._registry.param_ids(opened.optimizer),
            "given_up": given_up,
        }
        sizes = [len(group) for group in groups]

        def finish(values: np.ndarray) -> dict[str, Any]:
            return step_row(step, sizes, values)

        assert self._recorder is not None
        if self._recorder.error is not None:
            raise self._recorder.error
        samples = None
        if window.rows:
            gains = stack_scalars(window.gains)
            samples = SampledTensors(window.columns, stack_rows(window.rows), window.gain_tensors, gains)
        self._recorder.put(Packet(stack_scalars([value for group in groups for value in group]), finish, samples))
        self._next_step(overflowed=known_on_host(found))

    def _next_step(self, *, overflowed: bool) -> None:
        now = time.perf_counter()
        self._sampler.measured(
            self._cost_s - self._cost_at_close_s, now - self._last_close, sampled=bool(self._window.rows)
        )
        self._last_close, self._cost_at_close_s = now, self._cost_s
        self._step += 1
        was_sampling = self._sampling
        self._sampling = self._sampler.next(self._step, self._registry.num_optimizers, overflowed=overflowed)
        if self._sampling and not was_sampling:
            self._marks = Marks()
        self._marks.trim()
        if self._window.num_backward:
            self._shared_window = _Window(self._window.num_backward, self._window.losses, self._window.inputs)
        self._window = _Window()

    def _add_row(self, entry: TensorEntry, tensor: torch.Tensor, *, scaled: bool, keep_histogram: bool) -> None:
        if entry.dtype is None:
            entry.shape, entry.dtype = tuple(tensor.shape), str(tensor.dtype).removeprefix("torch.")
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
        optimizer_id = None if optimizer is None else self._registry.optimizer(optimizer)
        times = self._num_calls.get((name, optimizer_id), 0)
        self._num_calls[(name, optimizer_id)] = times + 1
        file, line = user_call_site() if times < NUM_CALL_SITES else (None, None)
        event = {
            "seq": self._num_events,
            "step": self._step,
            "micro_step": self._window.num_backward,
            "name": name,
            "optimizer": optimizer_id,
            "scaler": None if scaler is None else self._registry.scaler(scaler),
            "scaled": scaled,
            "file": file,
            "line": line,
            "detail": detail,
        }
        self._num_events += 1
        if self._recorder is not None:
            self._recorder.put_event(event)

    def describe(self) -> dict[str, Any]:
        """run.json as of now; called in the writer thread."""
        return {
            **self._run,
            "heartbeat_at": time.time(),
            **self._registry.describe(),
            "autocast": list(self._autocasts),
            "errors": list(self._errors),
            "drops": {"sampled_steps": self._recorder.num_dropped if self._recorder is not None else 0},
            "cost": {
                "recording_s": round(self._cost_s, 3),
                "wall_s": round(time.perf_counter() - self._started, 3),
                "every": self._sampler.every,
            },
        }


def _copy(scaler: Any, name: str) -> list[torch.Tensor]:
    value = getattr(scaler, name, None)
    return [value.detach().clone()] if isinstance(value, torch.Tensor) else []


def step_row(step: dict[str, Any], sizes: Sequence[int], values: np.ndarray) -> dict[str, Any]:
    """A row of the step table from what the host knew at once and what arrived from the device.

    Args:
        step: Columns known on the host, and how to lay out the parameters.
        sizes: How many of `values` are scale, growth tracker, found_inf, losses, inputs and parameter magnitudes.
        values: Those, in that order.
    """
    scale, tracker, found, losses, inputs, amax = np.split(values, np.cumsum(sizes)[:-1])
    row = {key: value for key, value in step.items() if key not in ("present", "params", "given_up")}
    overflowed = bool((found > 0).any()) if len(found) else None
    amax_values: list[float | None] = [None] * len(step["present"])
    slots = [slot for slot, present in enumerate(step["present"]) if present]
    for slot, value in zip(slots, amax, strict=True):
        amax_values[slot] = float(value)
    return {
        **row,
        "scale": float(scale[0]) if len(scale) else 1.0,
        "growth_tracker": int(tracker[0]) if len(tracker) else None,
        "found_inf": overflowed,
        "skipped": step["given_up"] or bool(overflowed),
        "loss": float(losses.mean()) if len(losses) else None,
        "loss_finite": bool(np.isfinite(losses).all()) if len(losses) else None,
        "input_finite": bool(np.isfinite(inputs).all()) if len(inputs) else None,
        "param_amax": amax_values,
        "nonfinite": [step["params"][slot] for slot, v in zip(slots, amax, strict=True) if not np.isfinite(v)],
    }
