"""What a step is made of, from the first backward to the row in the step table."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import numpy as np
import torch

from gradaudit.capture.reading import stack_rows, stack_scalars
from gradaudit.capture.recorder import Packet, SampledTensors

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
    columns: list[tuple[int, bool, int, bool]] = field(default_factory=list)
    rows: list[torch.Tensor] = field(default_factory=list)
    gain_tensors: list[int] = field(default_factory=list)
    gains: list[torch.Tensor] = field(default_factory=list)

    @property
    def full(self) -> bool:
        """Whether nothing more is kept until the step closes."""
        return len(self.rows) + len(self.gains) + len(self.inputs) >= MAX_WINDOW_ROWS


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


def copy_of(scaler: Any, name: str) -> list[torch.Tensor]:
    """A scaler's device value as of now, none if it has none yet. Sync: none."""
    value = getattr(scaler, name, None)
    return [value.detach().clone()] if isinstance(value, torch.Tensor) else []


def make_packet(
    step: dict[str, Any], opened: OpenStep, seen: Window, window: Window, found: list[torch.Tensor]
) -> Packet:
    """What the recorder needs of a closed step.

    Args:
        step: Columns that the auditor keeps count of, the ids of the optimizer's parameters, and whether the script
            gave the step up.
        opened: What was read when the step opened.
        seen: The backward passes it belongs to; another step's window where two optimizers share them.
        window: What was sampled since the last step closed.
        found: The scaler's found_inf, one per device.

    Sync: none.
    """
    groups = [opened.scale, opened.tracker, found, seen.losses, seen.inputs, opened.amax]
    sizes = [len(group) for group in groups]
    step = {
        **step,
        "optimizer": opened.optimizer,
        "scaler": opened.scaler,
        "num_micro_steps": seen.num_backward,
        "sampled": bool(window.rows),
        "scaled": opened.scaled,
        "present": opened.present,
    }
    samples = None
    if window.rows:
        gains = stack_scalars(window.gains)
        samples = SampledTensors(window.columns, stack_rows(window.rows), window.gain_tensors, gains)
    scalars = stack_scalars([value for group in groups for value in group])
    return Packet(scalars, partial(step_row, step, sizes), samples)


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
