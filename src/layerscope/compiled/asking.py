"""What `record_layer_outputs` asks for, as points of the model.

asked(model, True, layers)                  # every layer
asked(model, {0, 30, -1}, layers)           # these
asked(model, "**.mlp", layers)              # what the pattern names
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

from torch import nn

from layerscope.errors import BadText, NoSuchPoint, Unsupported
from layerscope.patterns import Pattern, select, split
from layerscope.points import Point
from layerscope.runtimes import eager

__all__ = ["Asked", "asked"]


class Asked(NamedTuple):
    """The points, and whether of each only the hidden states are meant, the first tensor of what it returns."""

    points: list[Point]
    states_alone: bool


def asked(model: nn.Module, record: Any, layers: list[str]) -> Asked:
    """Read `record_layer_outputs`; what it names must be there."""
    if record is False:
        return Asked([], False)
    if record is True or _are_numbers(record):
        return Asked([Point(layers[n]) for n in _numbers(model, record, layers)], True)
    patterns: Sequence[str | Pattern] = [record] if isinstance(record, (str, Pattern)) else list(record)
    if split(patterns).ops:
        raise Unsupported("operations are not tapped at compile time; name modules.")
    shared = eager.shared(model)
    points = [Point(shared.get(p.name, p.name), p.side, p.leaf) for p in select(patterns, eager.points(model))]
    if any(point.side.startswith("grad") for point in points):
        raise Unsupported(
            "a compiled model computes a forward alone, so gradients are not tapped; record them eagerly."
        )
    return Asked(list(dict.fromkeys(points)), False)


def _numbers(model: nn.Module, record: Any, layers: list[str]) -> Iterable[int]:
    if not layers:
        raise NoSuchPoint(
            f"{type(model).__name__} has no list of like blocks to take for its layers; "
            "name them: record_layer_outputs='blocks.*'."
        )
    if record is True:
        return range(len(layers))
    wrong = [n for n in record if not -len(layers) <= n < len(layers)]
    if wrong:
        raise NoSuchPoint(f"there is no layer {wrong[0]}: {type(model).__name__} has {len(layers)}, from 0.")
    return sorted({n % len(layers) for n in record})


def _are_numbers(record: Any) -> bool:
    if isinstance(record, (str, Pattern)):
        return False
    if not isinstance(record, Iterable):
        raise BadText(
            f"record_layer_outputs={record!r} is not known; give True, False, the numbers of layers {{0, 30}}, "
            "a pattern or several."
        )
    return all(isinstance(each, int) and not isinstance(each, bool) for each in record)
