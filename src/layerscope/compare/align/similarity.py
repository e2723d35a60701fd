"""How far the values of two points lie apart, told from a look at each: enough to say which leaf is which.

apart = Similarity({point: entry}, {other: entry})
apart(point, other)                                # 0.0: the same values
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import NamedTuple

import numpy as np

from layerscope.compare.align.run_points import Form
from layerscope.compare.measure.operands import operand
from layerscope.compare.run_statistics import at_least
from layerscope.errors import LayerscopeError
from layerscope.points import Point
from layerscope.stats.tensor_views import Array
from layerscope.store import Entry

_LOOK = 1 << 14  # values of each leaf are looked at, the first ones
_ORDER = 2.0**-10  # what the order of the values in a row counts, beside the values


def form_of(entry: Entry) -> Form | None:
    """Return the shape and the kind of numbers of a record, from its statistics where it has no tensor.

    A runtime may have whole numbers of another width, and bytes for truth values: they are one kind.
    """
    dtype, shape = entry.dtype, entry.shape
    if dtype is None and (summary := entry.summary) is not None:
        dtype, shape = summary.dtype, summary.shape
    if dtype is None or shape is None:
        return None
    whole = dtype.startswith(("int", "uint", "bool"))
    return tuple(shape), "whole numbers" if whole else "complex numbers" if dtype.startswith("complex") else "floats"


class Similarity:
    """How far the values of two points lie apart, by the first record of each.

    0 is equal; what cannot be read is infinitely far. The values of a row count more than their order: two runtimes
    list the choices of a top-k, and what belongs to them, as they like.
    """

    def __init__(self, reference: Mapping[Point, Entry], candidate: Mapping[Point, Entry]) -> None:
        self._sides = (reference, candidate)
        self._looked: dict[tuple[int, Point], _Looked] = {}

    def __call__(self, reference: Point, candidate: Point) -> float:
        """Return how far apart they are."""
        mine, theirs = self._sides[0][reference], self._sides[1][candidate]
        try:
            if mine.dtype is not None and theirs.dtype is not None:
                a, b = self._look(0, reference), self._look(1, candidate)
                return _apart(a.in_rows, b.in_rows) + _ORDER * _apart(a.values, b.values)
            ours, others = mine.summary, theirs.summary
            if ours is not None and others is not None:
                bound = at_least(ours, others)
                return math.inf if math.isnan(bound) else bound
        except LayerscopeError:  # a damaged record is told when it is measured
            pass
        return math.inf

    def _look(self, side: int, point: Point) -> _Looked:
        if (side, point) not in self._looked:
            self._looked[side, point] = _look(self._sides[side][point])
        return self._looked[side, point]


class _Looked(NamedTuple):
    """The first values of a tensor, as they come and sorted within each row."""

    values: Array
    in_rows: Array


def _look(entry: Entry) -> _Looked:
    side = operand(entry)
    items = next(side.chunks(), None)
    values = np.empty(0) if items is None else np.array(side.values(items[:_LOOK]))
    values = np.abs(values).astype(np.float64) if values.dtype.kind == "c" else values.astype(np.float64)
    values = np.where(np.isfinite(values), values, 0.0)
    width = side.shape[-1] if side.shape else 1
    if not 0 < width <= values.size:
        return _Looked(values, np.sort(values))
    values = values[: values.size // width * width]
    return _Looked(values, np.sort(values.reshape(-1, width), axis=1).reshape(-1))


def _apart(a: Array, b: Array) -> float:
    size = max(float(np.linalg.norm(a)), float(np.linalg.norm(b)))
    return float(np.linalg.norm(a - b)) / size if size else 0.0
