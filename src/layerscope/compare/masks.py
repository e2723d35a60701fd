"""Masked values: a dtype's lowest number, or -1e9, where minus infinity is meant.

    if masked(metrics):
        metrics = measure(Values(unmasked(reference)), Values(unmasked(candidate)))

Beside such a number every other value vanishes: masked scores would agree whatever the rest holds. So it counts as
minus infinity, which no sum takes in, and which two kernels with a lowest number of their own have in the same places.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import TYPE_CHECKING

from layerscope.compare.metrics import Metrics
from layerscope.store import Entry

if TYPE_CHECKING:
    import torch

__all__ = ["masked", "unmasked"]

# No activation is that low; float16 cannot go lower than 65504, and is masked with that.
_LOWEST = {"float16": -6e4, "bfloat16": -1e8, "float32": -1e8, "float64": -1e8}


def masked(metrics: Metrics) -> bool:
    """Tell whether both sides are masked, and not both with infinities already."""
    sides = (metrics.reference, metrics.candidate)
    low = [side.min <= _LOWEST.get(side.dtype, -math.inf) for side in sides]
    return not metrics.bitwise and any(low) and all(a or side.neginf for a, side in zip(low, sides, strict=True))


def unmasked(entry: Entry) -> Entry:
    """Return a record whose masked values are read as minus infinity."""
    where = (entry.point, entry.moment, entry.dtype, entry.shape, entry.nbytes)
    return _Unmasked(*where, entry._reader, entry._row)


class _Unmasked(Entry):
    def pieces(self, items: int) -> Iterator[torch.Tensor]:
        """Go through the values, the masked ones as minus infinity."""
        lowest = _LOWEST.get(self.dtype or "")
        for piece in super().pieces(items):
            yield piece if lowest is None else piece.masked_fill(piece <= lowest, -math.inf)
