"""Component dumps in Quamba's layout: `mode_2-1_layer_0_ssm_input.npy`, points of their layer.

    component_in("mode_2-1_layer_0_ssm_input.npy")      # ('2-1', Point('layers.0.ssm:input'))
    components_of(points, stack)[Point("layers.0.ssm", "input")]    # where a live model's run has it

The convolution is `conv`, the scan `ssm`; what the scan takes is u. A component whose value is INT8 codes is written as
the floats they stand for, so that modes compare; the statistics state the scale.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from layerscope.errors import Unsupported
from layerscope.points import Leaf, Moment, Point, Side

if TYPE_CHECKING:
    from layerscope.store.layouts.convert import Job
    from layerscope.store.run import Entry

# What each is called in a model: here and in transformers, and by this layout itself.
COMPONENTS = {"conv": ("conv1d", "conv"), "ssm": ("scan", "ssm")}
_SIDES: tuple[Side, ...] = ("input", "output")

_WORD = rf"layer_(\d{{1,9}})_({'|'.join(COMPONENTS)})_(input|output)"
_FILE = re.compile(rf"mode_(.+)_{_WORD}\.npy", re.DOTALL)
_KEY = re.compile(_WORD)


@dataclass(frozen=True, slots=True)
class Component:
    """Where a run has a component's value: one point, or the codes and the scale of a value in INT8."""

    point: Point
    scale: Point | None = None


def component_in(name: str) -> tuple[str, Point] | None:
    """Return the mode and the point that a file's name speaks of; None when it is no component's."""
    match = _FILE.fullmatch(name)
    return None if match is None else (match[1], _point(match[2], match[3], match[4]))


def entry_in(key: str) -> Point | None:
    """Return the point of an entry `layer_0_ssm_input` of a statistics file; None for any other."""
    match = _KEY.fullmatch(key)
    return None if match is None else _point(*match.groups())


def key_of(point: Point) -> str:
    """Return the name of a component in statistics files.

    >>> key_of(Point("layers.0.ssm", "input"))
    'layer_0_ssm_input'
    """
    _, layer, word = point.name.split(".")
    return f"layer_{layer}_{word}_{point.side}"


def file_of(mode: str, point: Point) -> str:
    """Return the name of a component's file."""
    return f"mode_{mode}_{key_of(point)}.npy"


def components_of(points: Sequence[Point], layers: Mapping[int, str]) -> dict[Point, Component]:
    """Find the components of these layers (names by depth) among the points of a run."""
    found: dict[Point, Component] = {}
    there = set(points)
    for depth, layer in layers.items():
        inside = dict.fromkeys(p.name for p in points if p.name.startswith(f"{layer}.") and not p.op)
        for word, names in COMPONENTS.items():
            for name in (n for n in inside if n.rpartition(".")[2] in names):
                for side in _SIDES:
                    value = _value(there, name, side)
                    if value is not None:
                        found.setdefault(Point(f"layers.{depth}.{word}", side), value)
    return found


def written_entry(job: Job, component: Component) -> tuple[Entry | None, dict[str, Any]]:
    """Return the record to write, and what the statistics say of it beside its numbers."""
    entry = job.one(component.point)
    if entry is None or component.scale is None or entry.dtype is None:
        return entry, {}
    from layerscope.store.memory import MemoryRun

    scales = {float(each.tensor()) for each in job.entries(component.scale)}
    if len(scales) != 1:
        raise Unsupported(
            f"{component.point} has codes of {len(scales)} scales ({component.scale}): they stand for floats of one"
        )
    floats = MemoryRun()
    (scale,) = scales
    floats.add(component.point, Moment(), tensor=entry.tensor().float() * scale)
    return next(iter(floats.records())), {"recorded_dtype": entry.dtype, "scale": scale}


def _value(there: set[Point], name: str, side: Side) -> Component | None:
    leaves: tuple[Leaf, ...] = ((), (0,))
    for leaf in leaves:
        if Point(name, side, leaf) in there:
            return Component(Point(name, side, leaf))
        codes, scale = Point(name, side, (*leaf, "codes")), Point(name, side, (*leaf, "scale"))
        if codes in there and scale in there:
            return Component(codes, scale)
    return None


def _point(layer: str, word: str, side: str) -> Point:
    return Point(f"layers.{int(layer)}.{word}", side)  # type: ignore[arg-type]
