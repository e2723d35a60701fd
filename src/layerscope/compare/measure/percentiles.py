"""Percentiles to the last bit, in bounded memory: a second look where they lie, by the bits of the numbers.

    exactly(lambda: parts_of_magnitudes, (50, 90, 95, 99))

The bits of non-negative floats are in the order of the numbers. Each look counts stretches of them and narrows down to
those that hold a wanted one, until what is left is few enough to be sorted.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from typing import Final

import numpy as np

from layerscope.stats.tensor_views import Array

_FEW: Final = 1 << 20  # numbers that are sorted at once
_STRETCHES: Final = 1 << 16  # into which what holds more is cut
_BEYOND: Final = int(np.array(np.inf).view(np.uint64))  # of every finite number, the bits are below these


def exactly(
    magnitudes: Callable[[], Iterable[Array]], count: int, percents: Sequence[float], *, few: int = _FEW
) -> tuple[float, ...]:
    """Return numpy's linear percentiles of `count` finite, non-negative float64s, which come in parts at each call."""
    if not count:
        return (math.nan,) * len(percents)
    ranks = [percent / 100 * (count - 1) for percent in percents]
    wanted = {min(math.floor(rank) + more, count - 1) for rank in ranks for more in (0, 1)}
    found = _numbers(magnitudes, count, sorted(wanted), few)
    return tuple(_between(found, rank, count) for rank in ranks)


def _between(found: dict[int, float], rank: float, count: int) -> float:
    below = math.floor(rank)
    low, high, share = found[below], found[min(below + 1, count - 1)], rank - below
    # As numpy does: from the nearer end, so that equal neighbours give themselves.
    return high - (high - low) * (1 - share) if share >= 0.5 else low + (high - low) * share


def _numbers(magnitudes: Callable[[], Iterable[Array]], count: int, wanted: list[int], few: int) -> dict[int, float]:
    """Return the wanted order statistics, from stretches of bits (start, stop) that grow shorter."""
    found: dict[int, float] = {}
    stretches = {(0, _BEYOND): (0, count)}  # the numbers before it, and in it
    while stretches:
        holding = {
            at: (before, inside)
            for at, (before, inside) in stretches.items()
            if any(before <= rank < before + inside for rank in wanted)
        }
        single = {at for at in holding if at[1] - at[0] == 1}
        for at in single:
            before, inside = holding.pop(at)
            value = float(np.array(at[0], np.uint64).view(np.float64))
            found |= {rank: value for rank in wanted if before <= rank < before + inside}
        if not holding:
            break
        if sum(inside for _, inside in holding.values()) <= few:
            return found | _sorted(magnitudes, holding, wanted)
        stretches = _narrowed(magnitudes, holding)
    return found


def _sorted(
    magnitudes: Callable[[], Iterable[Array]], holding: dict[tuple[int, int], tuple[int, int]], wanted: list[int]
) -> dict[int, float]:
    kept: dict[tuple[int, int], list[Array]] = {at: [] for at in holding}
    for part in magnitudes():
        bits = part.view(np.uint64)
        for start, stop in holding:
            kept[start, stop].append(part[(bits >= start) & (bits < stop)])
    found: dict[int, float] = {}
    for at, (before, inside) in holding.items():
        values = np.sort(np.concatenate(kept[at]))
        found |= {rank: float(values[rank - before]) for rank in wanted if before <= rank < before + inside}
    return found


def _narrowed(
    magnitudes: Callable[[], Iterable[Array]], holding: dict[tuple[int, int], tuple[int, int]]
) -> dict[tuple[int, int], tuple[int, int]]:
    widths = {at: -(-(at[1] - at[0]) // _STRETCHES) for at in holding}
    counts = {at: np.zeros(_STRETCHES, np.int64) for at in holding}
    for part in magnitudes():
        bits = part.view(np.uint64)
        for start, stop in holding:
            inside = bits[(bits >= start) & (bits < stop)] - np.uint64(start)
            places = (inside // np.uint64(widths[start, stop])).astype(np.int64)
            counts[start, stop] += np.bincount(places, minlength=_STRETCHES)
    return {
        (start + at * width, min(start + (at + 1) * width, stop)): (before + int(ends[at] - own[at]), int(own[at]))
        for (start, stop), (before, _) in holding.items()
        for width, own in ((widths[start, stop], counts[start, stop]),)
        for ends in (np.cumsum(own),)
        for at in np.flatnonzero(own).tolist()
    }
