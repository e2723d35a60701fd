"""Walk the tensors of a nested value, and name the way to each.

    leaves((x, {"mask": m}))       # ((0,), x), ((1, "mask"), m)

Tuples, lists, mappings, named tuples, dataclasses and `ModelOutput`s are walked; any other object (a key-value cache,
a generator) is left closed, because looking into it could change it. A container inside itself is walked once.
"""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch

from layerscope.points import Leaf

_ATOMS = frozenset((type(None), bool, int, float, complex, str, bytes, torch.dtype, torch.device, torch.Size))


def leaves(value: object) -> list[tuple[Leaf, torch.Tensor]]:
    """Return every tensor in `value` with the path that leads to it, in order."""
    if isinstance(value, torch.Tensor):
        return [((), value)]
    found: list[tuple[Leaf, torch.Tensor]] = []
    _collect(value, (), found, ())
    return found


def argument_leaves(args: tuple[object, ...], kwargs: Mapping[str, object]) -> list[tuple[Leaf, torch.Tensor]]:
    """Return the tensors of a call: positional arguments by number, keyword arguments by name."""
    found: list[tuple[Leaf, torch.Tensor]] = []
    for at, value in enumerate(args):
        if isinstance(value, torch.Tensor):
            found.append(((at,), value))
        elif type(value) not in _ATOMS:
            _collect(value, (at,), found, (args,))
    for name, value in kwargs.items():
        if isinstance(value, torch.Tensor):
            found.append(((name,), value))
        elif type(value) not in _ATOMS:
            _collect(value, (name,), found, (kwargs,))
    return found


def describe(value: object) -> str:
    """Say what a value without tensors is, for the reason under `missing`."""
    return "None" if value is None else f"a {type(value).__name__}"


def rebuilt(value: object, replace: Callable[[Leaf, torch.Tensor], object]) -> object:
    """Return a value's own structure in plain containers, with something else in the place of each tensor.

    Every kind of tuple becomes a tuple, every kind of list a list, what has named parts a dict. None, numbers and texts
    stay; an object that is not walked becomes None.
    """
    return _rebuilt(value, (), replace, ())


def replaced(value: Any, replace: Callable[[Leaf, torch.Tensor], torch.Tensor]) -> Any:
    """Return a value of the same types, with another tensor in the place of each; the given one is left alone.

    Paths are those of `leaves`. A value in which nothing changes comes back itself.
    """
    return _replaced(value, (), replace, ())


def _replaced(
    value: Any, at: Leaf, replace: Callable[[Leaf, torch.Tensor], torch.Tensor], above: tuple[object, ...]
) -> Any:
    if isinstance(value, torch.Tensor):
        return replace(at, value)
    if type(value) in _ATOMS or any(value is outer for outer in above):
        return value
    children = list(_children(value))
    inside = [(key, child, _replaced(child, (*at, key), replace, (value, *above))) for key, child in children]
    if all(before is after for _, before, after in inside):
        return value
    if isinstance(value, (tuple, list)):
        made = [after for _, _, after in inside]
        if hasattr(value, "_fields"):
            return type(value)(*made)
        return type(value)(made)
    other = copy.copy(value)
    if isinstance(value, Mapping):
        for own, (_, _, after) in zip(value, inside, strict=True):
            other[own] = after
    else:
        for key, _, after in inside:
            object.__setattr__(other, str(key), after)
    return other


def _rebuilt(
    value: object, at: Leaf, replace: Callable[[Leaf, torch.Tensor], object], above: tuple[object, ...]
) -> object:
    if isinstance(value, torch.Tensor):
        return replace(at, value)
    if value is None or type(value) in (bool, int, float, str):
        return value
    if type(value) in _ATOMS or any(value is outer for outer in above):
        return None
    inside = [(key, _rebuilt(child, (*at, key), replace, (value, *above))) for key, child in _children(value)]
    if isinstance(value, tuple):
        return tuple(child for _, child in inside)
    if isinstance(value, list):
        return [child for _, child in inside]
    return dict(inside) if isinstance(value, Mapping) or dataclasses.is_dataclass(value) else None


def _collect(value: object, at: Leaf, found: list[tuple[Leaf, torch.Tensor]], above: tuple[object, ...]) -> None:
    for key, child in _children(value):
        if isinstance(child, torch.Tensor):
            found.append(((*at, key), child))
        elif type(child) not in _ATOMS and not any(child is outer for outer in (value, *above)):
            _collect(child, (*at, key), found, (value, *above))


def _children(value: object) -> Iterable[tuple[int | str, object]]:
    kind = type(value)
    if kind is tuple or kind is list:
        return enumerate(value)  # type: ignore[arg-type]
    if isinstance(value, Mapping):  # a ModelOutput is an OrderedDict first
        return [(_key(key), child) for key, child in value.items()]
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return zip(value._fields, value, strict=True)
    if isinstance(value, (tuple, list)):
        return enumerate(value)
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return [(field.name, getattr(value, field.name, None)) for field in dataclasses.fields(value)]
    return ()


def _key(key: object) -> int | str:
    return key if isinstance(key, int) and not isinstance(key, bool) else str(key)
