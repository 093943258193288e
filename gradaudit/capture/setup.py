"""How a training was set up: what run.json says of optimizers, scalers and processes. Metadata only, but for one
comparison on the device."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from numbers import Real
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from gradaudit.capture.callsite import is_users
from gradaudit.capture.names import Name, Names
from gradaudit.capture.reading import stack_scalars
from gradaudit.capture.recorder import Pending

if TYPE_CHECKING:
    from gradaudit.capture.registry import Registry

NUM_LOOKS = 2
"""Applied steps after which an optimizer's state is read: some build it at the first, others at the second."""

MAX_NAMED = 10
"""Modules named where an optimizer got no gradient: a whole model that did not run need not be spelled out."""

HALF = (torch.float16, torch.bfloat16)


@dataclass(frozen=True, slots=True)
class StateFacts:
    """An optimizer's state: dtypes per key, of tensors with their parameter's shape.

    `has_masters`: a key's name says that FP32 copies of half weights are kept. `equal`: else, per key with FP32 tensors
    for half weights, whether they equal those.
    """

    dtypes: dict[str, str]
    has_masters: bool
    equal: list[torch.Tensor]


class Setup:
    """Looks at each optimizer's state once it has one, and at how processes work together."""

    def __init__(self, registry: Registry) -> None:
        self._registry = registry
        self._num_looks: dict[int, int] = {}
        self._distributed: dict[str, Any] | None = None

    def look(self, identity: int, optimizer: Any, *, was_applied: bool) -> Pending | None:
        """After a sampled step: what is returned tells later whether the state holds FP32 weights. Sync: none."""
        if self._distributed is None:
            self._distributed = distributed_facts()  # now: processes may part before the recording ends
        if not was_applied or self._num_looks.get(identity, 0) >= NUM_LOOKS:
            return None
        self._num_looks[identity] = self._num_looks.get(identity, 0) + 1
        facts = state_facts(optimizer)
        if facts is None:
            return None
        self._registry.note_state(identity, facts.dtypes)
        if facts.has_masters:
            self._registry.note_masters(identity)

        def finish(equal: np.ndarray) -> None:
            if equal.any():
                self._registry.note_masters(identity)

        return Pending(stack_scalars(facts.equal), finish) if facts.equal else None

    def describe(self, names: Names, hidden: Mapping[Name, str]) -> dict[str, Any]:
        """This part of run.json; may run in the writer thread."""
        found = {names.full(name): kind for name, kind in list(hidden.items())}
        return {
            "hidden_modules": [{"name": name, "kind": kind} for name, kind in found.items()],
            "distributed": self._distributed,
        }


def group_facts(optimizer: Any) -> dict[str, Any]:
    """An optimizer's eps, None if it has none, and whether it is fused. Sync: none."""
    groups = optimizer.param_groups
    eps = [group["eps"] for group in groups if isinstance(group.get("eps"), Real)]
    return {"eps": float(min(eps)) if eps else None, "fused": any(bool(group.get("fused")) for group in groups)}


def wrapped_optimizers(optimizer: Any) -> list[Any]:
    """Those of torch's optimizers that an object holds, alone or in a list or dict, and steps for. Sync: none.

    Such have no parameters but the object's own: a look-ahead around one, several behind one step.
    """
    held: list[Any] = []
    for value in vars(optimizer).values() if hasattr(optimizer, "__dict__") else ():
        held += value.values() if isinstance(value, dict) else value if isinstance(value, (list, tuple)) else [value]
    inner = [value for value in held if isinstance(value, torch.optim.Optimizer) and value is not optimizer]
    if not inner:
        return []
    own = {id(param) for group in optimizer.param_groups for param in group["params"]}
    return [
        one for one in inner if own.issuperset(id(param) for group in one.param_groups for param in group["params"])
    ]


def hook_sites(param: torch.Tensor) -> list[dict[str, Any]]:
    """Where the user's functions are written that may change a parameter's gradient in backward. Sync: none."""
    tables = (param._backward_hooks, getattr(param, "_post_accumulate_grad_hooks", None))
    hooks = [hook for table in tables for hook in (table or {}).values()]
    codes = [getattr(getattr(hook, "func", hook), "__code__", None) for hook in hooks]
    return [{"file": c.co_filename, "line": c.co_firstlineno} for c in codes if c and is_users(c.co_filename)]


def has_stepped(optimizer: Any) -> bool:
    """Whether an optimizer has state from earlier steps; some (Adagrad) fill it when they are made. Sync: none."""
    return any(_counts(state) for state in _state(optimizer).values() if len(state))


def _state(optimizer: Any) -> Mapping[Any, Any]:
    """Per parameter what an optimizer keeps; a wrapper around one need not have any."""
    state = getattr(optimizer, "state", None)
    return state if isinstance(state, Mapping) else {}


def _counts(state: Mapping[str, Any]) -> bool:
    step = state.get("step")
    if isinstance(step, torch.Tensor):
        return step.device.type != "cpu" or bool(step > 0)  # on another device it would have to be waited for
    return not isinstance(step, (int, float)) or step > 0


def state_facts(optimizer: Any) -> StateFacts | None:
    """What an optimizer keeps for its parameters, None while that is nothing. Sync: none."""
    params = [param for group in optimizer.param_groups for param in group["params"]]
    states = _state(optimizer)
    kept: dict[str, list[tuple[torch.Tensor, torch.Tensor]]] = {}
    for param in sorted(params, key=lambda param: param.dtype not in HALF):  # stable: half parameters first
        for key, value in (states.get(param) or {}).items():
            if isinstance(value, torch.Tensor) and value.shape == param.shape and value.is_floating_point():
                kept.setdefault(str(key), []).append((param, value))
    if not kept:
        return None
    dtypes = {key: str(pairs[0][1].dtype).removeprefix("torch.") for key, pairs in kept.items()}
    copies = {
        key: [(param, value) for param, value in pairs if param.dtype in HALF and value.dtype is torch.float32]
        for key, pairs in kept.items()
    }
    if any("master" in key.lower() for key, pairs in copies.items() if pairs):
        return StateFacts(dtypes, True, [])
    return StateFacts(dtypes, False, [_are_copies(pairs) for pairs in copies.values() if pairs])


def _are_copies(pairs: list[tuple[torch.Tensor, torch.Tensor]]) -> torch.Tensor:
    """Whether the FP32 tensors, rounded, are the weights, and not all zero. Sync: none."""
    with torch.no_grad():
        same = [(value.to(param.dtype) == param.detach()).all() for param, value in pairs]
        some = [(value != 0).any() for _, value in pairs]
        return torch.stack(same).all() & torch.stack(some).any()


def distributed_facts() -> dict[str, Any] | None:
    """The backend of torch.distributed, None where it is not initialised."""
    distributed = torch.distributed
    if not distributed.is_available() or not distributed.is_initialized():
        return None
    return {"backend": str(distributed.get_backend())}


def without_gradient(optimizer: Any, names: Names, ran: Collection[Name]) -> dict[str, Any]:
    """Why none of an optimizer's parameters may have a gradient: which are frozen, and whose modules ran."""
    params = [param for group in optimizer.param_groups for param in group["params"]]
    holders = {module: names.module(module) for param in params if (module := names.holder(param)) is not None}
    missed = [names.full(name) for name in holders.values() if name is not None and name not in ran]
    return {
        "num_params": len(params),
        "num_frozen": sum(not param.requires_grad for param in params),
        "num_unowned": sum(names.holder(param) is None for param in params),
        "modules_run": len(holders) - len(missed),
        "modules_not_run": missed[:MAX_NAMED],
    }
