"""Names of modules and parameters, found without being told the model.

Every module called from outside any other is a root. Names are torch's own, relative to the root; where a run has
several roots with parameters (a GAN, an encoder beside a decoder) each is prefixed with the variable that holds it. A
root that turns out to be part of a larger one takes that one's names, so names are put together when they are written,
not when they are first seen.

Nothing here refers to a parameter, not even weakly: torch refuses to swap a tensor that has weak references.
"""

from __future__ import annotations

import weakref
from dataclasses import dataclass

import torch

from gradaudit.capture.callsite import enclosing_module, variable_name

_WRAPPERS = frozenset({"DataParallel", "DistributedDataParallel", "FullyShardedDataParallel", "OptimizedModule"})


@dataclass(slots=True)
class _Root:
    """`module` is None for roots without parameters, losses mostly: they share one root per class."""

    label: str
    module_class: str
    module: weakref.ref[torch.nn.Module] | None
    parent: int | None = None
    path: str = ""


@dataclass(frozen=True, slots=True)
class Name:
    """A place below a root; `Names.full` turns it into a string."""

    root: int | None
    path: str

    def below(self, part: str) -> Name:
        """The name of something inside."""
        return Name(self.root, f"{self.path}.{part}" if self.path else part)


@dataclass(frozen=True, slots=True)
class Running:
    """A module whose forward is running."""

    name: Name
    module_class: str
    module: torch.nn.Module


LOSS = Name(None, "loss")
"""Code outside every module; nearly always the loss."""


@dataclass(frozen=True, slots=True)
class _Held:
    """Where a parameter was found. Its id alone could be another's by now."""

    module: weakref.ref[torch.nn.Module]
    attribute: str
    name: Name


class Names:
    """Weakly keyed: forgets modules that the user drops, and their parameters."""

    def __init__(self) -> None:
        self._roots: list[_Root] = []
        self._modules: weakref.WeakKeyDictionary[torch.nn.Module, Name] = weakref.WeakKeyDictionary()
        self._params: dict[int, _Held] = {}

    def add_root(self, called: torch.nn.Module) -> None:
        """Learn the names below a module that was called from outside any module. Cheap when nothing is new."""
        module = unwrap(called)
        if module in self._modules:
            return
        if next(module.parameters(), None) is None:
            self._learn(module, Name(self._shared_root(type(module).__name__), ""))
            return
        outer = unwrap(enclosing_module(module) or module)
        if outer is not module:
            known = self._modules.get(outer)
            if known is None:
                self.add_root(outer)
            else:
                self._learn(outer, known)
            if module in self._modules:
                return
        label = variable_name(called) or variable_name(module) or type(module).__name__
        self._learn(module, Name(self._root(label, module), ""))

    def child(self, module: torch.nn.Module, caller: Running) -> Name:
        """A module's name, which may have been put into its caller just now, or be known to nobody but it."""
        known = self.module(module)
        if known is not None:
            return known
        outer, module = unwrap(caller.module), unwrap(module)
        is_bare = next(module.parameters(), None) is None
        below = outer.named_children() if is_bare else outer.named_modules()
        if any(child is module for _, child in below):
            self._learn(outer, caller.name)
        elif is_bare:
            # nn.ReLU()(x): a new one at every call, all with the name of the class
            self._modules[module] = caller.name.below(type(module).__name__)
        else:
            self.add_root(module)
        return self._modules[module]

    @property
    def num_roots(self) -> int:
        """Models seen so far."""
        return len(self._roots)

    def roots(self) -> list[torch.nn.Module]:
        """Models that have been called or introduced and are still alive."""
        held = [root.module() for root in self._roots if root.module is not None]
        return [module for module in held if module is not None]

    def module(self, module: torch.nn.Module) -> Name | None:
        """A module's name, None if its root has not been called."""
        return self._modules.get(unwrap(module))

    def param(self, param: torch.Tensor) -> Name | None:
        """A parameter's name, None if its module has not been called."""
        held = self._params.get(id(param))
        module = None if held is None else held.module()
        if held is None or module is None or held.attribute not in module._parameters:
            return None
        return held.name if module._parameters[held.attribute] is param else None

    def gradient(self, tensor: torch.Tensor) -> Name | None:
        """The name of the parameter whose gradient a tensor is. Asks all of them."""
        for held in list(self._params.values()):
            module = held.module()
            param = None if module is None else module._parameters.get(held.attribute)
            if param is not None and param.grad is tensor:
                return held.name
        return None

    def holder(self, param: torch.Tensor) -> torch.nn.Module | None:
        """The module that holds a parameter, None if it has not been called."""
        return None if self.param(param) is None else self._params[id(param)].module()

    def full(self, name: Name) -> str:
        """The fully qualified name as of now; a root's own is its class name."""
        if name.root is None:
            return name.path
        root = self._roots[name.root]
        path, module_class = name.path, root.module_class
        while root.parent is not None:
            path = f"{root.path}.{path}" if path else root.path
            root = self._roots[root.parent]
        several = sum(other.parent is None and other.module is not None for other in self._roots) > 1
        if several:
            return f"{root.label}.{path}" if path else root.label
        return path or module_class

    def _learn(self, module: torch.nn.Module, name: Name) -> None:
        for path, child in module.named_modules():
            known = self._modules.get(child)
            place = name.below(path) if path else name
            if known is None:
                self._modules[child] = place
            elif known.root is not None and known.root != name.root and known.path == "":
                inner = self._roots[known.root]
                if inner.module is None:
                    self._modules[child] = place
                elif inner.parent is None:
                    inner.parent, inner.path = name.root, place.path
            for attribute, param in child._parameters.items():
                if param is not None and self.param(param) is None:
                    self._params[id(param)] = _Held(weakref.ref(child), attribute, place.below(attribute))

    def _root(self, label: str, module: torch.nn.Module) -> int:
        self._params = {key: held for key, held in self._params.items() if held.module() is not None}
        taken = {root.label: index for index, root in enumerate(self._roots)}
        module_class = type(module).__name__
        while label in taken:
            root = self._roots[taken[label]]
            if root.module_class == module_class and root.module is not None and root.module() is None:
                # built anew, as in a loop over settings: the same place, so the same name
                root.module, root.parent, root.path = weakref.ref(module), None, ""
                return taken[label]
            label += "_"
        self._roots.append(_Root(label, module_class, weakref.ref(module)))
        return len(self._roots) - 1

    def _shared_root(self, module_class: str) -> int:
        for index, root in enumerate(self._roots):
            if root.module is None and root.module_class == module_class:
                return index
        self._roots.append(_Root(module_class, module_class, None))
        return len(self._roots) - 1


def unwrap(module: torch.nn.Module) -> torch.nn.Module:
    """The model inside of what distributes or compiles it."""
    while type(module).__name__ in _WRAPPERS:
        inner = getattr(module, "module", None) or getattr(module, "_orig_mod", None)
        if not isinstance(inner, torch.nn.Module):
            break
        module = inner
    return module
