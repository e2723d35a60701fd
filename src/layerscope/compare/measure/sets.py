"""Rows of integers as sets: which experts a token went to, in whatever order they are listed.

    sets = SetCounts(width)
    sets.add(reference, candidate)        # flat integers, in order
    sets.result()

A tensor comes in parts, and a row may be cut by them.
"""

from __future__ import annotations

import math
from typing import final

import numpy as np

from layerscope.compare.measure.metrics import Sets
from layerscope.stats.tensor_views import Array


@final
class SetCounts:
    """How rows of integers differ as sets; a member that occurs twice counts twice."""

    def __init__(self, width: int) -> None:
        self._width = width
        self._rest: tuple[Array, Array] | None = None
        self._rows = self._changed = self._reordered = self._shared = 0

    def add(self, reference: Array, candidate: Array) -> None:
        """Take flat integers of both sides, equally many; a row may come in parts."""
        if self._rest is not None:
            reference, candidate = (
                np.concatenate(pair) for pair in zip(self._rest, (reference, candidate), strict=True)
            )
        whole = reference.size // self._width * self._width
        self._rest = (reference[whole:].copy(), candidate[whole:].copy()) if whole < reference.size else None
        if not whole:
            return
        r, c = (side[:whole].reshape(-1, self._width) for side in (reference, candidate))
        shared = _shared(r, c)
        changed = shared < self._width
        self._rows += len(r)
        self._changed += int(np.count_nonzero(changed))
        self._reordered += int(np.count_nonzero(~changed & (r != c).any(axis=1)))
        self._shared += int(shared.sum())

    def result(self) -> Sets:
        """Return the counts."""
        overlap = self._shared / (self._rows * self._width) if self._rows else math.nan
        return Sets(self._rows, self._changed, self._reordered, overlap)


def _shared(r: Array, c: Array) -> Array:
    """How many members each row has in common with its other side: equal ones side by side, counted for each side."""
    rows, width = r.shape
    both = np.concatenate([r, c], axis=1)
    order = both.argsort(axis=1, kind="stable")
    members = np.take_along_axis(both, order, axis=1)
    kinds = np.zeros(both.shape, np.int64)
    np.cumsum(members[:, 1:] != members[:, :-1], axis=1, out=kinds[:, 1:])
    kinds += np.arange(rows)[:, None] * 2 * width
    counts = [np.bincount(kinds[mine], minlength=both.size) for mine in (order < width, order >= width)]
    shared: Array = np.minimum(*counts).reshape(rows, 2 * width).sum(axis=1)
    return shared
