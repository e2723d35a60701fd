"""What `record_layer_outputs` asks for, as points of the model.

asked(model, True, layers)                  # every layer
asked(model, {0, 30, -1}, layers)           # these
asked(model, [0, "**.mlp"], layers)         # and what patterns name
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from numbers import Integral
from typing import Any, NamedTuple

from torch import nn

from layerscope.errors import BadText, NoSuchPoint, Unsupported
from layerscope.patterns import Pattern, Place, select, split
from layerscope.points import Point
from layerscope.runtimes import eager


class Asked(NamedTuple):
    """The points, and of which layers only the hidden states are meant, the first tensor of what they return."""

    points: list[Point]
    states_alone: frozenset[str] = frozenset()


def asked(model: nn.Module, record: Any, layers: list[str]) -> Asked:
    """Read `record_layer_outputs`; what it names must be there."""
    if record is False:
        return Asked([])
    parts = list(range(len(_known(model, layers)))) if record is True else _parts(record)
    patterns = [part for part in parts if isinstance(part, (str, Pattern))]
    numbered = [layers[n] for n in _numbers(model, parts, layers)]
    if not patterns:
        return Asked([Point(layer) for layer in dict.fromkeys(numbered)], frozenset(numbered))
    if split(patterns).ops:
        raise Unsupported("operations are not tapped at compile time; name modules.")
    shared, places = eager.shared(model), eager.points(model)
    chosen = select([*(str(Point(layer)) for layer in numbered), *patterns], places)
    points = [Point(shared.get(p.name, p.name), p.side, p.leaf) for p in chosen]
    if any(point.side.startswith("grad") for point in points):
        raise Unsupported(
            "a compiled model computes a forward alone, so gradients are not tapped; record them eagerly."
        )
    return Asked(list(dict.fromkeys(points)), frozenset(numbered) - _named(patterns, places))


def _parts(record: Any) -> list[int | str | Pattern]:
    """Return what is asked for one by one, whatever holds it: an iterator gives its items once."""
    one = isinstance(record, (str, Pattern))
    parts = [record] if one else list(record) if isinstance(record, Iterable) else None
    if parts is None or not all(isinstance(each, (str, Pattern)) or _is_number(each) for each in parts):
        raise BadText(
            f"record_layer_outputs={record!r} is not known; give True, False, the numbers of layers {{0, 30}}, "
            "a pattern, or several of either."
        )
    if not parts:
        raise BadText(
            f"record_layer_outputs={record!r} asks for nothing; give False to compile without taps, True for every "
            "layer, the numbers of layers or patterns."
        )
    return parts


def _is_number(part: object) -> bool:
    return isinstance(part, Integral) and not isinstance(part, bool)


def _known(model: nn.Module, layers: list[str]) -> list[str]:
    if not layers:
        raise NoSuchPoint(
            f"{type(model).__name__} has no list of like blocks that run one after the other to take for its layers; "
            "name them: record_layer_outputs='blocks.*'."
        )
    return layers


def _numbers(model: nn.Module, parts: Sequence[int | str | Pattern], layers: list[str]) -> list[int]:
    numbers = [int(part) for part in parts if not isinstance(part, (str, Pattern))]
    count = len(_known(model, layers)) if numbers else 0
    wrong = [n for n in numbers if not -count <= n < count]
    if wrong:
        raise NoSuchPoint(f"there is no layer {wrong[0]}: {type(model).__name__} has {count}, from 0.")
    return sorted({n % count for n in numbers})


def _named(patterns: list[str | Pattern], places: list[Place]) -> set[str]:
    """Return the modules that patterns name themselves, and so all that they return."""
    wanted = [pattern for pattern in split(patterns).modules if not pattern.exclude]
    return {point.name for point in select(wanted, places) if point.side == "output"} if wanted else set()
