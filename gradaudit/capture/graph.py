"""One backward pass seen through its autograd nodes.

At a sampled step the graph is walked from the loss and every node that makes a new gradient gets a hook, which hands
over the gradients of functional code between modules as well, with the edges and so the paths along which rounding
noise travels. A gradient is named by the module whose code made the node, the operation and its count there, so that
the same place has the same name at every step.

Where one tensor is used several times its gradient is a sum; the addends are recorded too, since their energies say how
much each path brings.
"""

from __future__ import annotations

import heapq
import itertools
import math
from bisect import bisect_right
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch

from gradaudit.capture.names import LOSS, Name, Names

VIEW_OPS = frozenset(
    [
        "View",
        "UnsafeView",
        "ReshapeAlias",
        "T",
        "Transpose",
        "Permute",
        "Alias",
        "Squeeze",
        "Unsqueeze",
        "Detach",
        "Contiguous",
        "Swapaxes",
        "Movedim",
    ]
)
"""Their backward hands the same values on: what they receive and what they give is one gradient."""

COPY_OPS = VIEW_OPS | frozenset(
    [
        "Relu",
        "Threshold",
        "Hardtanh",
        "Cat",
        "Stack",
        "Slice",
        "Select",
        "Split",
        "SplitWithSizes",
        "Unbind",
        "Clone",
        "MaskedFill",
        "Where",
        "Neg",
        "ConstantPadNd",
        "Flip",
        "Roll",
        "Triu",
        "Tril",
        "Add",
        "Sub",
        "Expand",
        "Sum",
    ]
)
"""Their backward copies values or writes zeros, and rounds nothing, unless it also sums over a broadcast dimension."""

CAST_OPS = frozenset({"ToCopy"})

COMPILED_OP = "CompiledFunction"
"""What torch.compile makes of everything it compiled together."""

MAX_MARKS = 100_000
"""Some ten forwards of a model with 5,000 module calls."""

Key = tuple[Any, ...]


@dataclass(slots=True)
class Marks:
    """Which module's code was running from which autograd sequence number on, in one accumulation window."""

    starts: list[int] = field(default_factory=list)
    owners: list[Name] = field(default_factory=list)
    classes: list[str] = field(default_factory=list)
    outputs: dict[tuple[int, int], tuple[Name, str]] = field(default_factory=dict)

    def mark(self, sequence: int, owner: Name, module_class: str) -> None:
        """From this sequence number on, nodes belong to `owner`."""
        self.starts.append(sequence)
        self.owners.append(owner)
        self.classes.append(module_class)

    def trim(self) -> None:
        """Forget the older half when every step is sampled and the list would grow with the run."""
        if len(self.starts) > MAX_MARKS:
            half = len(self.starts) // 2
            first = self.starts[half]
            del self.starts[:half], self.owners[:half], self.classes[:half]
            self.outputs = {place: owner for place, owner in self.outputs.items() if place[0] >= first}

    def owner(self, sequence: int) -> tuple[Name, str]:
        """Whose code made the node with this sequence number."""
        i = bisect_right(self.starts, sequence) - 1
        return (self.owners[i], self.classes[i]) if i >= 0 else (LOSS, "")


@dataclass(slots=True)
class GradientPlace:
    """A gradient tensor to be recorded: what run.json's tensors table says of it.

    `sequence` is the number of the node whose operation made the tensor in the forward or, for an addend of a
    gradient, used it.
    """

    key: Key
    kind: str
    name: Name
    module: str
    op: str
    parents: tuple[Key, ...]
    exact: bool
    sequence: int


@dataclass(slots=True)
class _Node:
    node: Any
    op: str
    sequence: int
    num_consumers: int = 0  # that have not been ordered yet
    incoming: dict[int, list[tuple[_Node, int]]] = field(default_factory=dict)
    sources: dict[int, tuple[Key, ...]] = field(default_factory=dict)
    slots: list[tuple[int, GradientPlace]] = field(default_factory=list)
    edges: list[tuple[int, GradientPlace]] = field(default_factory=list)
    handed_on: bool | None = None  # not recorded here but further on; whether it is an exact copy

    @property
    def resolved(self) -> tuple[Key, ...]:
        """The recorded gradients that this node's backward computes from."""
        return tuple(dict.fromkeys(key for keys in self.sources.values() for key in keys))


Sink = Callable[[GradientPlace, torch.Tensor], None]


@dataclass(slots=True)
class Walk:
    """Hooks on one backward pass; `remove` takes them off again.

    `compiled` names the modules whose code holds a compiled function, which is one node here.
    """

    handles: list[Any]
    param_parents: list[tuple[torch.Tensor, tuple[Key, ...]]]
    compiled: list[Name]

    def remove(self) -> None:
        """Remove the hooks: the graph may outlive the pass."""
        for handle in self.handles:
            handle.remove()
        self.handles.clear()


def hook_graph(roots: Sequence[torch.Tensor], marks: Marks, names: Names, sink: Sink) -> Walk:
    """Put a hook on every node below the roots that makes a new gradient.

    Args:
        roots: The tensors backward is called on.
        marks: Which module's code made which node.
        names: Where parameters get their names.
        sink: Called with each gradient as it is computed; must not keep it.

    Returns:
        The hooks, and for each parameter reached the gradients its own is computed from.

    Sync: none.
    """
    ordered = _topological([root.grad_fn for root in roots if root.grad_fn is not None])
    namer = _Namer(marks)
    param_parents = []
    for entry in ordered:
        param = _leaf(entry.node)
        for slot in sorted(entry.incoming) or [0]:
            _place(entry, slot, param, namer, names)
        if param is not None:
            param_parents.append((param, entry.resolved))
    handles = []
    for entry in ordered:
        if entry.slots or entry.edges:
            handles.append(entry.node.register_hook(partial(_hand_over, entry.slots, entry.edges, sink)))
    compiled = [marks.owner(entry.sequence)[0] for entry in ordered if entry.op == COMPILED_OP]
    return Walk(handles, param_parents, compiled)


def _hand_over(
    slots: list[tuple[int, GradientPlace]],
    edges: list[tuple[int, GradientPlace]],
    sink: Sink,
    grad_inputs: tuple[torch.Tensor | None, ...],
    grad_outputs: tuple[torch.Tensor | None, ...],
) -> None:
    for places, grads in ((slots, grad_outputs), (edges, grad_inputs)):
        for slot, place in places:
            grad = grads[slot] if slot < len(grads) else None
            if isinstance(grad, torch.Tensor):
                sink(place, grad)


def _topological(roots: list[Any]) -> list[_Node]:
    found: dict[Any, _Node] = {root: _entry(root) for root in roots}
    stack = list(found)
    while stack:
        node = stack.pop()
        consumer = found[node]
        for slot, (producer, output) in enumerate(node.next_functions):
            if producer is None:
                continue
            entry = found.get(producer)
            if entry is None:
                entry = found[producer] = _entry(producer)
                stack.append(producer)
            entry.num_consumers += 1
            entry.incoming.setdefault(output, []).append((consumer, slot))
    # latest forward operation first, as the engine does: names then count in a stable order
    tie = itertools.count()
    ready = [(-entry.sequence, next(tie), entry) for entry in found.values() if entry.num_consumers == 0]
    heapq.heapify(ready)
    ordered = []
    while ready:
        _, _, entry = heapq.heappop(ready)
        ordered.append(entry)
        for producer, _ in entry.node.next_functions:
            if producer is not None:
                child = found[producer]
                child.num_consumers -= 1
                if child.num_consumers == 0:
                    heapq.heappush(ready, (-child.sequence, next(tie), child))
    return ordered


def _entry(node: Any) -> _Node:
    op = node.name().removeprefix("torch::autograd::").rstrip("0123456789").removesuffix("Backward")
    sequence = getattr(node, "_sequence_nr", None)
    number = sequence() if callable(sequence) else 0
    return _Node(node, op, -1 if number >= 2**63 else number)


class _Namer:
    """Counts operations per module so that each gets a name of its own."""

    def __init__(self, marks: Marks) -> None:
        self.marks = marks
        self._seen: dict[Key, int] = {}

    def unique(self, *key: Any) -> Key:
        count = self._seen[key] = self._seen.get(key, -1) + 1
        return (*key, count)


def _place(entry: _Node, slot: int, param: torch.Tensor | None, namer: _Namer, names: Names) -> None:
    incoming = entry.incoming.get(slot, [])
    owner, module_class = namer.marks.owner(entry.sequence)
    if param is not None:
        owner, module_class = names.param(param) or LOSS, ""
    if len(incoming) > 1:
        keys = []
        for consumer, edge in incoming:
            op = f"{consumer.op} -> {entry.op}"
            key = namer.unique("edge", owner, op)
            exact = consumer.op in COPY_OPS and _copies(entry, slot, consumer)
            place = GradientPlace(key, "op_grad", owner, module_class, op, consumer.resolved, exact, consumer.sequence)
            consumer.edges.append((edge, place))
            keys.append(key)
        parents: tuple[Key, ...] = tuple(keys)
        exact = False
    else:
        single = incoming[0][0] if incoming else None
        parents = single.resolved if single is not None else ()
        exact = single is not None and single.op in COPY_OPS and _copies(entry, slot, single)
    if param is not None:
        entry.sources[slot] = parents  # its own gradient is read at the optimizer, whole
        return
    output = namer.marks.outputs.get((entry.sequence, slot))
    is_view = len(incoming) == 1 and incoming[0][0].op in VIEW_OPS
    leaf = _cast_parameter(entry)
    if entry.op in VIEW_OPS and output is None and len(incoming) == 1 and _leads_to_cast(entry):
        # the weight gradient on its way to its cast, where it is recorded under the parameter's name
        entry.sources[slot], entry.handed_on = parents, exact
        return
    if is_view and incoming[0][0].handed_on is not None:
        is_view, exact = False, incoming[0][0].handed_on
    if is_view and output is None and leaf is None and parents:
        entry.sources[slot] = parents  # the very values its consumer received
        return
    if output is not None:
        (name, module_class), kind, op = output, "output_grad", entry.op
    elif leaf is not None:
        name, kind, op, module_class = names.param(leaf) or owner, "op_grad", entry.op, ""
    else:
        name, kind, op = owner, "op_grad", entry.op
    key = namer.unique(kind, name, op, slot)
    entry.slots.append((slot, GradientPlace(key, kind, name, module_class, op, parents, exact, entry.sequence)))
    entry.sources[slot] = (key,)


def _cast_parameter(entry: _Node) -> torch.Tensor | None:
    """The parameter whose autocast copy this node made: its incoming gradient is the FP16 weight gradient."""
    if entry.op not in CAST_OPS:
        return None
    return _leaf(entry.node.next_functions[0][0]) if entry.node.next_functions else None


def _leaf(node: Any) -> torch.Tensor | None:
    """The parameter that a node accumulates a gradient into. Custom functions may keep anything as `variable`."""
    param: torch.Tensor | None = node.variable if type(node).__name__ == "AccumulateGrad" else None
    return param


def _leads_to_cast(entry: _Node) -> bool:
    producer = entry.node.next_functions[0][0] if entry.node.next_functions else None
    return producer is not None and _entry(producer).op in CAST_OPS and _cast_parameter(_entry(producer)) is not None


def _copies(entry: _Node, slot: int, consumer: _Node) -> bool:
    """Whether the consumer's backward hands on as many values as it received (fewer: it summed over a broadcast)."""
    if len(consumer.incoming) > 1:
        return True  # split, unbind: the pieces are put together again
    mine, theirs = _num_elements(entry.node, slot), _num_elements(consumer.node, 0)
    return mine is not None and theirs is not None and mine >= theirs


def _num_elements(node: Any, slot: int) -> int | None:
    metadata = getattr(node, "_input_metadata", None)
    try:
        return math.prod(metadata[slot].shape) if metadata is not None else None
    except (IndexError, AttributeError, TypeError, RuntimeError):  # nested tensors have no shape
        return None
