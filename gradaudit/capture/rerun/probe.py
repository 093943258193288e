"""One batch, run forward and backward at several loss scales; what the training holds stays as it was."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any, NoReturn

import torch
from torch.optim.optimizer import register_optimizer_step_pre_hook

from gradaudit.capture.reading import largest_each
from gradaudit.capture.rerun.state import random_state, set_random_state

COARSE = 2
"""Binades between the scales tried first; around the edge the one between them follows."""

HIGHEST_LOG2 = 24
"""An FP16 gradient that survives this scale has values below 2^-8 only, and no policy of torch's goes higher."""

LOWEST_LOG2 = -24
"""Below it the largest FP16 gradient would be flushed to zero: no scale is left to try."""

MAX_NAMES = 5
"""Non-finite parameters named for one scale: those nearest to the loss tell."""


@dataclass(frozen=True, slots=True)
class Pass:
    """One forward and, where it was finite, one backward at a scale.

    `first_nonfinite` are names of parameters in the order in which backward reached them; `amax` is the largest finite
    gradient magnitude, unscaled; `num_zero` counts gradients that are zero throughout.
    """

    scale: float
    loss: float
    loss_finite: bool
    gradients_finite: bool | None
    has_nan: bool
    first_nonfinite: tuple[str, ...]
    amax: float | None
    num_gradients: int
    num_zero: int

    @property
    def safe(self) -> bool:
        """Whether loss and gradients were finite."""
        return self.loss_finite and self.gradients_finite is True


@dataclass(frozen=True, slots=True)
class Gradients:
    """Largest magnitude of each gradient, inf or NaN where it holds one, and names of parameters where it does."""

    amax: tuple[float, ...]
    first_nonfinite: tuple[str, ...]


def try_scales(
    closure: Callable[[], torch.Tensor], params: Sequence[tuple[str, torch.Tensor]], scales: Sequence[float] | None
) -> tuple[Pass, ...]:
    """Run the batch at each scale, with the same random numbers; by default until it overflows.

    Args:
        closure: Runs the forward of one batch and returns its unscaled loss.
        params: Names and parameters whose gradients are looked at. Their gradients must be out of the way.
        scales: All of these are tried. None: powers of two, from 1 upwards to the first that overflows, downwards if 1
            does.

    Returns:
        The passes, by scale. Only one where the forward is not finite.

    Raises:
        RuntimeError: The closure stepped an optimizer or updated a scaler.
        ValueError: It returned something that is no loss.

    Sync: waits for the device at every scale.
    """
    state = random_state()

    def run(scale: float) -> Pass:
        set_random_state(state)
        return _run(closure, params, scale)

    with steps_forbidden():
        tried = {1.0: run(1.0)}
        if tried[1.0].loss_finite:
            if scales is not None:
                tried = {scale: tried[scale] if scale in tried else run(scale) for scale in scales}
            else:
                _search(tried, run)
    return tuple(tried[scale] for scale in sorted(tried))


def _search(tried: dict[float, Pass], run: Callable[[float], Pass]) -> None:
    up = tried[1.0].safe
    exponents = range(COARSE, HIGHEST_LOG2 + 1, COARSE) if up else range(-COARSE, LOWEST_LOG2 - 1, -COARSE)
    for exponent in exponents:
        scale = math.ldexp(1.0, exponent)
        tried[scale] = run(scale)
        if tried[scale].safe != up:
            middle = math.ldexp(1.0, exponent - 1 if up else exponent + 1)
            tried[middle] = run(middle)
            return


def _run(closure: Callable[[], torch.Tensor], params: Sequence[tuple[str, torch.Tensor]], scale: float) -> Pass:
    with torch.enable_grad():
        loss = closure()
        if not isinstance(loss, torch.Tensor) or not loss.requires_grad:
            what = "a tensor without a graph" if isinstance(loss, torch.Tensor) else f"a {type(loss).__name__}"
            raise ValueError(f"The closure returned {what}; return the unscaled loss, before any backward().")
        value = float(loss.detach().double().mean())
        finite = bool(torch.isfinite(loss.detach()).all())
        if not finite:
            return Pass(scale, value, False, None, False, (), None, 0, 0)
        gradients = backward(scaled_by(loss, scale), params)
    finite_amax = [amax for amax in gradients.amax if math.isfinite(amax)]
    return Pass(
        scale=scale,
        loss=value,
        loss_finite=True,
        gradients_finite=not gradients.first_nonfinite,
        has_nan=any(math.isnan(amax) for amax in gradients.amax),
        first_nonfinite=gradients.first_nonfinite,
        amax=max(finite_amax) / scale if finite_amax else None,
        num_gradients=len(gradients.amax),
        num_zero=sum(amax == 0 for amax in gradients.amax),
    )


def scaled_by(loss: torch.Tensor, scale: float) -> torch.Tensor:
    """As GradScaler.scale does it: a half loss without a dimension is promoted, one with a single element is not."""
    return loss * torch.full((), scale, dtype=torch.float32, device=loss.device)


def backward(root: torch.Tensor, params: Sequence[tuple[str, torch.Tensor]]) -> Gradients:
    """Run backward, look at the gradients and drop them. Sync: waits for the device."""
    order = _reached_by_backward(root)
    held = [(name, id(param), param.grad) for name, param in params if param.grad is not None]
    for _, param in params:
        param.grad = None
    largest = tuple(float(value) for value in largest_each([grad for _, _, grad in held]))
    reached = {leaf: place for place, leaf in enumerate(order)}
    # what a reentrant checkpoint hides from the graph comes last, nearest to the loss first
    bad = sorted(
        (reached.get(leaf, len(reached) + len(held) - i), name)
        for i, ((name, leaf, _), amax) in enumerate(zip(held, largest, strict=True))
        if not math.isfinite(amax)
    )
    return Gradients(largest, tuple(name for _, name in bad[:MAX_NAMES]))


def _reached_by_backward(root: torch.Tensor) -> list[int]:
    """Run backward; the ids of the leaves in the order in which it reached them."""
    order: list[int] = []
    handles: list[Any] = []
    nodes: list[Any] = [root.grad_fn]
    seen = set(nodes)
    for node in nodes:  # grows while it is walked
        leaf = getattr(node, "variable", None)
        if leaf is not None:
            handles.append(node.register_hook(partial(_note, order, id(leaf))))
        fresh = dict.fromkeys(parent for parent, _ in node.next_functions if parent is not None and parent not in seen)
        nodes += fresh
        seen.update(fresh)
    try:
        torch.autograd.backward(root)
    finally:
        for handle in handles:
            handle.remove()
    return order


def _note(order: list[int], leaf: int, *_: Any) -> None:
    order.append(leaf)


@contextmanager
def steps_forbidden() -> Iterator[None]:
    """Any step of an optimizer, and any step or update of a GradScaler, raises a RuntimeError.

    Raises:
        RuntimeError: There was one, also where the code inside caught the first error.
    """
    called: list[str] = []

    def refuse(name: str) -> NoReturn:
        called.append(name)
        raise RuntimeError(_refusal(name))

    with ExitStack() as undo:
        handle = register_optimizer_step_pre_hook(lambda *_: refuse("optimizer.step()"))
        undo.callback(handle.remove)
        base: Any = torch.amp.grad_scaler.GradScaler
        for cls in (base, *base.__subclasses__()):
            for name in ("step", "update"):
                if name in vars(cls):
                    undo.callback(setattr, cls, name, vars(cls)[name])
                    setattr(cls, name, lambda *_, name=f"scaler.{name}()", **__: refuse(name))
        yield
    if called:
        raise RuntimeError(_refusal(called[0]))


def _refusal(name: str) -> str:
    return f"The closure called {name}; it must only run the forward of one batch and return the unscaled loss."
