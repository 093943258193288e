"""The call-order log: who called what, in which order, and from which line of the user's.

`CallLog` makes the rows; `Calls` also receives the calls that neither open nor close a step: constructors, clipping,
zero_grad, schedulers, `autograd.grad`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from numbers import Real
from typing import Any, NamedTuple

import numpy as np
import torch

from gradaudit.capture.callsite import construction_site, user_call_site
from gradaudit.capture.guard import Owner, guarded, one_line
from gradaudit.capture.order.gradwatch import Change, GradWatch, owners
from gradaudit.capture.order.losses import Losses
from gradaudit.capture.reading import floating_tensors, largest_each, plain, stack_scalars
from gradaudit.capture.recorder import Pending, Recorder
from gradaudit.capture.registry import Registry

Row = dict[str, Any]


class Moment(NamedTuple):
    """How far the training is, and whether the gradients carry the scale; made for every event, so a tuple.

    `unscaled` are the optimizers whose step is open under a scaler: their gradients carry it no more.
    """

    step: int
    micro_step: int
    gradients_scaled: bool
    unscaled: Sequence[int]

    def is_scaled(self, optimizers: Sequence[int]) -> bool:
        """Whether gradients of these optimizers carry the scale; of any, where it is not known whose."""
        if not self.gradients_scaled:
            return False
        return any(optimizer not in self.unscaled for optimizer in optimizers) if optimizers else not self.unscaled


@dataclass(frozen=True, slots=True)
class Clip:
    """A call of a clip function under way; `before` are the magnitudes of gradients that still carry the scale."""

    row: Row
    params: list[torch.Tensor]
    known: list[tuple[int, Any]]
    total_norm: Any
    before: list[torch.Tensor] | None


class CallLog:
    """Numbers the rows and hands them over to the recorder."""

    def __init__(self) -> None:
        self.recorder: Recorder | None = None
        self.autocasts: list[dict[str, Any]] = []
        self._num_events = 0

    def row(self, name: str, now: Moment, *, site: tuple[str | None, int | None] | None = None, **columns: Any) -> Row:
        """A new row, with the user's line as of now unless another is given. Sync: none."""
        file, line = user_call_site() if site is None else site
        row = {
            "seq": self._num_events,
            "step": now.step,
            "micro_step": now.micro_step,
            "name": name,
            "optimizer": None,
            "scaler": None,
            "scaled": None,
            "optimizers": None,
            "file": file,
            "line": line,
            "raised": None,
            "detail": None,
            **columns,
        }
        self._num_events += 1
        return row

    def put(self, row: Row | Pending | None) -> None:
        """Hand a row over. Sync: none."""
        if self.recorder is not None and row is not None:
            self.recorder.put_event(row)

    def end(self, row: Row | None, error: BaseException | None) -> None:
        """The call returned or raised: its row is complete. Sync: none."""
        if row is not None:
            row["raised"] = None if error is None else one_line(error)
            self.put(row)

    def changed(self, change: Change | None, now: Moment, optimizer: int) -> None:
        """Somebody changed gradients unknown to the log. Sync: none."""
        if change is None:
            return
        scaled = now.is_scaled([optimizer])
        row = self.row("gradients.changed", now, site=change.site, optimizer=optimizer, scaled=scaled)

        def finish(values: np.ndarray) -> Row | None:
            detail = change.detail(values)
            return None if detail is None else {**row, "detail": detail}

        self.put(Pending(change.copies(), finish))

    def autocast(self, device: str, dtype: str, *, enabled: bool, requested: bool = False) -> None:
        """Note an autocast region the first time one like it is entered; `requested`: made, and turned off by torch."""
        entry = {"device": device, "dtype": dtype, "enabled": enabled} | ({"requested": True} if requested else {})
        if not any(entry.items() <= seen.items() for seen in self.autocasts):
            file, line = user_call_site()
            self.autocasts.append({**entry, "file": file, "line": line})


class Calls:
    """Receives the calls that neither open nor close a step.

    Args:
        owner: Whom a failure switches off, and who counts the time.
        registry: Who is who.
        losses: What is known of losses.
        gradients: Follows the gradients.
        log: Where rows are made.
        now: How far the training is.
    """

    def __init__(
        self,
        owner: Owner,
        registry: Registry,
        losses: Losses,
        gradients: GradWatch,
        log: CallLog,
        now: Callable[[], Moment],
    ) -> None:
        self._owner = owner
        self._log = log
        self._registry = registry
        self._losses = losses
        self._gradients = gradients
        self._now = now

    @property
    def off(self) -> bool:
        """Whether capture is off."""
        return self._owner.off

    @property
    def cost_s(self) -> float:
        """Time spent in capture."""
        return self._owner.cost_s

    @cost_s.setter
    def cost_s(self, value: float) -> None:
        self._owner.cost_s = value

    def fail(self, error: Exception) -> None:
        """Switch capture off."""
        self._owner.fail(error)

    @guarded
    def on_scaler_made(self, scaler: Any, *, requested: bool) -> None:
        """A GradScaler's constructor returned; `requested` is its argument `enabled`. Sync: none."""
        file, line = site = construction_site(scaler)
        identity = self._registry.made_scaler(scaler, requested, file, line)
        device = getattr(scaler, "_device", None)
        detail = {"requested": requested, "enabled": scaler.is_enabled(), "device": device}
        self._log.put(self._log.row("GradScaler", self._now(), site=site, scaler=identity, detail=detail))

    @guarded
    def on_autocast_refused(self, device: str, dtype: str) -> None:
        """An autocast region was asked for, and torch turned it off: no such device or dtype. Sync: none."""
        self._log.autocast(device, dtype, enabled=False, requested=True)

    @guarded
    def on_optimizer_made(self, optimizer: Any) -> None:
        """An optimizer's constructor returned. Sync: none."""
        file, line = site = construction_site(optimizer)
        identity = self._registry.made_optimizer(optimizer, file, line)
        detail = {"class": type(optimizer).__name__}
        self._log.put(self._log.row("optimizer", self._now(), site=site, optimizer=identity, detail=detail))

    @guarded
    def on_scaler_end(self, row: Row | None, error: BaseException | None) -> None:
        """A method of a scaler's returned or raised. Sync: none."""
        self._log.end(row, error)

    @guarded
    def on_get_scale(self, scaler: Any) -> None:
        """`scaler.get_scale` was called. Sync: none."""
        if scaler.is_enabled():
            self._log.put(self._log.row("scaler.get_scale", self._now(), scaler=self._registry.scaler(scaler)))

    @guarded
    def on_load_state(self, scaler: Any) -> None:
        """`scaler.load_state_dict` returned. Sync: none."""
        self._registry.mark_loaded(scaler)
        self._log.put(self._log.row("scaler.load_state_dict", self._now(), scaler=self._registry.scaler(scaler)))

    @guarded
    def on_optimizer_call(self, name: str, optimizer: Any) -> None:
        """`zero_grad`, or a step of a learning-rate schedule. Sync: none."""
        identity = None if optimizer is None else self._registry.optimizer(optimizer)
        if identity is not None and name == "optimizer.zero_grad":
            self._gradients.forget(identity)
        now = self._now()
        scaled = now.is_scaled([] if identity is None else [identity])
        self._log.put(self._log.row(name, now, optimizer=identity, scaled=scaled))

    @guarded
    def on_grad_start(self, outputs: Any, *, create_graph: bool) -> Row | None:
        """`autograd.grad` was called: the row of its event, for `on_grad_end`. Sync: none."""
        tensors = floating_tensors(outputs)
        if any(type(tensor) is not torch.Tensor for tensor in tensors):
            return None  # a compiler at work
        scaler = self._losses.scaler_of(tensors)
        detail = {"create_graph": create_graph}
        return self._log.row("autograd.grad", self._now(), scaler=scaler, scaled=scaler is not None, detail=detail)

    @guarded
    def on_grad_end(self, row: Row | None, results: Any, error: BaseException | None) -> None:
        """It returned or raised. Sync: none."""
        self._log.end(row, error)
        if row is not None and row["scaled"] and row["detail"]["create_graph"]:
            self._losses.gradients(results)

    @guarded
    def on_clip_start(self, name: str, parameters: Any, limit: Any, total_norm: Any) -> Clip:
        """A clip function of torch's was called, whose `parameters` can be gone through twice. Sync: none."""
        params = _tensors(parameters)
        known = self._registry.optimizers()
        passed = owners(known, params)
        known = [(identity, optimizer) for identity, optimizer in known if identity in passed]
        now = self._now()
        for identity, optimizer in known:
            scaled = now.is_scaled([identity])
            self._log.changed(self._gradients.changed(identity, optimizer, scaled=scaled), now, identity)
        scaled = now.is_scaled(passed)
        detail = {"limit": known_number(limit), "limit_is_tensor": isinstance(limit, torch.Tensor)}
        row = self._log.row(name, now, optimizers=passed or None, scaled=scaled, detail=detail)
        return Clip(row, params, known, total_norm, _magnitudes(params) if scaled else None)

    @guarded
    def on_clip_end(self, clip: Clip | None, result: Any, error: BaseException | None) -> None:
        """It returned or raised. Sync: none."""
        if clip is None:
            return
        self._gradients.known_change(clip.known)
        raised = None if error is None else one_line(error)
        norm = result if clip.total_norm is None else clip.total_norm
        norms = [norm.detach()] if type(norm) is torch.Tensor and norm.numel() == 1 else []
        after = None if clip.before is None or error is not None else _magnitudes(clip.params)
        row = {**clip.row, "raised": raised}
        if clip.before is None and all(value.device.type == "cpu" for value in norms):
            self._log.put(_clip_row(row, [float(value) for value in norms]))
            return
        groups = [norms, clip.before, after]
        finish = partial(_split_clip_row, row, [None if group is None else len(group) for group in groups])
        self._log.put(Pending(stack_scalars([value for group in groups if group for value in group]), finish))


def _clip_row(
    row: Row, norm: Sequence[float] | np.ndarray, before: bool | None = None, after: bool | None = None
) -> Row:
    said = {"norm": plain(float(norm[0])) if len(norm) else None, "nonfinite_before": before, "nonfinite_after": after}
    return {**row, "detail": {**row["detail"], **said}}


def _split_clip_row(row: Row, sizes: Sequence[int | None], values: np.ndarray) -> Row:
    """The row of a clip once the returned norm, and magnitudes before and after where they were taken, are here."""
    norm, *magnitudes = np.split(values, np.cumsum([size or 0 for size in sizes])[:-1])
    nonfinite = [
        None if size is None else not bool(np.isfinite(found).all())
        for size, found in zip(sizes[1:], magnitudes, strict=True)
    ]
    return _clip_row(row, norm, *nonfinite)


def _tensors(parameters: Any) -> list[torch.Tensor]:
    """What was passed to a clip function, as far as it can be: torch has its own words for what cannot."""
    if isinstance(parameters, torch.Tensor):
        return [parameters]
    is_iterable = isinstance(parameters, (list, tuple, Iterable))
    return [param for param in parameters if isinstance(param, torch.Tensor)] if is_iterable else []


def _magnitudes(params: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    return largest_each([param.grad for param in params if param.grad is not None])


def known_number(value: Any) -> float | str | None:
    """A number or a tensor of one element, None where a device holds it. Sync: none."""
    if isinstance(value, torch.Tensor):
        return plain(float(value)) if value.device.type == "cpu" and value.numel() == 1 else None
    return plain(float(value)) if isinstance(value, (float, int, Real)) else None
