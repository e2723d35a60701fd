"""A copy of a model that gives what passes its taps beside its own output, as a compiler wants it: functionally.

    tapped = Tapped(model, [Point("model.layers.3")])
    value, taps = tapped(**inputs)          # taps: a tensor for each leaf of each call, in the order they run

The copy has the model's own tensors and modules of its own, so that nothing is ever attached to the user's.
"""

from __future__ import annotations

import copy
from collections.abc import Iterable
from typing import Any, NamedTuple

import torch
from torch import nn

from layerscope.compile_taps.arguments import Arguments
from layerscope.compile_taps.value_forms import FlatValue
from layerscope.errors import Unsupported
from layerscope.points import Leaf, Point, Side
from layerscope.runtimes.eager import modules_of
from layerscope.runtimes.traced_hooks import TracedHook, TracedValues, alone


class TappedTensor(NamedTuple):
    """What a tap took: one leaf of what a module was given, or gave."""

    name: str
    side: Side
    leaf: Leaf
    tensor: torch.Tensor

    @property
    def point(self) -> Point:
        """Where it was taken."""
        return Point(self.name, self.side, self.leaf)


class Tapped(nn.Module):
    """Calls the model, and returns its value and what the taps took."""

    def __init__(self, model: nn.Module, points: Iterable[Point]) -> None:
        super().__init__()
        self.model = copied(model)
        self._values = TracedValues()
        self.training = model.training  # and every part keeps its own mode: a frozen norm in a model that trains
        by_name = modules_of(self.model).by_name
        wanted: dict[tuple[str, Side], list[Leaf]] = {}
        for point in points:
            wanted.setdefault((point.name, point.side), []).append(point.leaf)
        for (name, side), asked in wanted.items():
            TracedHook(self._values, name, side, asked).on(by_name[name])

    def named(self, *args: Any, **kwargs: Any) -> tuple[Any, list[TappedTensor]]:
        """Call the model as it is, and return its value and what each tap took, with its name."""
        try:
            value, told = self._called(args, kwargs)
        finally:
            self._values.told = None
        return value, [
            TappedTensor(hook.name, hook.side, leaf, tensor) for hook, found in told for leaf, tensor in found
        ]

    def forward(self, *args: Any, **kwargs: Any) -> tuple[Any, list[torch.Tensor]]:
        """Call the model; the tensors come in the order in which `named` has them."""
        value, told = self._called(args, kwargs)
        return value, [tensor for _, found in told for _, tensor in found]

    def _called(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, list[Any]]:
        self._values.told = []
        value = self.model(*args, **kwargs)
        told, self._values.told = self._values.told, None
        return value, told


class Flat(nn.Module):
    """Takes the tensors of the arguments, gives those of the output and then the taps: what every compiler takes."""

    def __init__(self, tapped: Tapped, arguments: Arguments) -> None:
        super().__init__()
        self.tapped = tapped
        self.arguments = arguments
        self.training = tapped.training

    def forward(self, *tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Call the model by the arguments it was compiled for."""
        args, kwargs = self.arguments.call(list(tensors))
        value, taps = self.tapped(*args, **kwargs)
        return (*FlatValue.of(value).tensors, *taps)


def flattened(tapped: Tapped, arguments: Arguments) -> Flat:
    """Return the flat form, of a class of its own: compilers keep what they made by code object."""
    kind: type[Flat] = type("Flat", (Flat,), {"forward": alone(Flat.forward), "__module__": __name__})
    return kind(tapped, arguments)


def copied(model: nn.Module) -> nn.Module:
    """Copy the modules and share the tensors."""
    shared = {id(tensor): tensor for tensor in [*model.parameters(), *model.buffers()]}
    try:
        return copy.deepcopy(model, shared)
    except Exception as error:
        raise Unsupported(
            f"{type(model).__name__} cannot be copied ({type(error).__name__}: {error}), and taps are not put on "
            "modules that are yours; take out of it what cannot be copied."
        ) from error
