"""What a step is made of, from the first backward to the row in the step table."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import numpy as np
import torch

from gradaudit.capture.names import Name
from gradaudit.capture.reading import largest_each, stack_rows, stack_scalars
from gradaudit.capture.recorder import Packet, SampledTensors
from gradaudit.capture.registry import Registry, TensorEntry, Tracked
from gradaudit.capture.statistic import tensor_row
from gradaudit.capture.trace.opnotes import OpNotes, TracedOps
from gradaudit.capture.weights import HalfWeight, Magnitudes, change_of, half_weights, weight_magnitudes

MAX_WINDOW_ROWS = 50_000
"""Histograms kept on the device for one step, 40 MB. Only a script that runs forward for long without ever stepping,
with gradients enabled, comes this far; what follows is not needed to describe one step."""


@dataclass(slots=True)
class Window:
    """What has been seen since the last step closed.

    `columns` and `rows` are the statistics, one (tensor id, scaled, order, keep the histogram) per row.
    """

    num_backward: int = 0
    losses: list[torch.Tensor] = field(default_factory=list)
    inputs: list[torch.Tensor] = field(default_factory=list)
    scaled_losses: list[torch.Tensor] = field(default_factory=list)
    columns: list[tuple[int, bool, int, bool]] = field(default_factory=list)
    rows: list[torch.Tensor] = field(default_factory=list)
    gain_tensors: list[int] = field(default_factory=list)
    gains: list[torch.Tensor] = field(default_factory=list)

    @property
    def full(self) -> bool:
        """Whether nothing more is kept until the step closes."""
        return len(self.rows) + len(self.gains) + len(self.inputs) >= MAX_WINDOW_ROWS

    def add_row(self, entry: TensorEntry, tensor: torch.Tensor, *, scaled: bool, keep_histogram: bool) -> None:
        """Take the statistic of a tensor. Sync: none."""
        if entry.dtype is None:
            entry.shape = () if tensor.is_nested else tuple(tensor.shape)
            entry.dtype = str(tensor.dtype).removeprefix("torch.")
        with torch.no_grad():
            self.rows.append(tensor_row(tensor))
        self.columns.append((entry.id, scaled, len(self.columns), keep_histogram))

    def add_updates(self, halves: list[HalfWeight]) -> None:
        """Take the statistic of what an update did to weights that are not FP32. Sync: none."""
        for half in halves:
            self.rows.append(change_of(half))
            self.columns.append((half.entry.id, False, len(self.columns), False))


@dataclass(frozen=True, slots=True)
class OpenStep:
    """A step whose gradients have been read and whose outcome is not known yet."""

    optimizer: int
    scaler: int | None
    scaled: bool
    scale: list[torch.Tensor]
    tracker: list[torch.Tensor]
    present: list[bool]
    amax: list[torch.Tensor]
    weights: Magnitudes | None = None
    halves: list[HalfWeight] = field(default_factory=list)


def joins_outer_step(
    registry: Registry, opened: dict[int, OpenStep], stepping: dict[int, bool], optimizer: Any
) -> bool:
    """Whether a step is a part of another's: of `scaler.step`, which is told of it, or of a wrapper's. Sync: none."""
    if stepping:
        stepping.update(dict.fromkeys(stepping, True))
        return True
    identity = registry.optimizer(optimizer)
    outer = [step for key, step in opened.items() if key != id(optimizer)]
    return any(step.optimizer == identity and step.scaler is None for step in outer)


def open_step(
    registry: Registry, window: Window, optimizer: Any, scaler: Any, *, scaled: bool, sampling: bool
) -> OpenStep:
    """Read an optimizer's gradients and, on a sampled step, its weights, as its step opens.

    Args:
        registry: Where its parameters have their names.
        window: What has been seen since the last step closed; gets the gradients' histograms.
        optimizer: Whose step.
        scaler: Who handles it, None if nobody does.
        scaled: Whether the gradients carry the scale.
        sampling: Whether the step is sampled.

    Sync: none.
    """
    slots = registry.param_slots(optimizer)
    with_gradient = [(entry, param.grad) for _, param, entry in slots if param.grad is not None]
    if sampling:
        for entry, grad in with_gradient:
            if registry.wanted(entry.name):
                window.add_row(entry, grad, scaled=scaled, keep_histogram=True)
    return OpenStep(
        optimizer=registry.optimizer(optimizer),
        scaler=None if scaler is None else registry.scaler(scaler),
        scaled=scaled,
        # copies, since update() changes both in place
        scale=copy_of(scaler, "_scale"),
        tracker=copy_of(scaler, "_growth_tracker"),
        present=[param.grad is not None for _, param, _ in slots],
        amax=largest_each([grad for _, grad in with_gradient]),
        weights=weight_magnitudes(slots) if sampling else None,
        halves=half_weights(optimizer, slots, registry) if sampling else [],
    )


def copy_of(scaler: Any, name: str) -> list[torch.Tensor]:
    """A scaler's device value as of now, none if it has none yet. Sync: none."""
    value = getattr(scaler, name, None)
    return [value.detach().clone()] if isinstance(value, torch.Tensor) else []


def make_packet(
    step: dict[str, Any],
    opened: OpenStep,
    seen: Window,
    window: Window,
    found: list[torch.Tensor],
    *,
    buffers: Magnitudes | None,
    identify: Callable[[Tracked], int],
    ops: TracedOps | None,
    armed: bool,
) -> Packet:
    """What the recorder needs of a closed step.

    Args:
        step: Columns that the auditor keeps count of, the ids of the optimizer's parameters, and whether the script
            gave the step up.
        opened: What was read when the step opened.
        seen: The backward passes it belongs to; another step's window where two optimizers share them.
        window: What was sampled since the last step closed.
        found: The scaler's found_inf, one per device.
        buffers: Those of the models, None where they were not looked at.
        identify: Gives the id of a tensor that turns out not to be finite.
        ops: What was noted of its operations.
        armed: Whether it was to be traced.

    Sync: none.
    """
    groups = [opened.scale, opened.tracker, found, seen.losses, seen.inputs, opened.amax, seen.scaled_losses]
    groups += [[] if look is None else look.now for look in (opened.weights, buffers)]
    groups.append([] if buffers is None else buffers.before)
    sizes = [len(group) for group in groups]
    step = {
        **step,
        "optimizer": opened.optimizer,
        "scaler": opened.scaler,
        "num_micro_steps": seen.num_backward,
        "sampled": bool(window.rows),
        "scaled": opened.scaled,
        "present": opened.present,
        "weights": None if opened.weights is None else opened.weights.tracked,
        "buffers": None if buffers is None else buffers.tracked,
        "identify": identify,
    }
    first = len(opened.scale) + len(opened.tracker)
    return Packet(
        step=step["step"],
        scaler=opened.scaler,
        scalars=stack_scalars([value for group in groups for value in group]),
        found=slice(first, first + len(found)),
        finish=partial(step_row, step, sizes),
        samples=_sampled(window),
        ops=ops,
        armed=armed,
    )


def unfinished(step: int, window: Window, ops: TracedOps | None) -> Packet:
    """What was seen of a step that never closed, because its forward raised.

    Sync: none.
    """
    row = {"step": step, "scale": 1.0}
    samples = _sampled(window)
    return Packet(step, None, [], slice(0), lambda values: row, samples, ops, armed=False, has_row=False)


def _sampled(window: Window) -> SampledTensors | None:
    if not window.rows:
        return None
    gains = stack_scalars(window.gains)
    return SampledTensors(window.columns, stack_rows(window.rows), window.gain_tensors, gains)


def traced_ops(notes: OpNotes | None, full_name: Callable[[Name], str]) -> TracedOps | None:
    """The notes of a step on their way to the recorder, None where nothing was noted. Sync: none."""
    if notes is None or not notes.rows:
        return None
    on_device = [note.values for note in notes.rows if isinstance(note.values, torch.Tensor)]
    return TracedOps(notes.rows, stack_rows(on_device), full_name)


def step_row(step: dict[str, Any], sizes: Sequence[int], values: np.ndarray) -> dict[str, Any]:
    """A row of the step table from what the host knew at once and what arrived from the device.

    Args:
        step: Columns known on the host, and how to lay out the parameters.
        sizes: How many of `values` are scale, growth tracker, found_inf, losses, inputs, parameter magnitudes, scaled
            losses, weights, buffers, and buffers at first sight.
        values: Those, in that order.
    """
    scale, tracker, found, losses, inputs, amax, scaled_losses, weights, buffers, first = np.split(
        values, np.cumsum(sizes)[:-1]
    )
    row = {key: value for key, value in step.items() if key not in _NOT_COLUMNS}
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
        "scaled_loss_finite": bool(np.isfinite(scaled_losses).all()) if len(scaled_losses) else None,
        "weights_nonfinite": _ids(step["weights"], ~np.isfinite(weights), step["identify"]),
        "buffers_nonfinite": _ids(step["buffers"], np.isfinite(first) & ~np.isfinite(buffers), step["identify"]),
    }


_NOT_COLUMNS = frozenset({"present", "params", "given_up", "weights", "buffers", "identify"})


def _ids(tracked: list[Tracked] | None, bad: np.ndarray, identify: Callable[[Tracked], int]) -> list[int] | None:
    if tracked is None:
        return None
    return [identify(tensor) for tensor, is_bad in zip(tracked, bad, strict=True) if is_bad]
