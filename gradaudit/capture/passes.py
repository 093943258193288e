"""The backward half of a step: what backward is called on, which gradients it hands over, whose it fills."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from gradaudit.capture.forward import Forward
from gradaudit.capture.graph import GradientPlace, Sink, Walk, hook_graph
from gradaudit.capture.names import Names
from gradaudit.capture.order.calls import CallLog, Moment, Row
from gradaudit.capture.order.gradwatch import GradWatch, State
from gradaudit.capture.order.losses import Losses
from gradaudit.capture.reading import floating_tensors
from gradaudit.capture.registry import Registry


@dataclass(frozen=True, slots=True)
class Backward:
    """A backward call under way: its event, unless it runs inside another, and what to compare with afterwards."""

    row: Row | None
    walk: Walk | None
    known: list[tuple[int, Any]]
    before: dict[int, State]


class Passes:
    """Follows backward calls; on sampled steps it takes every gradient.

    `gradients_scaled` says whether the gradients carry the scale, as far as the last backward tells.
    """

    def __init__(
        self,
        names: Names,
        registry: Registry,
        forward: Forward,
        losses: Losses,
        gradients: GradWatch,
        log: CallLog,
        now: Callable[[], Moment],
    ) -> None:
        self.gradients_scaled = False
        self._names = names
        self._registry = registry
        self._forward = forward
        self._losses = losses
        self._gradients = gradients
        self._log = log
        self._now = now

    def start(self, tensors: Any, sink: Sink) -> Backward:
        """`backward` was called on these tensors; `sink` gets the gradients. Sync: none."""
        row, known, before = None, [], {}
        self._forward.in_backward += 1
        if self._forward.in_backward == 1:
            self._forward.tracing.backward_begins()
            row = self._row(tensors)
            known = self._registry.optimizers()
            before = self._gradients.before_backward(known)
        walk = self._walk(tensors, sink) if self._forward.sampling else None
        return Backward(row, walk, known, before)

    def end(self, backward: Backward, error: BaseException | None) -> None:
        """It returned or raised. Sync: none."""
        if backward.row is None:
            return
        sampling = self._forward.sampling
        changed = self._gradients.after_backward(backward.known, backward.before, sampling=sampling)
        backward.row["optimizers"] = changed or ([] if self._registry.saw_all_made else None)
        self._log.end(backward.row, error)

    def resume_trace(self) -> None:
        """What comes now may be forward again. Sync: none."""
        if not self._forward.in_backward:
            self._forward.tracing.resume(self._forward.window.num_backward)

    def take(self, place: GradientPlace, grad: torch.Tensor) -> None:
        """A gradient that backward computed. Sync: none."""
        window = self._forward.window
        if not self._forward.sampling or window.full or not self._registry.wanted(place.name):
            return
        entry = self._registry.tensor(place.key, place.kind, place.name, place.module, op=place.op, exact=place.exact)
        entry.parent_keys = entry.parent_keys or place.parents
        if entry.file is None:
            entry.file, entry.line = self._forward.tracing.site(place.sequence)
        window.add_row(entry, grad, scaled=self.gradients_scaled, keep_histogram=True)

    def _row(self, tensors: Any) -> Row:
        window, roots = self._forward.window, self._losses.roots(tensors, search=self._forward.sampling)
        scaled = roots.scaler is not None
        self.gradients_scaled = scaled or (self.gradients_scaled and window.num_backward > 0)
        window.num_backward += 1
        window.losses += roots.losses
        window.scaled_losses += roots.scaled_losses
        now = self._now()
        if roots.penalty is not None:
            self._log.put(self._log.row("penalty", now, scaler=roots.scaler, detail={"unscaled": roots.penalty}))
        return self._log.row("backward", now, scaler=roots.scaler, scaled=scaled, detail=roots.detail)

    def _walk(self, tensors: Any, sink: Sink) -> Walk:
        roots = [tensor for tensor in floating_tensors(tensors) if tensor.grad_fn is not None]
        walk = hook_graph(roots, self._forward.marks, self._names, sink)
        self._forward.hidden.update(dict.fromkeys(walk.compiled, "compiled"))
        for param, parents in walk.param_parents:
            entry = self._registry.param(param)
            if entry is not None:
                entry.parent_keys = parents
        return walk
