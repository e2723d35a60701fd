"""The verbs of `numba_engine` in numpy alone, block by block in one thread: the same numbers, slower.

    moments(items)
    full(items, 0, tables)

Types of 16 bits are counted value by value first (65 536 counters lose nothing), which leaves little to compute.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from functools import cache, reduce
from typing import Any

import numpy as np

from layerscope.stats.channels import Adding
from layerscope.stats.engine import NOTHING, Sweep, joined
from layerscope.stats.fingerprints import fingerprints as of_terms
from layerscope.stats.fingerprints import mixed
from layerscope.stats.sketch import LOWEST, STEPS
from layerscope.stats.tensor_views import Array

_BLOCK = 1 << 16  # items at a time: their copies as float64 stay in the second-level cache
_COUNTED = 1 << 18  # items of 16 bits at a time: each time costs as much as adding up 65 536 counters
_WORTH_COUNTING = 1 << 14  # items of 16 bits from which counters are cheaper than floats


class _NumpyScratch(threading.local):
    """Two arrays per thread, because fresh memory of this size costs more than the work done in it."""

    def __init__(self) -> None:
        self.one, self.other = np.empty(_COUNTED, np.uint64), np.empty(_COUNTED, np.uint64)

    def places(self, codes: Array) -> Array:
        """The codes as indices."""
        places = self.one.view(np.int64)[: codes.size]
        places[:] = codes
        return places


_scratch = _NumpyScratch()


def moments(items: Array) -> Sweep:
    """Sweep contiguous items for counts, sums and extremes."""
    if items.itemsize == 2 and items.size >= _WORTH_COUNTING:
        return _weighed(*_codes(items), items.dtype)
    return reduce(joined, (_swept(*_floats(block)) for block in _blocks(items)), NOTHING)


def careful(items: Array, centre: float) -> Sweep:
    """Sweep the finite items for sums and squares of their distance from `centre`."""
    if items.itemsize == 2 and items.size >= _WORTH_COUNTING:
        return _weighed(*_codes(items), items.dtype, centre)
    return reduce(joined, (_swept(*_floats(block), centre) for block in _blocks(items)), NOTHING)


def full(items: Array, start: int, tables: Array, adding: Adding | None = None) -> Sweep:
    """Sweep for everything: `moments`, buckets into `tables`, fingerprints from position `start` on, and channels."""
    if items.itemsize == 2 and items.size >= _WORTH_COUNTING:
        codes, counts = _codes(items)
        np.add.at(tables, _float_bits(items.dtype)[codes] >> 17, counts)
        swept = _weighed(codes, counts, items.dtype)
    else:
        swept = NOTHING
        for block in _blocks(items):
            values, bits = _floats(block)
            keys = bits >> bits.dtype.type(46 if bits.itemsize == 8 else 17)
            if block.size < tables.size // 4:
                np.add.at(tables, keys, 1)
            else:
                tables += np.bincount(_scratch.places(keys), minlength=tables.size)
            swept = joined(swept, _swept(values, bits))
    if adding is not None:
        clean = not swept.nan + swept.posinf + swept.neginf
        at = start
        for block in _blocks(items, adding.block):
            channels(_floats(block)[0], at, adding, clean=clean)
            at += block.size
    free, placed = fingerprints(items.view(f"u{items.itemsize}"), start)
    return swept._replace(free=free, placed=placed)


def fingerprints(words: Array, start: int) -> tuple[int, int]:
    """Return both fingerprints of words that stand at positions `start`, `start` + 1 and so on."""
    free = placed = at = 0
    narrow = words.itemsize <= 2
    for block in _blocks(words, _COUNTED if narrow else _BLOCK):
        one, other = _scratch.one[: block.size], _scratch.other[: block.size]
        if narrow:
            terms = _mixed_codes().take(_scratch.places(block), out=other, mode="clip")
        else:
            terms = mixed(block, out=one, spare=other)
        more_free, more_placed = of_terms(terms, start + at)
        free, placed, at = free + more_free, placed + more_placed, at + block.size
    return free % 2**64, placed % 2**64


def tally(items: Array) -> Array:
    """Count each of the 256 bytes."""
    counts = np.zeros(256, np.int64)
    for block in _blocks(items, _COUNTED):
        counts += np.bincount(_scratch.places(block), minlength=256)
    return counts


def channels(values: Array, start: int, adding: Adding, *, clean: bool) -> None:
    """Add contiguous values that stand from position `start` on to their channels; `clean` says that all are finite."""
    _, width, inner, table = adding.laid
    lead = min(values.size, -start % (width if inner == 1 else inner))
    last = values.size - (values.size - lead) % (width if inner == 1 else inner)
    if not clean:
        lead = last = 0
    _scatter(values[:lead], start, width, inner, table)
    if lead < last:
        exact = values[lead:last].reshape(-1, width if inner == 1 else inner).astype(np.float64)
        axis = 0 if inner == 1 else 1
        added = np.stack([np.full(exact.shape[1 - axis], exact.shape[axis], np.float64), *_powers(exact, axis)])
        if inner == 1:
            np.maximum(table[1], added[1], out=added[1])
            table[[0, 2, 3, 4, 5]] += added[[0, 2, 3, 4, 5]]
            table[1] = added[1]
        else:
            _put(added, (start + lead) // inner + np.arange(exact.shape[0]), table)
    _scatter(values[last:], start + last, width, inner, table)


@np.errstate(all="ignore")
def _powers(exact: Array, axis: int) -> list[Array]:
    squares = exact * exact
    size = np.abs(exact).max(axis=axis)
    one, two, three = exact.sum(axis=axis), squares.sum(axis=axis), (squares * exact).sum(axis=axis)
    return [size, one, two, three, np.square(squares, out=squares).sum(axis=axis)]


@np.errstate(all="ignore")
def _scatter(values: Array, start: int, width: int, inner: int, table: Array) -> None:
    """Add items one by one, and leave out those that are not finite."""
    for at in range(0, values.size, _BLOCK):
        exact = values[at : at + _BLOCK].astype(np.float64)
        places = (start + at + np.arange(exact.size)) // inner
        finite = np.isfinite(exact)
        exact, places = exact[finite], places[finite]
        squares = exact * exact
        _put(np.stack([np.ones(exact.size), np.abs(exact), exact, squares, squares * exact, squares**2]), places, table)


def _put(added: Array, places: Array, table: Array) -> None:
    places = places % table.shape[1]
    np.maximum.at(table[1], places, added[1])
    for row in (0, 2, 3, 4, 5):
        table[row] += np.bincount(places, added[row], minlength=table.shape[1])


def tables(*, wide: bool) -> Array:
    """Return bucket counters, all zero: for float64 when `wide`, else for float32 and narrower."""
    return np.zeros(1 << (18 if wide else 15), np.int64)


def drain(tables: Array, swept: Sweep, *, finite: int, wide: bool) -> tuple[Array, Array]:
    """Return keys and counts of the occupied buckets, ascending, and leave the tables zero."""
    half = tables.size // 2
    places = np.flatnonzero(tables > 0)
    counts = tables[places]
    tables[places] = 0
    magnitude = places % half - (((1023 if wide else 127) + LOWEST) * STEPS - 1)  # below 1: read as zero
    usable = (magnitude > 0) & (places % half < half - STEPS)  # above: not finite
    keys, counts = np.where(places < half, magnitude, -magnitude)[usable], counts[usable]
    near_zero = finite - int(counts.sum())
    if near_zero:
        keys, counts = np.r_[keys, 0], np.r_[counts, near_zero]
    order = np.argsort(keys)
    return keys[order].astype(np.int32), counts[order]


def _blocks(items: Array, size: int = _BLOCK) -> Iterator[Array]:
    for start in range(0, items.size, size):
        yield items[start : start + size]


def _floats(items: Array) -> tuple[Array, Array]:
    """Values and bits, as float32 (float64 for float64)."""
    if items.itemsize == 2:
        bits = _float_bits(items.dtype).take(_scratch.places(items.view(np.uint16)))
        return bits.view(np.float32), bits
    return items, items.view(f"u{items.itemsize}")


@np.errstate(all="ignore")  # sums may overflow; a signalling NaN may turn quiet
def _swept(values: Array, bits: Array, centre: float | None = None) -> Sweep:
    size = bits.dtype.itemsize * 8
    infinity = 0x7FF << 52 if size == 64 else 0xFF << 23
    sign = 1 << size - 1
    signed, largest = int(bits.view(f"i{size // 8}").max()), int(bits.max())
    nan = posinf = neginf = 0
    zeros = int(np.count_nonzero(values == 0))
    if signed >= infinity or largest >= sign | infinity:
        magnitude = bits & bits.dtype.type(sign - 1)
        finite = magnitude < infinity
        nan = int(np.count_nonzero(magnitude > infinity))
        posinf = int(np.count_nonzero(bits == infinity))
        neginf = values.size - int(np.count_nonzero(finite)) - nan - posinf
        values, bits = values[finite], bits[finite]
        if not values.size:
            return NOTHING._replace(nan=nan, posinf=posinf, neginf=neginf)
        signed, largest = int(bits.view(f"i{size // 8}").max()), int(bits.max())
    exact = _scratch.one.view(np.float64)[: values.size]
    exact[:] = values
    total = float(exact.sum())
    magnitude_sum = float(np.abs(exact, out=exact).sum())
    if centre is not None:
        exact[:] = values
        exact -= centre
        total = float(exact.sum())
    exact *= exact
    squares = float(exact.sum())
    return Sweep(total, squares, magnitude_sum, signed, largest, int(bits.min()), zeros, nan, posinf, neginf)


# Counters for 16 bits ---------------------------------------------------------------------------


def _codes(items: Array) -> tuple[Array, Array]:
    """Which of the 65 536 codes occur, and how often."""
    counts = np.zeros(1 << 16, np.int64)
    for block in _blocks(items.view(np.uint16), _COUNTED):
        counts += np.bincount(_scratch.places(block), minlength=1 << 16)
    codes = np.flatnonzero(counts > 0)
    return codes, counts[codes]


@np.errstate(all="ignore")
def _weighed(codes: Array, counts: Array, item: np.dtype[Any], centre: float = 0.0) -> Sweep:
    bits = _float_bits(item)[codes]
    once = _swept(bits.view(np.float32), bits)
    values = bits.view(np.float32).astype(np.float64)
    nan, infinite = np.isnan(values), np.isinf(values)
    finite = ~(nan | infinite)
    exact, weights = values[finite], counts[finite]
    distance = exact - centre
    return once._replace(
        sum=float((distance * weights).sum()),
        squares=float((distance * distance * weights).sum()),
        magnitude=float((np.abs(exact) * weights).sum()),
        zeros=int(counts[values == 0].sum()),
        nan=int(counts[nan].sum()),
        posinf=int(counts[infinite & (values > 0)].sum()),
        neginf=int(counts[infinite & (values < 0)].sum()),
    )


@cache
@np.errstate(all="ignore")
def _float_bits(item: np.dtype[Any]) -> Array:
    """The bits of float32 for each code: int16 items are float16, uint16 items bfloat16."""
    codes = np.arange(1 << 16, dtype=np.uint16)
    if item == np.int16:
        return codes.view(np.float16).astype(np.float32).view(np.uint32)
    return codes.astype(np.uint32) << np.uint32(16)


@cache
def _mixed_codes() -> Array:
    return mixed(np.arange(1 << 16, dtype=np.uint64))
