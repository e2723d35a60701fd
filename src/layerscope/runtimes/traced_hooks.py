"""Hooks that are traced as part of a model: what they copy are further results of its graph.

values = TracedValues()
handle = TracedHook(values, "layers.3", "output", [()]).on(module)
values.told = []; model(x)      # values.told: the hooks that ran, in order, and what each copied
"""

from __future__ import annotations

from types import FunctionType
from typing import Any

import torch
from torch.utils.hooks import RemovableHandle

from layerscope.points import Leaf, Side
from layerscope.runtimes.values import argument_leaves, leaves


class TracedValues:
    """What the hooks of one forward copied, in the order they ran; None between forwards."""

    def __init__(self) -> None:
        self.told: list[tuple[TracedHook, list[tuple[Leaf, torch.Tensor]]]] | None = None


class TracedHook:
    """Copies the wanted leaves before anything changes them in place; returns None, for a value would take its place.

    It is a pre-hook for an input and a hook for an output. A leaf wants all that is below it.
    """

    def __init__(self, values: TracedValues, name: str, side: Side, wanted: list[Leaf]) -> None:
        self.values = values
        self.name = name
        self.side = side
        self.wanted = wanted

    def on(self, module: torch.nn.Module) -> RemovableHandle:
        """Have it called before or after each call of a module."""
        register: Any = module.register_forward_pre_hook if self.side == "input" else module.register_forward_hook
        handle: RemovableHandle = register(self, with_kwargs=True)
        return handle

    def __call__(self, module: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], *value: object) -> None:
        """Copy what is wanted of this call."""
        if self.values.told is not None:
            found = leaves(value[0]) if value else argument_leaves(args, kwargs)
            copies = [(leaf, tensor.clone()) for leaf, tensor in found if self._wants(leaf)]
            self.values.told.append((self, copies))

    def _wants(self, leaf: Leaf) -> bool:
        return any(leaf[: len(above)] == above for above in self.wanted)


def alone(function: Any) -> Any:
    """Return a function with a code object of its own.

    torch.compile keeps what it made by code object, and does not notice hooks: a tapped model would run what was
    compiled for an untapped one, and no tap would fire.
    """
    own = function.__code__.replace()
    return FunctionType(own, function.__globals__, function.__name__, function.__defaults__, function.__closure__)
