"""Names of modules and parameters, found without being told the model.

Every module called from outside any other is a root. Names are torch's own, relative to the root; where a run has
several roots (a GAN, an encoder beside a decoder) each is prefixed with the variable that holds it. A root that turns out to be
part of a larger one takes that one's names, so names are put together when they are written, not when they are first seen.
"""

from __future__ import annotations

import weakref
from dataclasses import dataclass

import torch
from torch.utils.weak import WeakIdKeyDictionary

from gradaudit.capture.callsite import variable_name

_WRAPPERS = frozenset({"DataParallel", "DistributedDataParallel", "FullyShardedDataParallel", "OptimizedModule"})


@dataclass(slots=True)
class _Root:
    label: str
    module_class: str
    parent: int | None = None
    path: str = ""


@dataclass(frozen=True, slots=True)
class Name:
    """A place below a root; `Names.full` turns it into a string."""

    root: int | None
    path: str


LOSS = Name(None, "loss")
"""Code outside every module; nearly always the loss."""


class Names:
    """Weakly keyed: forgets modules and parameters that the user drops."""

    def __init__(self) -> None:
        self._roots: list[_Root] = []
        self._modules: weakref.WeakKeyDictionary[torch.nn.Module, Name] = weakref.WeakKeyDictionary()
        self._params: WeakIdKeyDictionary = WeakIdKeyDictionary()

    def add_root(self, module: torch.nn.Module) -> None:
        """Learn the names below a module that was called from outside any module. Cheap when nothing is new."""
        module = _unwrap(module)
        if module in self._modules:
            return
        index = len(self._roots)
        label = variable_name(module) or type(module).__name__
        taken = {root.label for root in self._roots}
        while label in taken:
            label += "_"
        self._roots.append(_Root(label, type(module).__name__))
        for path, child in module.named_modules():
            known = self._modules.get(child)
            if known is not None and known.root is not None and known.path == "":
                inner = self._roots[known.root]
                if inner.parent is None:
                    inner.parent, inner.path = index, path
            self._modules.setdefault(child, Name(index, path))
        for path, param in module.named_parameters():
            if param not in self._params:
                self._params[param] = Name(index, path)

    def refresh(self, module: torch.nn.Module) -> None:
        """Learn what was added below a known root since."""
        module = _unwrap(module)
        name = self._modules.get(module)
        if name is None:
            self.add_root(module)
            return
        prefix = f"{name.path}." if name.path else ""
        for path, child in module.named_modules():
            self._modules.setdefault(child, Name(name.root, prefix + path))
        for path, param in module.named_parameters():
            if param not in self._params:
                self._params[param] = Name(name.root, prefix + path)

    def module(self, module: torch.nn.Module) -> Name | None:
        """A module's name, None if its root has not been called."""
        return self._modules.get(_unwrap(module))

    def param(self, param: torch.Tensor) -> Name | None:
        """A parameter's name, None if its module has not been called."""
        found: Name | None = self._params.get(param)
        return found

    def name_param(self, param: torch.Tensor, path: str) -> Name:
        """Name a parameter that belongs to no module."""
        self._params[param] = name = Name(None, path)
        return name

    def full(self, name: Name) -> str:
        """The fully qualified name as of now; a root's own is its class name."""
        if name.root is None:
            return name.path
        root = self._roots[name.root]
        path, module_class = name.path, root.module_class
        while root.parent is not None:
            path = f"{root.path}.{path}" if path else root.path
            root = self._roots[root.parent]
        several = sum(other.parent is None for other in self._roots) > 1
        if several:
            return f"{root.label}.{path}" if path else root.label
        return path or module_class


def _unwrap(module: torch.nn.Module) -> torch.nn.Module:
    while type(module).__name__ in _WRAPPERS:
        inner = getattr(module, "module", None) or getattr(module, "_orig_mod", None)
        if not isinstance(inner, torch.nn.Module):
            break
        module = inner
    return module
