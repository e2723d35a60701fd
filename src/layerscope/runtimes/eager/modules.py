"""The modules of a model by the names that wrappers have not touched.

modules_of(model).by_name["layers.3"]
tree = ModuleTree(model); tree.changed()        # None while each module is where it was
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch

from layerscope.points import unwrapped

# The model as it was given, where that is a wrapper and its name belongs to what it wraps.
WRAPPER = "<wrapper>"


class Modules(NamedTuple):
    """The modules of a model by their unwrapped names, and the other names of shared ones."""

    by_name: dict[str, torch.nn.Module]
    shared: dict[str, str]


def modules_of(model: torch.nn.Module) -> Modules:
    """List a model's modules under names that wrappers have not touched.

    A wrapper and what it wraps end up with one name, which is then the wrapped module's. A module found again under
    another name is the same module: it keeps its first name, and the other one is listed in `shared`.
    """
    found = Modules({}, {})
    _walk(model, "", found, {}, frozenset())
    return found


class ModuleTree:
    """Where the modules of a model hang, to see at a glance whether one was put in another's place."""

    def __init__(self, model: torch.nn.Module) -> None:
        self._model = model
        self._held = self._now()

    def changed(self) -> dict[str, torch.nn.Module] | None:
        """Return the modules by their names when they are not those of the last time; None while they are."""
        for held, key, child in self._held:
            if held.get(key) is not child:
                self._held = self._now()
                return {**modules_of(self._model).by_name, WRAPPER: self._model}
        return None

    def _now(self) -> list[tuple[dict[str, Any], str, Any]]:
        modules = self._model.modules()
        return [(above._modules, key, child) for above in modules for key, child in above._modules.items()]


def _walk(module: torch.nn.Module, raw: str, found: Modules, first_name: dict[int, str], above: frozenset[int]) -> None:
    name = unwrapped(raw)
    known = first_name.get(id(module))
    if known is not None and known != name:
        found.shared[name] = known
    else:
        first_name[id(module)] = name
        found.by_name[name] = module
    if id(module) in above:  # a module that contains itself
        return
    for key, child in module._modules.items():
        if child is not None:
            _walk(child, f"{raw}.{key}" if raw else key, found, first_name, above | {id(module)})


def compiled_parts(model: torch.nn.Module) -> list[str]:
    """Return the names of the modules that torch.compile runs: hooks inside them do not fire."""
    return [name or "." for name, module in modules_of(model).by_name.items() if is_compiled(module)]


def is_compiled(module: torch.nn.Module | None) -> bool:
    """Tell whether torch.compile runs this module: hooks that come later do not fire inside it."""
    return bool(getattr(module, "_compiled_call_impl", None)) or type(module).__module__.startswith("torch._dynamo")
