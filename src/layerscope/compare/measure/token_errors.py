"""Relative L2 error token by token.

    tokens = TokenErrors()
    tokens.add(errors, powers, first=0)      # sums of squares of d and of the reference, in order
    tokens.result()

A tensor comes in parts, and a token may be cut by them.
"""

from __future__ import annotations

import math
from typing import final

import numpy as np

from layerscope.compare.measure.metrics import Tokens
from layerscope.stats.sketch import Sketch
from layerscope.stats.tensor_views import Array

_LARGEST = 16
_EXACT = 1 << 20  # tokens up to which median and 90th percentile are exact; beyond, they are within the sketch's bound


@final
class TokenErrors:
    """Per-token errors, as the sums of squares come in; a token may come in parts."""

    def __init__(self) -> None:
        self._first = 0  # the token that the sums held back belong to
        self._held = (0.0, 0.0)
        self._errors: list[Array] = []
        self._kept = 0
        self._folded: Sketch | None = None
        self._count = 0
        self._largest: list[tuple[int, float]] = []

    def add(self, errors: Array, powers: Array, *, first: int) -> None:
        """Take sums of squares of consecutive tokens, from number `first` on; the last may not be whole yet."""
        if not errors.size:
            return
        if first == self._first:
            errors[0] += self._held[0]
            powers[0] += self._held[1]
        else:
            self._take(np.array([self._held[0]]), np.array([self._held[1]]))
        self._take(errors[:-1], powers[:-1])
        self._first, self._held = first + errors.size - 1, (float(errors[-1]), float(powers[-1]))

    def _take(self, errors: Array, powers: Array) -> None:
        if not errors.size:
            return
        with np.errstate(all="ignore"):
            relative = np.where(errors == 0, 0.0, np.sqrt(errors / np.where(powers == 0, np.nan, powers)))
        known = relative[~np.isnan(relative)]
        worst = np.argsort(-relative, kind="stable")[: min(known.size, _LARGEST)]  # NaN sorts last
        found = [(self._count + int(at), float(relative[at])) for at in worst]
        self._largest = sorted([*self._largest, *found], key=lambda pair: -pair[1])[:_LARGEST]
        self._count += errors.size
        self._errors.append(known)
        self._kept += known.size
        if self._kept > _EXACT:
            more = Sketch.of(np.concatenate(self._errors))
            self._folded = more if self._folded is None else self._folded + more
            self._errors, self._kept = [], 0

    def result(self, *, compared: int) -> Tokens:
        """Return the picture of all tokens; a token whose reference is zero and whose d is not has no error."""
        self._take(np.array([self._held[0]]), np.array([self._held[1]]))
        if not self._largest or not compared:
            return Tokens(self._count, 0, math.nan, math.nan, math.nan)
        worst, error = self._largest[0]
        errors = np.concatenate(self._errors) if self._errors else np.empty(0)
        if self._folded is None:
            median, p90 = np.percentile(errors, (50, 90)).tolist()
        else:
            sketch = self._folded + Sketch.of(errors)
            median, p90 = (sketch.quantile(q, high=error) for q in (0.5, 0.9))
        return Tokens(self._count, worst, error, median, p90, tuple(self._largest))
