"""A copy of a model that gives what passes its taps beside its own output, as a compiler wants it: functionally.

    tapped = Tapped(model, [Point("model.layers.3")])
    value, taps = tapped(**inputs)          # taps: a tensor for each leaf of each call, in the order they run

The copy has the model's own tensors and modules of its own, so that nothing is ever attached to the user's.
"""

from __future__ import annotations

import copy
from collections.abc import Iterable
from types import FunctionType
from typing import Any, NamedTuple

import torch
from torch import nn

from layerscope.compile_taps.arguments import Arguments
from layerscope.compile_taps.value_forms import Taken
from layerscope.errors import Unsupported
from layerscope.points import Leaf, Point, Side
from layerscope.runtimes.eager import modules_of
from layerscope.runtimes.values import argument_leaves, leaves

__all__ = ["Flat", "Look", "Tapped", "alone", "copied", "flattened"]


class Look(NamedTuple):
    """What a tap took: one leaf of what a module was given, or gave."""

    name: str
    side: Side
    leaf: Leaf
    tensor: torch.Tensor

    @property
    def point(self) -> Point:
        """Where it was taken."""
        return Point(self.name, self.side, self.leaf)


class _Slot:
    """Where the taps of the forward under way put what they take; None between forwards."""

    def __init__(self) -> None:
        self.looks: list[Look] | None = None


class _Hook:
    """Copies what is wanted before anything changes it in place; returns None, for a value would take its place."""

    def __init__(self, slot: _Slot, name: str, wanted: list[Leaf]) -> None:
        self.slot = slot
        self.name = name
        self.wanted = wanted

    def take(self, side: Side, found: list[tuple[Leaf, torch.Tensor]]) -> None:
        if self.slot.looks is not None:
            for leaf, tensor in found:
                if any(leaf[: len(above)] == above for above in self.wanted):
                    self.slot.looks.append(Look(self.name, side, leaf, tensor.clone()))


class _Before(_Hook):
    def __call__(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self.take("input", argument_leaves(args, kwargs))


class _After(_Hook):
    def __call__(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], value: object) -> None:
        self.take("output", leaves(value))


class Tapped(nn.Module):
    """Calls the model, and returns its value and what the taps took."""

    def __init__(self, model: nn.Module, points: Iterable[Point]) -> None:
        super().__init__()
        self.model = copied(model)
        self._slot = _Slot()
        self.training = model.training  # and every part keeps its own mode: a frozen norm in a model that trains
        by_name = modules_of(self.model).by_name
        wanted: dict[tuple[str, Side], list[Leaf]] = {}
        for point in points:
            wanted.setdefault((point.name, point.side), []).append(point.leaf)
        for (name, side), asked in wanted.items():
            if side == "input":
                by_name[name].register_forward_pre_hook(_Before(self._slot, name, asked), with_kwargs=True)
            else:
                by_name[name].register_forward_hook(_After(self._slot, name, asked), with_kwargs=True)

    def looked(self, *args: Any, **kwargs: Any) -> tuple[Any, list[Look]]:
        """Call the model as it is, and return its value and what each tap took, with its name."""
        looks: list[Look] = []
        self._slot.looks = looks
        try:
            return self.model(*args, **kwargs), looks
        finally:
            self._slot.looks = None

    def forward(self, *args: Any, **kwargs: Any) -> tuple[Any, list[torch.Tensor]]:
        """Call the model; the tensors come in the order in which `looked` has them."""
        self._slot.looks = []
        value = self.model(*args, **kwargs)
        looks, self._slot.looks = self._slot.looks, None
        return value, [look.tensor for look in looks]


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
        return (*Taken.of(value).tensors, *taps)


def flattened(tapped: Tapped, arguments: Arguments) -> Flat:
    """Return the flat form, of a class of its own: compilers keep what they made by code object."""
    kind: type[Flat] = type("Flat", (Flat,), {"forward": alone(Flat.forward), "__module__": __name__})
    return kind(tapped, arguments)


def alone(function: Any) -> Any:
    """Return a function with a code object of its own.

    torch.compile keeps what it made by code object, and does not notice hooks: a tapped model would run what was
    compiled for an untapped one, and no tap would fire.
    """
    own = function.__code__.replace()
    return FunctionType(own, function.__globals__, function.__name__, function.__defaults__, function.__closure__)


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
