"""Who changed gradients between the last backward and the step: torch counts a tensor's versions, and so tells.

After each backward the gradients of every known optimizer are noted by identity and version, plain numbers both. What
differs when the step opens was changed by somebody: known functions say so themselves, anything else shows here. How
much was changed takes two readings of the gradients, so that is measured on sampled steps, and on some steps after a
first change was seen. The line is looked for once.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from itertools import chain
from operator import attrgetter, itemgetter
from typing import Any

import numpy as np
import torch

from gradaudit.capture.host_copy import HostCopy
from gradaudit.capture.order.linewatch import LineWatch
from gradaudit.capture.reading import largest_each, norm_each, plain, stack_scalars

NUM_MEASURED = 20
"""Steps that are measured after the first change was seen: enough to tell a fixed limit from a fixed factor."""

MAX_LINE_SEARCHES = 3
"""Steps on which the line is looked for; a change that comes from nowhere the first times stays without one."""

_GRAD, _VERSION, _PARAMS = attrgetter("grad"), attrgetter("_version"), itemgetter("params")
_NOTHING = id(None)

Known = Sequence[tuple[int, Any]]
"""Optimizers by their identity in the run."""


@dataclass(frozen=True, slots=True)
class State:
    """Identity and version of each gradient of an optimizer; the version is -1 where there is no gradient."""

    ids: list[int]
    versions: list[int]


@dataclass(frozen=True, slots=True)
class Reading:
    """Largest magnitude and 2-norm of each gradient, on its device; `slots` are the parameters that have one."""

    slots: list[int]
    amax: list[torch.Tensor]
    norms: list[torch.Tensor]

    @property
    def on_host(self) -> bool:
        """Whether the host knows the magnitudes already."""
        return all(value.device.type == "cpu" for value in self.amax)


@dataclass(frozen=True, slots=True)
class Change:
    """Gradients that somebody changed.

    `kind` is "in-place" or "replaced", None where only a reading of them can tell whether they changed at all.
    """

    kind: str | None
    before: Reading | None = None
    after: Reading | None = None
    site: tuple[str | None, int | None] = (None, None)

    def copies(self) -> list[HostCopy]:
        """Both readings on their way to the host. Sync: none."""
        readings = [self.before, self.after] if self.before is not None and self.after is not None else []
        return stack_scalars([value for r in readings if r is not None for value in (*r.amax, *r.norms)])

    def detail(self, values: np.ndarray) -> dict[str, Any] | None:
        """What the log says of it, None if nothing had changed.

        Args:
            values: Those of `copies`.
        """
        if self.before is None or self.after is None:
            return {"kind": self.kind} | dict.fromkeys(_NUMBERS)
        n, m = len(self.before.slots), len(self.after.slots)
        amax_before, norm_before, amax_after, norm_after = np.split(values, np.cumsum([n, n, m]))
        same = self.before.slots == self.after.slots and np.array_equal(amax_before, amax_after, equal_nan=True)
        if self.kind is None and same:
            return None
        position = {slot: i for i, slot in enumerate(self.after.slots)}
        pairs = [(amax_before[i], amax_after[position[s]]) for i, s in enumerate(self.before.slots) if s in position]
        factors = [after / before for before, after in pairs if 0 < before < math.inf and math.isfinite(after)]
        return {
            "kind": self.kind or "in-place",
            "factor_min": plain(min(factors)) if factors else None,
            "factor_max": plain(max(factors)) if factors else None,
            "norm_before": plain(float(np.linalg.norm(norm_before))),
            "norm_after": plain(float(np.linalg.norm(norm_after))),
            "amax_before": plain(_largest(amax_before)),
            "amax_after": plain(_largest(amax_after)),
            "nonfinite_before": not bool(np.isfinite(amax_before).all()),
            "nonfinite_after": not bool(np.isfinite(amax_after).all()),
        }


_NUMBERS = (
    "factor_min",
    "factor_max",
    "norm_before",
    "norm_after",
    "amax_before",
    "amax_after",
    "nonfinite_before",
    "nonfinite_after",
)


def _largest(amax: np.ndarray) -> float:
    finite = amax[np.isfinite(amax)]
    return float(finite.max()) if len(finite) else 0.0


@dataclass(slots=True)
class _Seen:
    """One optimizer's gradients as of the last known call that changed them; `searched` counts line searches."""

    state: State
    reading: Reading | None = None


@dataclass(slots=True)
class _Suspicion:
    """What is done about an optimizer whose gradients were seen changed: steps left to measure, the line if known.

    `by_value`: no version shows the change (it went through `.data`), only what the host can read does.
    """

    num_left: int = NUM_MEASURED
    num_searches: int = 0
    by_value: bool = False
    site: tuple[str | None, int | None] = (None, None)


@dataclass(slots=True)
class GradWatch:
    """Follows the gradients of the optimizers it is told of."""

    _seen: dict[int, _Seen] = field(default_factory=dict)
    _suspicions: dict[int, _Suspicion] = field(default_factory=dict)
    _lines: LineWatch | None = None

    def before_backward(self, known: Known) -> dict[int, State]:
        """Gradients as they are when backward is called. Sync: none."""
        self.stop_looking()
        return {identity: state_of(optimizer) for identity, optimizer in known}

    def after_backward(self, known: Known, before: dict[int, State], *, sampling: bool) -> list[int]:
        """Backward returned: the optimizers whose gradients it changed. Sync: none."""
        changed = []
        for identity, optimizer in known:
            state = state_of(optimizer)
            seen = self._seen.get(identity)
            if state != before.get(identity):
                changed.append(identity)
                seen = None
            reading = seen.reading if seen is not None and seen.state == state else None
            if reading is None and identity in changed and (sampling or self._is_measured(identity)):
                reading = read(optimizer)
            self._seen[identity] = _Seen(state, reading)
        self._look_for_lines(known)
        return changed

    def known_change(self, known: Known) -> None:
        """A call that is in the log has changed gradients: what is there now is taken as given. Sync: none."""
        for identity, optimizer in known:
            seen = self._seen.get(identity)
            if seen is not None:
                self._seen[identity] = _Seen(state_of(optimizer), None if seen.reading is None else read(optimizer))

    def forget(self, identity: int) -> None:
        """The gradients of an optimizer are gone, or used. Sync: none."""
        self._seen.pop(identity, None)

    def step_opens(self, identity: int, optimizer: Any, *, scaled: bool) -> Change | None:
        """The gradients are about to be used: whether somebody changed them unknown to the log. Sync: none."""
        found = self.changed(identity, optimizer, scaled=scaled)
        self.stop_looking()
        self.forget(identity)
        return found

    def changed(self, identity: int, optimizer: Any, *, scaled: bool) -> Change | None:
        """Whether somebody changed gradients since the last known call. Sync: none."""
        seen = self._seen.get(identity)
        if seen is None:
            return None
        kind = kind_of_change(seen.state, state_of(optimizer))
        after = read(optimizer) if seen.reading is not None else None
        change = Change(kind, seen.reading, after)
        if kind is None:
            if seen.reading is None or after is None or not _may_differ(seen.reading, after):
                return None
            if not after.on_host:
                return change
        if scaled:
            suspicion = self._suspicions.setdefault(identity, _Suspicion())
            suspicion.num_left -= 1
            suspicion.by_value |= kind is None
            if self._lines is not None and self._lines.found is not None:
                suspicion.site = self._lines.found
            change = Change(kind, seen.reading, after, suspicion.site)
        return change

    def stop_looking(self) -> None:
        """The user's lines are no longer followed."""
        if self._lines is not None:
            self._lines.stop()
            self._lines = None

    def _is_measured(self, identity: int) -> bool:
        suspicion = self._suspicions.get(identity)
        return suspicion is not None and suspicion.num_left > 0

    def _look_for_lines(self, known: Known) -> None:
        due, by_value = [], False
        for identity, optimizer in known:
            suspicion = self._suspicions.get(identity)
            if suspicion is not None and suspicion.site[0] is None and suspicion.num_searches < MAX_LINE_SEARCHES:
                suspicion.num_searches += 1
                due.append(optimizer)
                by_value |= suspicion.by_value
        if due:
            self._lines = LineWatch(_fingerprint(due, by_value=by_value))
            self._lines.start()


def _fingerprint(optimizers: Sequence[Any], *, by_value: bool) -> Callable[[], object]:
    if by_value:  # only ever where the host had read them before
        return lambda: [(state_of(optimizer), _on_host(read(optimizer))) for optimizer in optimizers]
    return lambda: [state_of(optimizer) for optimizer in optimizers]


def _on_host(reading: Reading) -> list[float]:
    return [float(value) for value in reading.amax] if reading.on_host else []


def _may_differ(before: Reading, after: Reading) -> bool:
    """Whether two readings differ, as far as the host knows. Sync: none."""
    if before.slots != after.slots or not before.on_host or not after.on_host:
        return True
    pairs = zip(before.amax, after.amax, strict=True)
    return any(float(a) != float(b) and not (math.isnan(a) and math.isnan(b)) for a, b in pairs)


def state_of(optimizer: Any) -> State:
    """Identity and version of an optimizer's gradients. Sync: none."""
    grads = list(map(_GRAD, chain.from_iterable(map(_PARAMS, optimizer.param_groups))))
    ids = list(map(id, grads))
    if ids.count(_NOTHING) == len(ids):
        return State(ids, [-1] * len(ids))
    return State(ids, [_version(grad) for grad in grads] if _NOTHING in ids else _versions(grads))


def _versions(grads: list[torch.Tensor]) -> list[int]:
    try:
        return list(map(_VERSION, grads))
    except RuntimeError:  # made in inference mode, where nothing is counted
        return [_version(grad) for grad in grads]


def _version(grad: torch.Tensor | None) -> int:
    return -1 if grad is None or grad.is_inference() else int(grad._version)


def kind_of_change(before: State, after: State) -> str | None:
    """How gradients were changed, None if they were not, or only taken away. Sync: none."""
    if before == after:
        return None
    pairs = list(zip(before.ids, after.ids, before.versions, after.versions, strict=False))
    if any(was != now and now != _NOTHING for was, now, _, _ in pairs):
        return "replaced"
    in_place = any(was == now and version != newer for was, now, version, newer in pairs)
    return "in-place" if in_place else None


def read(optimizer: Any) -> Reading:
    """Largest magnitude and 2-norm of an optimizer's gradients. Sync: none."""
    grads = list(map(_GRAD, chain.from_iterable(map(_PARAMS, optimizer.param_groups))))
    present = [(slot, grad) for slot, grad in enumerate(grads) if grad is not None]
    values = [grad for _, grad in present]
    return Reading([slot for slot, _ in present], largest_each(values), norm_each(values))


def owners(known: Known, params: Iterable[torch.Tensor]) -> list[int]:
    """The optimizers that some parameters belong to. Sync: none."""
    passed = set(map(id, params))
    return [
        identity
        for identity, optimizer in known
        if not passed.isdisjoint(map(id, chain.from_iterable(map(_PARAMS, optimizer.param_groups))))
    ]
