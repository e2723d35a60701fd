"""Walk the tensors of a nested value, and name the way to each.

    leaves((x, {"mask": m}))       # ((0,), x), ((1, "mask"), m)

Tuples, lists, mappings, named tuples, dataclasses and `ModelOutput`s are walked; any other object (a key-value cache,
a generator) is left closed, because looking into it could change it.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping

import torch

from layerscope.points import Leaf

__all__ = ["argument_leaves", "describe", "leaves"]

_DEEPEST = 32  # a structure nested deeper than this refers to itself


def leaves(value: object, *, at: Leaf = ()) -> Iterator[tuple[Leaf, torch.Tensor]]:
    """Yield every tensor in `value` with the path that leads to it, in order."""
    if isinstance(value, torch.Tensor):
        yield at, value
    elif len(at) < _DEEPEST:
        for key, child in _children(value):
            yield from leaves(child, at=(*at, key))


def argument_leaves(args: tuple[object, ...], kwargs: Mapping[str, object]) -> Iterator[tuple[Leaf, torch.Tensor]]:
    """Yield the tensors of a call: positional arguments by number, keyword arguments by name."""
    yield from leaves(args)
    yield from leaves(kwargs)


def describe(value: object) -> str:
    """Say what a value without tensors is, for the reason under `missing`."""
    return "None" if value is None else f"a {type(value).__name__}"


def _children(value: object) -> Iterator[tuple[int | str, object]]:
    if isinstance(value, Mapping):  # a ModelOutput is an OrderedDict first
        for key, child in value.items():
            yield (key if isinstance(key, int) and not isinstance(key, bool) else str(key)), child
    elif isinstance(value, tuple) and hasattr(value, "_fields"):
        yield from zip(value._fields, value, strict=True)
    elif isinstance(value, (tuple, list)):
        yield from enumerate(value)
    elif dataclasses.is_dataclass(value) and not isinstance(value, type):
        for field in dataclasses.fields(value):
            yield field.name, getattr(value, field.name, None)
