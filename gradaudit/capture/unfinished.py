"""What the model gave on a step that never closed: a script that stops at its first NaN leaves nothing else."""

from __future__ import annotations

from collections import deque
from typing import Any

import numpy as np
import torch

from gradaudit.capture.names import Name, Names
from gradaudit.capture.order.calls import CallLog, Moment, Row
from gradaudit.capture.reading import floating_tensors, largest, stack_scalars
from gradaudit.capture.recorder import Pending
from gradaudit.capture.steps import Window

LARGEST_KEPT = 1 << 20
"""Elements of an output that is kept until its step closes: a few megabytes are not missed."""

MAX_KEPT = 8
"""Outermost modules whose last outputs are kept; micro-steps share a step."""


class Unfinished:
    """Holds the last outputs of the outermost modules, without their history, until their step closes."""

    def __init__(self, names: Names) -> None:
        self._names = names
        self._outputs: deque[tuple[Name, torch.Tensor]] = deque(maxlen=MAX_KEPT)

    def keep(self, name: Name, output: Any) -> None:
        """An outermost module gave this. Sync: none."""
        tensors = [x for x in floating_tensors(output) if x.requires_grad and x.numel() <= LARGEST_KEPT]
        self._outputs.extend((name, tensor.detach()) for tensor in tensors)

    def clear(self) -> None:
        """The step closed. Sync: none."""
        self._outputs.clear()

    def event(self, window: Window, log: CallLog, now: Moment) -> Pending | None:
        """The row of the call-order log that tells of a step under way as recording ends. Sync: none."""
        if not self._outputs:
            return None
        modules = [self._names.full(name) for name, _ in self._outputs]
        groups = [window.inputs, [largest(tensor) for _, tensor in self._outputs], window.losses]
        ends = np.cumsum([len(group) for group in groups])[:-1]
        row = log.row("step.unfinished", now, site=(None, None))

        def finish(values: np.ndarray) -> Row | None:
            inputs, outputs, losses = np.split(values, ends)
            bad = [name for name, value in zip(modules, outputs, strict=True) if not np.isfinite(value)]
            detail = {
                "module": (bad or modules[-1:])[0],
                "inputs_finite": _all_finite(inputs),
                "outputs_finite": not bad,
                "outputs_nan": bool(np.isnan(outputs).any()),
                "losses_finite": _all_finite(losses),
            }
            return {**row, "detail": detail}

        return Pending(stack_scalars([value for group in groups for value in group]), finish)


def _all_finite(values: np.ndarray) -> bool | None:
    return bool(np.isfinite(values).all()) if len(values) else None
