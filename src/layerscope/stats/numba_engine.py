"""The pass over a tensor's items, compiled by numba (the extra `fast`).

    moments(items)               # counts, sums and extremes
    full(items, 0, tables)       # and the buckets of the sketch, and both fingerprints

One thread, no GIL. A block of 1024 items stays in the first-level cache and is gone through several times, once for
each loop that LLVM turns into vectors by itself. `numpy_engine` has the same verbs and gives the same numbers.

numba's cache on disk notices changes of this file only. So all compiled code is here, and the constants that come
from elsewhere are part of the names under which it is kept.
"""

from __future__ import annotations

import threading
import zlib
from collections.abc import Callable, Iterator
from functools import partial, reduce
from importlib import import_module
from typing import Any

import numpy as np

from layerscope.stats.channels import Adding
from layerscope.stats.engine import NOTHING, Sweep, joined
from layerscope.stats.fingerprints import BLOCK, MIX_ADD, MIX_FIRST, MIX_SECOND, WEIGHTS
from layerscope.stats.sketch import LOWEST, STEPS
from layerscope.stats.tensor_views import Array

numba: Any = import_module("numba")  # as Any: what it compiles is not Python to a type checker

_CONSTANTS = zlib.crc32(repr((BLOCK, MIX_FIRST, MIX_ADD, MIX_SECOND, LOWEST, STEPS)).encode())


def _compiled(function: Callable[..., Any], *, fastmath: set[str] | bool = False) -> Any:
    """Compile on first use, kept on disk where there is a place for it."""
    function.__qualname__ += f"_{_CONSTANTS:08x}"
    try:
        return numba.njit(nogil=True, cache=True, error_model="numpy", fastmath=fastmath)(function)
    except RuntimeError:  # numba found no cache directory it may write to
        return numba.njit(nogil=True, error_model="numpy", fastmath=fastmath)(function)


_added_up = partial(_compiled, fastmath={"contract", "reassoc"})  # the order of a sum, and nothing else, is free


# Counts, sums and extremes ----------------------------------------------------------------------

_ONE, _HALF = np.uint64(1), np.uint64(32)
_STRETCH = 4 * BLOCK  # items that stay in the first-level cache where nothing but counts and sums is wanted
_FIRST, _ADD, _SECOND = np.uint64(MIX_FIRST), np.uint64(MIX_ADD), np.uint64(MIX_SECOND)


@_added_up
def _sums(values: Any) -> Any:
    """Add finite values up: themselves, their squares and their magnitudes."""
    total = squares = magnitude = 0.0
    for i in range(values.size):
        x = np.float64(values[i])
        total += x
        squares += x * x
        magnitude += abs(x)
    return total, squares, magnitude


@_compiled
def _extremes(signed: Any, bits: Any) -> Any:
    """The extremes of the bits, taken as signed and as unsigned integers, and how many are those of a zero."""
    most, largest, smallest = signed[0], bits[0], bits[0]
    negative, zeros = -(1 << 63) if bits.itemsize == 8 else -(1 << 31), 0
    for i in range(bits.size):
        most = max(most, signed[i])
        largest = max(largest, bits[i])
        smallest = min(smallest, bits[i])
        zeros += (signed[i] == 0) | (signed[i] == negative)
    return most, largest, smallest, zeros


@_compiled
def _sifted(values: Any, signed: Any, bits: Any, centre: Any) -> Any:
    """Take the finite values for sums of their distance from `centre`, and count the others."""
    total = squares = magnitude = 0.0
    most, largest, smallest = np.int64(-(1 << 63)), np.uint64(0), np.uint64((1 << 64) - 1)
    zeros = nan = posinf = neginf = 0
    for i in range(values.size):
        x = np.float64(values[i])
        if abs(x) < np.inf:
            distance = x - centre
            total += distance
            squares += distance * distance
            magnitude += abs(x)
            most = max(most, np.int64(signed[i]))
            largest = max(largest, np.uint64(bits[i]))
            smallest = min(smallest, np.uint64(bits[i]))
            zeros += x == 0
        elif x > 0:
            posinf += 1
        elif x < 0:
            neginf += 1
        else:
            nan += 1
    return total, squares, magnitude, most, largest, smallest, zeros, nan, posinf, neginf


@_compiled
def _joined(a: Any, b: Any) -> Any:
    return (
        a[0] + b[0], a[1] + b[1], a[2] + b[2],
        max(a[3], b[3]), max(a[4], b[4]), min(a[5], b[5]),
        a[6] + b[6], a[7] + b[7], a[8] + b[8], a[9] + b[9],
    )  # fmt: skip


@_compiled
def _block(values: Any, signed: Any, bits: Any) -> Any:
    """Take every value for finite; where one was not, it is among the extremes of the bits, and all are sifted."""
    total, squares, magnitude = _sums(values)
    most, largest, smallest, zeros = _extremes(signed, bits)
    infinity = 0x7FF << 52 if bits.itemsize == 8 else 0xFF << 23
    if most >= infinity or largest >= np.uint64(infinity) | _ONE << np.uint64(8 * bits.itemsize - 1):
        return _sifted(values, signed, bits, 0.0)
    return (
        total, squares, magnitude, np.int64(most), np.uint64(largest), np.uint64(smallest), np.int64(zeros), 0, 0, 0,
    )  # fmt: skip


@_compiled
def _moments(values: Any, signed: Any, bits: Any) -> Any:
    total = _sifted(values[:0], signed, bits, 0.0)
    for at in range(0, values.size, _STRETCH):
        stop = min(values.size, at + _STRETCH)
        total = _joined(total, _block(values[at:stop], signed[at:stop], bits[at:stop]))
    return total


# Buckets and fingerprints -----------------------------------------------------------------------

_STRIDE = {False: 1 << 15, True: 1 << 18}  # buckets of either sign, of narrow and of wide floats
_PAD = 16  # counters between two tables, lest the same bucket of both share the low bits of its address


@_compiled
def _count(bits: Any, tables: Any) -> Any:
    """Add one to each item's bucket. Neighbours go to different tables, lest equal values wait for each other."""
    shift = np.uint64(46 if bits.itemsize == 8 else 17)
    for i in range(bits.size // 2):
        tables[0, bits[2 * i] >> shift] += 1
        tables[1, bits[2 * i + 1] >> shift] += 1
    if bits.size % 2:
        tables[0, bits[-1] >> shift] += 1


@_compiled
def _scrambled(number: Any) -> Any:
    x = number * _FIRST + _ADD
    x = (x ^ (x >> _HALF)) * _SECOND
    return x ^ (x >> _HALF)


@_compiled
def _block_fingerprints(words: Any, position: Any, weights: Any) -> Any:
    """Both fingerprints of words that lie within one block of weights."""
    free = block = np.uint64(0)
    weight = weights[position % BLOCK :]
    for i in range(words.size):
        mixed = _scrambled(np.uint64(words[i]))
        free += mixed
        block += mixed * weight[i]
    return free, block * (_scrambled(np.uint64(position // BLOCK)) | _ONE)


@_compiled
def _full(values: Any, signed: Any, bits: Any, words: Any, start: Any, weights: Any, tables: Any) -> Any:
    total = _sifted(values[:0], signed, bits, 0.0)
    free = placed = np.uint64(0)
    at = 0
    while at < values.size:
        stop = min(values.size, at + BLOCK - (start + at) % BLOCK)
        total = _joined(total, _block(values[at:stop], signed[at:stop], bits[at:stop]))
        _count(bits[at:stop], tables)
        more_free, more_placed = _block_fingerprints(words[at:stop], start + at, weights)
        free, placed = free + more_free, placed + more_placed
        at = stop
    return (*total, free, placed)


@_compiled
def _fingerprints(words: Any, start: Any, weights: Any) -> Any:
    free = placed = np.uint64(0)
    at = 0
    while at < words.size:
        stop = min(words.size, at + BLOCK - (start + at) % BLOCK)
        more_free, more_placed = _block_fingerprints(words[at:stop], start + at, weights)
        free, placed = free + more_free, placed + more_placed
        at = stop
    return free, placed


@_compiled
def _widened(items: Any, half: Any, values: Any, bits: Any) -> Any:
    """Fill in float32 and its bits, which lie in the same place; `half` says that items are float16, else bfloat16."""
    if not half:
        for i in range(items.size):
            bits[i] = np.uint32(items[i]) << np.uint32(16)
        return
    for i in range(items.size):
        item = np.uint32(items[i])
        bits[i] = (item & np.uint32(0x8000)) << np.uint32(16) | (item & np.uint32(0x7FFF)) << np.uint32(13)
    for i in range(items.size):  # so far, the exponents are too small by 112
        values[i] *= np.float32(2.0**112)
    for i in range(items.size):
        if bits[i] & np.uint32(0x7FFFFFFF) >= np.uint32(0x47800000):  # 65,536 stands for infinity and NaN
            bits[i] |= np.uint32(0x7F800000)


@_compiled
def _tally(items: Any, counts: Any) -> Any:
    tables = np.zeros((4, 256), np.int64)
    one, two, three, four = tables[0], tables[1], tables[2], tables[3]
    rest = items.size % 4
    for i in range(items.size // 4):
        one[items[4 * i]] += 1
        two[items[4 * i + 1]] += 1
        three[items[4 * i + 2]] += 1
        four[items[4 * i + 3]] += 1
    for i in range(items.size - rest, items.size):
        one[items[i]] += 1
    counts += one + two + three + four


@_compiled
def _drained(tables: Any, first: Any, low: Any, high: Any, finite: Any, keys: Any, counts: Any) -> Any:
    """Move the counts of some octaves into `keys`, ascending, and `counts`; return how many, and how many are zero.

    Octaves of positive numbers count up from 0, those of negative ones down from -1; `first` is the first bucket.
    """
    half = (tables.shape[1] - _PAD) // 2
    size, zero, seen = 0, 0, np.int64(0)
    for octave in range(low, high):
        if octave == 0:
            zero = size
            size += 1
        magnitude = (octave if octave >= 0 else -1 - octave) * STEPS
        start = first + magnitude if octave >= 0 else half + first + magnitude
        one, two = tables[0, start : start + STEPS], tables[1, start : start + STEPS]
        occupied = np.uint32(0)
        for i in range(STEPS):
            occupied |= one[i] | two[i]
        if occupied:
            for i in range(STEPS):
                step = i if octave >= 0 else STEPS - 1 - i
                count = np.int64(one[step]) + np.int64(two[step])
                if count:
                    keys[size], counts[size] = magnitude + step + 1 if octave >= 0 else -(magnitude + step + 1), count
                    size += 1
                    seen += count
            one[:] = 0
            two[:] = 0
    keys[zero], counts[zero] = 0, finite - seen
    if finite == seen:
        size -= 1
        for i in range(zero, size):
            keys[i], counts[i] = keys[i + 1], counts[i + 1]
    return size, finite - seen


# Channels ---------------------------------------------------------------------------------------
#
# A table has the rows of `channels.py`: finite, absmax, and the sums of four powers.


@_compiled
def _each(values: Any, start: Any, width: Any, inner: Any, table: Any) -> Any:
    """Add items one by one, and leave out those that are not finite."""
    finite, absmax, one, two, three, four = table[0], table[1], table[2], table[3], table[4], table[5]
    within, c = start % inner, start // inner % width
    for i in range(values.size):
        x = np.float64(values[i])
        size, square = abs(x), x * x
        if size < np.inf:
            finite[c] += 1
            absmax[c] = max(absmax[c], size)
            one[c] += x
            two[c] += square
            three[c] += square * x
            four[c] += square * square
        within += 1
        if within == inner:
            within = 0
            c += 1
            if c == width:
                c = 0


@_added_up
def _rows(values: Any, width: Any, absmax: Any, one: Any, two: Any, three: Any, four: Any) -> Any:
    """Add rows of finite items, four together: the sums are read and written once for all four.

    The loop over rows is in here with the other, because to slice a table costs as much as the sums of a short row.
    """
    for at in range(0, values.size, 4 * width):
        a, b = values[at : at + width], values[at + width : at + 2 * width]
        c, d = values[at + 2 * width : at + 3 * width], values[at + 3 * width : at + 4 * width]
        for i in range(width):
            w, x, y, z = np.float64(a[i]), np.float64(b[i]), np.float64(c[i]), np.float64(d[i])
            ww, xx, yy, zz = w * w, x * x, y * y, z * z
            size = absmax[i]
            size = abs(w) if abs(w) > size else size
            size = abs(x) if abs(x) > size else size
            size = abs(y) if abs(y) > size else size
            size = abs(z) if abs(z) > size else size
            absmax[i] = size
            one[i] += (w + x) + (y + z)
            two[i] += (ww + xx) + (yy + zz)
            three[i] += (ww * w + xx * x) + (yy * y + zz * z)
            four[i] += (ww * ww + xx * xx) + (yy * yy + zz * zz)


@_added_up
def _run(values: Any) -> Any:
    """Add finite items of one channel."""
    size = one = two = three = four = 0.0
    for i in range(values.size):
        x = np.float64(values[i])
        square = x * x
        size = abs(x) if abs(x) > size else size
        one += x
        two += square
        three += square * x
        four += square * square
    return size, one, two, three, four


@_compiled
def _channels(values: Any, start: Any, width: Any, inner: Any, clean: Any, table: Any) -> Any:
    at = 0
    if clean and inner == 1:
        at = min(values.size, -start % width)
        _each(values[:at], start, width, 1, table)
        many = (values.size - at) // (4 * width)
        stop = at + 4 * many * width
        _rows(values[at:stop], width, table[1], table[2], table[3], table[4], table[5])
        table[0] += 4 * many
        at = stop
    elif clean:
        while at < values.size:
            position = start + at
            stop = min(values.size, at + inner - position % inner)
            c = position // inner % width
            size, one, two, three, four = _run(values[at:stop])
            table[0, c] += stop - at
            table[1, c] = max(table[1, c], size)
            table[2, c] += one
            table[3, c] += two
            table[4, c] += three
            table[5, c] += four
            at = stop
    _each(values[at:], start + at, width, inner, table)


@_compiled
def _full_and_channels(
    values: Any, signed: Any, bits: Any, words: Any, start: Any, weights: Any, tables: Any,
    block: Any, width: Any, inner: Any, table: Any,
) -> Any:  # fmt: skip
    total = _sifted(values[:0], signed, bits, 0.0)
    free = placed = np.uint64(0)
    for at in range(0, values.size, block):
        stop = min(values.size, at + block)
        some = _full(values[at:stop], signed[at:stop], bits[at:stop], words[at:stop], start + at, weights, tables)
        _channels(values[at:stop], start + at, width, inner, some[7] + some[8] + some[9] == 0, table)
        total = _joined(total, some)
        free, placed = free + some[10], placed + some[11]
    return (*total, free, placed)


# The verbs --------------------------------------------------------------------------------------

_WIDENED = 1 << 16  # items of 16 bits at a time: as float32 they stay in the second-level cache


class _NumbaScratch(threading.local):
    """One thread's counters, zero between uses; several threads may summarise at once."""

    def __init__(self) -> None:
        self.tables: dict[bool, Array] = {}


_scratch = _NumbaScratch()


def _views(items: Array) -> Iterator[tuple[Array, Array, Array]]:
    """Yield items as floats, and their bits as signed and unsigned integers; 16 bits become 32, block by block."""
    if items.itemsize > 2:
        yield items, items.view(f"i{items.itemsize}"), items.view(f"u{items.itemsize}")
        return
    for at in range(0, items.size, _WIDENED):
        part = items[at : at + _WIDENED]
        bits = np.empty(part.size, np.uint32)
        _widened(part.view(np.uint16), items.dtype == np.int16, bits.view(np.float32), bits)
        yield bits.view(np.float32), bits.view(np.int32), bits


def moments(items: Array) -> Sweep:
    """Sweep contiguous items for counts, sums and extremes."""
    return reduce(joined, (Sweep(*_moments(*views)) for views in _views(items)), NOTHING)


def careful(items: Array, centre: float) -> Sweep:
    """Sweep the finite items for sums and squares of their distance from `centre`."""
    return reduce(joined, (Sweep(*_sifted(*views, centre)) for views in _views(items)), NOTHING)


def full(items: Array, start: int, tables: Array, adding: Adding | None = None) -> Sweep:
    """Sweep for everything: `moments`, buckets into `tables`, fingerprints from position `start` on, and channels."""
    words, total = items.view(f"u{items.itemsize}"), NOTHING
    at = 0
    for views in _views(items):
        stop = at + views[0].size
        given = (*views, words[at:stop], start + at, WEIGHTS, tables)
        total = joined(total, Sweep(*(_full(*given) if adding is None else _full_and_channels(*given, *adding.laid))))
        at = stop
    return total


def fingerprints(words: Array, start: int) -> tuple[int, int]:
    """Return both fingerprints of words that stand at positions `start`, `start` + 1 and so on."""
    free, placed = _fingerprints(words, start, WEIGHTS)
    return free, placed


def tally(items: Array) -> Array:
    """Count each of the 256 bytes."""
    counts = np.zeros(256, np.int64)
    _tally(items, counts)
    return counts


def channels(values: Array, start: int, adding: Adding, *, clean: bool) -> None:
    """Add contiguous values that stand from position `start` on to their channels; `clean` says that all are finite."""
    _, width, inner, table = adding.laid
    _channels(values, start, width, inner, clean, table)


def tables(*, wide: bool) -> Array:
    """Return bucket counters, all zero: for float64 when `wide`, else for float32 and narrower.

    They are this thread's until `drain` takes them back; if that never happens, the next caller gets new ones.
    """
    kept = _scratch.tables.pop(wide, None)
    return np.zeros((2, _STRIDE[wide] + _PAD), np.uint32) if kept is None else kept


def drain(tables: Array, swept: Sweep, *, finite: int, wide: bool) -> tuple[Array, Array]:
    """Return keys and counts of the occupied buckets, ascending, and take the tables back."""
    half, shift = _STRIDE[wide] // 2, 46 if wide else 17
    first, top = ((1023 if wide else 127) + LOWEST) * STEPS, half - STEPS
    high = max(-(((swept.signed >> shift) - first + 1) // -STEPS), 1)
    low = min((half + first - 1 - (swept.largest >> shift)) // STEPS, 0)
    room = (high - low) * STEPS + 1
    keys, counts = np.empty(room, np.int32), np.empty(room, np.int64)
    size, near_zero = _drained(tables, first, low, high, finite, keys, counts)
    if near_zero:
        tables[:, :first] = tables[:, half : half + first] = 0
    if swept.nan + swept.posinf + swept.neginf:
        tables[:, top:half] = tables[:, half + top : 2 * half] = 0
    _scratch.tables[wide] = tables
    return keys[:size].copy(), counts[:size].copy()
