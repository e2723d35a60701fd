"""Attention masks, and masked values: what may be seen is compared, whatever dtype, sign and shape say it.

    if is_mask(reference) and is_mask(candidate):
        seen_alike(reference, candidate)

A dtype's lowest number, or -1e9, stands for minus infinity: beside it every other value would vanish. Masked scores are
measured with such numbers as minus infinity, which no sum takes in.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import TYPE_CHECKING

from layerscope.compare.measure.metrics import Metrics
from layerscope.store import Entry

if TYPE_CHECKING:
    import torch


# No activation is that low; float16 cannot go lower than 65504, and is masked with that.
_LOWEST = {"float16": -6e4, "bfloat16": -1e8, "float32": -1e8, "float64": -1e8}
_MOST = 1 << 26  # values of a mask that is looked at


def is_mask(entry: Entry) -> bool:
    """Tell whether a record is a mask: by its name, and where it is of floating-point numbers by its values."""
    last = next((str(part) for part in reversed(entry.point.leaf) if isinstance(part, str)), "")
    shape = entry.shape
    if entry.dtype is None or not shape or math.prod(shape) > _MOST:
        return False
    unnamed = len(shape) == 4 and shape[1] == 1 and shape[-1] > 1 and entry.dtype in _LOWEST
    if "mask" not in last and not unnamed:
        return False
    if entry.dtype not in _LOWEST:
        return True
    values = entry.tensor()
    hidden = values <= _LOWEST[entry.dtype] / 4
    return bool(((values == 0) | hidden).all()) and ("mask" in last or bool(hidden.any()))


def seen_alike(reference: Entry, candidate: Entry) -> tuple[int, int] | None:
    """Return how many positions one side sees and the other does not, of how many; None where shapes do not fit."""
    import torch

    one, two = _seen(reference), _seen(candidate)
    if one.ndim != two.ndim:  # a padding mask beside a whole one: what it hides is hidden there for the last token
        wide, narrow = (one, two) if one.ndim > two.ndim else (two, one)
        if narrow.ndim != 2 or wide.ndim != 4 or wide.shape[-1] != narrow.shape[-1]:
            return None
        one, two = wide[:, :1, -1], narrow[:, None]
    try:
        one, two = torch.broadcast_tensors(one, two)  # type: ignore[no-untyped-call]
    except RuntimeError:
        return None
    return int((one != two).sum()), one.numel()


def _seen(entry: Entry) -> torch.Tensor:
    values = entry.tensor()
    return values > _LOWEST[entry.dtype] / 4 if entry.dtype in _LOWEST else values != 0


def masked(metrics: Metrics) -> bool:
    """Tell whether both sides are masked, and not both with infinities already."""
    sides = (metrics.reference, metrics.candidate)
    low = [side.min <= _LOWEST.get(side.dtype, -math.inf) for side in sides]
    return not metrics.bitwise and any(low) and all(a or side.neginf for a, side in zip(low, sides, strict=True))


def unmasked(entry: Entry) -> Entry:
    """Return a record whose masked values are read as minus infinity."""
    where = (entry.point, entry.moment, entry.dtype, entry.shape, entry.nbytes)
    return _Unmasked(*where, entry._run, entry._at)


class _Unmasked(Entry):
    def pieces(self, items: int) -> Iterator[torch.Tensor]:
        """Go through the values, the masked ones as minus infinity."""
        lowest = _LOWEST.get(self.dtype or "")
        for piece in super().pieces(items):
            yield piece if lowest is None else piece.masked_fill(piece <= lowest, -math.inf)
