"""What backward is called on: which scaler a loss went through, if any, or by which number it was multiplied by hand.

Also whether gradients that `autograd.grad` took of a scaled loss went into a further loss. Nodes are recognised by
number and name, so that no graph is kept alive.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from gradaudit.capture.graph import VIEW_OPS
from gradaudit.capture.reading import floating_tensors, largest, mean, plain

NUM_SCALED_OUTPUTS = 256
"""Outputs of scaler.scale remembered by sequence number; a step makes one per loss and micro-step."""

MAX_NODES = 64
"""Nodes searched for outputs of scaler.scale: a sum of losses is that deep, what lies below is the model."""

MAX_FACTORS = 4
"""Nodes searched for a factor put on by hand: the multiplication, a division by the micro-steps, a cast or two."""

MAX_PENALTY_NODES = 5_000
"""Nodes searched for gradients in a further loss: the double backward of a small network."""

_PASSED_ON = frozenset({"ToCopy", "Clone", "Contiguous", *VIEW_OPS})
"""Their result is the same value, so its consumer is the consumer of what they were given."""

NodeId = tuple[int, str]


@dataclass(frozen=True, slots=True)
class ScaledLoss:
    """An output of scaler.scale: the mean of the loss before it, and, if it is FP16, its largest magnitude after."""

    scaler: int
    loss: torch.Tensor
    largest: torch.Tensor | None


@dataclass(slots=True)
class Roots:
    """The tensors that one backward is called on.

    `scaler` is the scaler they went through, None if they went through none. `losses` are the means of the unscaled
    losses. `detail` and `penalty` are what the log says of it; `penalty` is whether gradients of a scaled loss that
    they depend on were unscaled, None where they depend on none.
    """

    scaler: int | None = None
    losses: list[torch.Tensor] = field(default_factory=list)
    scaled_losses: list[torch.Tensor] = field(default_factory=list)
    detail: dict[str, Any] | None = None
    penalty: bool | None = None


class Losses:
    """Remembers outputs of scaler.scale and results of autograd.grad by the numbers of their autograd nodes."""

    def __init__(self) -> None:
        self._scaled: dict[int, ScaledLoss] = {}
        self._gradients: set[NodeId] = set()

    def scaled(self, scaler: int, outputs: Any, scaled: Any) -> None:
        """`scaler.scale(outputs)` returned `scaled`. Sync: none."""
        for loss, tensor in zip(floating_tensors(outputs), floating_tensors(scaled), strict=True):
            if tensor.grad_fn is not None:
                reading = largest(tensor) if tensor.dtype is torch.float16 else None
                self._scaled[tensor.grad_fn._sequence_nr()] = ScaledLoss(scaler, mean(loss), reading)
        while len(self._scaled) > NUM_SCALED_OUTPUTS:
            del self._scaled[next(iter(self._scaled))]

    def scaler_of(self, outputs: Any) -> int | None:
        """The scaler whose output these descend from. Sync: none."""
        found = self._behind([tensor.grad_fn for tensor in floating_tensors(outputs)])
        return found[0].scaler if found else None

    def gradients(self, results: Any) -> None:
        """`autograd.grad` of a scaled loss returned gradients that can be differentiated. Sync: none."""
        made = [tensor.grad_fn for tensor in floating_tensors(results) if tensor.grad_fn is not None]
        self._gradients.update(_identity(node) for node in made)

    def step_closed(self) -> None:
        """What was taken of a scaled loss belongs to the past."""
        self._gradients.clear()

    def roots(self, tensors: Any, *, search: bool) -> Roots:
        """What backward is called on; `search` for gradients in it, which takes time. Sync: none."""
        roots = floating_tensors(tensors)
        nodes = [root.grad_fn for root in roots if root.grad_fn is not None]
        found = self._behind(nodes)
        if not found:
            losses = [mean(root) for root in roots if root.grad_fn is not None]
            return Roots(losses=losses, detail=_detail(roots, nodes))
        penalty = _use_of(self._gradients, nodes) if search and self._gradients else None
        scaled_losses = [entry.largest for entry in found if entry.largest is not None]
        return Roots(found[0].scaler, [entry.loss for entry in found], scaled_losses, penalty=penalty)

    def _behind(self, nodes: Sequence[Any]) -> list[ScaledLoss]:
        return [self._scaled[number] for number in descends_from(nodes, self._scaled)]


def descends_from(roots: Sequence[Any], sequences: Collection[int]) -> list[int]:
    """Which of the numbered nodes the roots are, or come from within a few operations of their sum."""
    found: list[int] = []
    nodes = list(roots) if sequences else []
    seen = set(nodes)
    for node in nodes:  # grows while it is walked
        number = getattr(node, "_sequence_nr", None)
        if callable(number) and number() in sequences:
            found.append(number())
            continue
        producers = dict.fromkeys(producer for producer, _ in getattr(node, "next_functions", ()))
        fresh = [producer for producer in producers if producer not in seen]
        nodes += fresh[: max(MAX_NODES - len(nodes), 0)]
        seen.update(fresh)
    return found


def _detail(roots: Sequence[torch.Tensor], nodes: Sequence[Any]) -> dict[str, Any] | None:
    if len(nodes) < len(roots):
        return {"no_grad_fn": True}
    factors = [factor for node in nodes if (factor := hand_factor(node)) is not None]
    return {"factor": plain(factors[0])} if factors else None


def hand_factor(node: Any) -> float | None:
    """The largest number on the host by which a loss was multiplied last; None if there is none. Sync: none."""
    factors = []
    for _ in range(MAX_FACTORS):
        op = _op(node)
        producers = [producer for producer, _ in node.next_functions if producer is not None]
        if len(producers) != 1 or (op not in ("Mul", "Div", "Neg") and op not in _PASSED_ON):
            break
        other = _other(node) if op == "Mul" else None
        if other is not None and type(other) is torch.Tensor and other.device.type == "cpu" and other.numel() == 1:
            factors.append(float(other))
        node = producers[0]
    return max(factors, key=abs, default=None)


def _use_of(gradients: Collection[NodeId], roots: Sequence[Any]) -> bool | None:
    """Whether everything that uses one of these nodes only multiplies or divides it by a number; None: nothing does."""
    stack, seen = list(roots), set(roots)
    uses: list[bool] = []
    while stack:
        node = stack.pop()
        is_passed_on = _op(node) in _PASSED_ON
        for producer, _ in node.next_functions:
            if producer is None:
                continue
            if _identity(_origin(producer, gradients)) in gradients:
                uses += [] if is_passed_on else [_is_scaling(node)]
            elif producer not in seen and len(seen) < MAX_PENALTY_NODES:
                seen.add(producer)
                stack.append(producer)
    return all(uses) if uses else None


def _origin(node: Any, gradients: Collection[NodeId]) -> Any:
    """The node whose value this one passes on, or one of the gradients on the way there."""
    while _identity(node) not in gradients and _op(node) in _PASSED_ON and node.next_functions:
        producer = node.next_functions[0][0]
        if producer is None:
            break
        node = producer
    return node


def _is_scaling(node: Any) -> bool:
    producers = [producer for producer, _ in node.next_functions if producer is not None]
    other = _other(node) if _op(node) in ("Mul", "Div") and len(producers) == 1 else None
    return other is not None and other.numel() == 1


def _other(node: Any) -> torch.Tensor | None:
    """The operand that needs no gradient, without running the user's hooks on saved tensors."""
    for name in ("_raw_saved_other", "_raw_saved_self"):
        try:
            value: torch.Tensor | None = getattr(getattr(node, name, None), "data", None)
        except RuntimeError:  # freed by an earlier backward
            return None
        if value is not None:
            return value
    return None


def _op(node: Any) -> str:
    return str(node.name()).removeprefix("torch::autograd::").rstrip("0123456789").removesuffix("Backward")


def _identity(node: Any) -> NodeId:
    """Nodes of one backward are numbered by the thread that ran it: the name tells most of those apart."""
    number = getattr(node, "_sequence_nr", None)
    return (number() if callable(number) else -1, str(node.name()))
