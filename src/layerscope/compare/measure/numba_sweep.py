"""The fused pass over a pair of tensors, compiled by numba (the extra `fast`).

    sweep(reference, candidate, buckets=buckets)      # both float32, or both float64

No GIL. A block of 1024 elements stays in the first-level cache and is gone through several times, once for each loop
that LLVM turns into vectors by itself. `numpy_sweep` has the same verb and gives the same numbers without numba.

numba's cache on disk notices changes of this file only. So all compiled code is here, and the constants that come
from elsewhere are part of the names under which it is kept.
"""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module
from typing import Any

import numpy as np

from layerscope.compare.measure.sums import Alone, Swept, Together
from layerscope.stats.sketch import LOWEST, STEPS
from layerscope.stats.tensor_views import Array

# Imported as Any: what numba compiles is not Python to a type checker.
numba: Any = import_module("numba")
ir: Any = import_module("llvmlite.ir")
cgutils: Any = import_module("numba.core.cgutils")
intrinsic: Any = import_module("numba.extending").intrinsic

_CONSTANTS = "_".join(str(number) for number in (len(Together._fields), len(Alone._fields), -LOWEST, STEPS))
_SUMS = {"reassoc", "contract", "nsz"}
_FINITE = _SUMS | {"nnan", "ninf"}  # for loops that see finite numbers only


def _compiled(function: Callable[..., Any]) -> Any:
    """Compile on first use, kept on disk where there is a place for it."""
    function.__qualname__ += f"_{_CONSTANTS}"
    options = {"nogil": True, "error_model": "numpy", "fastmath": _SUMS}
    try:
        return numba.njit(cache=True, **options)(function)
    except RuntimeError:  # numba found no cache directory it may write to
        return numba.njit(**options)(function)


def _loop(flags: set[str]) -> Callable[[Callable[..., Any]], Any]:
    """Compile as a part of what calls it, and not to be called from Python."""
    options = {"error_model": "numpy", "no_cpython_wrapper": True, "no_cfunc_wrapper": True}
    return lambda function: numba.njit(fastmath=flags, **options)(function)


def _chosen(name: str) -> Any:
    """Make the larger or smaller of two finite numbers such that LLVM turns a loop over it into vectors."""

    def typed(typing: Any, a: Any, b: Any) -> Any:
        def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
            kind = args[0].type
            function = cgutils.get_or_insert_function(
                builder.module, ir.FunctionType(kind, [kind, kind]), f"llvm.{name}.f{a.bitwidth}"
            )
            return builder.call(function, args, fastmath=("nnan", "nsz"))

        return a(a, b), generate

    return intrinsic(typed)


_larger, _smaller = _chosen("maxnum"), _chosen("minnum")

_BLOCK = 1024
_MAGNITUDE = (1 << 63) - 1
_BELOW = (1023 + LOWEST) * STEPS - 1  # buckets that count as zero


@_loop(_SUMS)
def _differences(r: Any, c: Any, d: Any) -> Any:
    """Fill d; a sum that is not finite tells that an element was not."""
    reference = candidate = difference = 0.0
    for i in range(r.size):
        x, y = np.float64(r[i]), np.float64(c[i])
        e = y - x
        d[i] = e
        reference += x
        candidate += y
        difference += e
    return reference, candidate, difference


@_loop(_FINITE)
def _spreads(r: Any, c: Any, d: Any, mean_r: Any, mean_c: Any, mean_d: Any) -> Any:
    rr = cc = rc = dd = 0.0
    for i in range(r.size):
        x, y, e = np.float64(r[i]) - mean_r, np.float64(c[i]) - mean_c, d[i] - mean_d
        rr += x * x
        cc += y * y
        rc += x * y
        dd += e * e
    return rr, cc, rc, dd


@_loop(_FINITE)
def _sizes(r: Any, d: Any, epsilon: Any) -> Any:
    size = relative = largest_relative = largest = 0.0
    for i in range(r.size):
        e = abs(d[i])
        ratio = e / (abs(np.float64(r[i])) + epsilon)
        size += e
        relative += ratio
        largest = _larger(largest, e)
        largest_relative = _larger(largest_relative, ratio)
    return size, relative, largest_relative, largest


@_loop(_FINITE)
def _equal(d: Any) -> Any:
    equal = np.int64(0)
    for i in range(d.size):
        equal += d[i] == 0
    return equal


@_loop(_FINITE)
def _own(x: Any, row: Any) -> Any:
    """Take finite elements, one or more, into a row of `Alone`: all but mean and spread."""
    size, lowest, highest = 0.0, x[0], x[0]
    zeros = np.int32(0)
    for i in range(x.size):
        value = x[i]
        size += abs(np.float64(value))
        lowest = _smaller(lowest, value)
        highest = _larger(highest, value)
        zeros += np.int32(value == 0)
    row[0], row[3], row[4], row[5], row[6] = x.size, size, lowest, highest, zeros


@_loop(_FINITE)
def _spread(x: Any, total: Any, row: Any) -> Any:
    """Add mean and spread, of which a constant has none."""
    row[1] = row[4] if row[4] == row[5] else total / x.size
    mean, spread = row[1], 0.0
    for i in range(x.size):
        away = np.float64(x[i]) - mean
        spread += away * away
    row[2] = spread


@_loop(_SUMS)
def _bucket(bits: Any) -> Any:
    bucket = ((bits & _MAGNITUDE) >> 46) - _BELOW
    return np.uint64(bucket if bucket > 0 else 0)


@_loop(_SUMS)
def _count(d: Any, buckets: Any) -> Any:
    """Count |d|; neighbours go to different counters, lest equal ones wait for each other."""
    bits = d.view(np.int64)
    even, odd = buckets[: buckets.size // 2], buckets[buckets.size // 2 :]
    for i in range(bits.size // 2):
        even[_bucket(bits[2 * i])] += 1
        odd[_bucket(bits[2 * i + 1])] += 1
    if bits.size % 2:
        even[_bucket(bits[bits.size - 1])] += 1


@_loop(_SUMS)
def _by_token(r: Any, d: Any, at: Any, width: Any, errors: Any, powers: Any) -> Any:
    """Add squares up row by row; `at` is the position of the first element, counted from the start of the first row."""
    start = 0
    while start < r.size:
        row = (at + start) // width
        stop = min(r.size, (row + 1) * width - at)
        x, e = r[start:stop], d[start:stop]
        error = power = 0.0
        for i in range(x.size):
            value = np.float64(x[i])
            error += e[i] * e[i]
            power += value * value
        errors[row] += error
        powers[row] += power
        start = stop


@_loop(_SUMS)
def _alone(x: Any, row: Any) -> Any:
    """Take finite elements, or none, into a row of `Alone`."""
    row[4], row[5] = np.inf, -np.inf
    if x.size:
        total = 0.0
        for i in range(x.size):
            total += np.float64(x[i])
        _own(x, row)
        _spread(x, total, row)


@_loop(_SUMS)
def _alike(own: Any, row: Any, buckets: Any) -> Any:
    """Take finite elements that are the same on both sides."""
    row[0], row[1], row[3] = own[0], own[1], own[1]
    row[6] = row[7] = row[8] = own[2]
    row[10], row[14], row[18] = own[3], 0.0, own[0]
    buckets[0] += np.int64(own[0])


@_loop(_SUMS)
def _together(r: Any, c: Any, d: Any, sums: Any, own_r: Any, own_c: Any, epsilon: Any, row: Any, buckets: Any) -> Any:
    """Take finite elements, one or more, into a row of `Together`, and into both rows of `Alone`."""
    _own(r, own_r)
    _own(c, own_c)
    mean_r = own_r[4] if own_r[4] == own_r[5] else sums[0] / r.size
    mean_c = own_c[4] if own_c[4] == own_c[5] else sums[1] / r.size
    mean_d = sums[2] / r.size
    row[0], row[1], row[3], row[5] = r.size, mean_r, mean_c, mean_d
    row[6], row[7], row[8], row[9] = _spreads(r, c, d, mean_r, mean_c, mean_d)
    own_r[1], own_r[2], own_c[1], own_c[2] = mean_r, row[6], mean_c, row[7]
    row[10] = own_r[3]
    row[11], row[12], row[13], row[14] = _sizes(r, d, epsilon)
    row[18] += _equal(d)
    _count(d, buckets)


@_loop(_SUMS)
def _place(d: Any, largest: Any) -> Any:
    for i in range(d.size):
        if abs(d[i]) == largest:
            return i
    return 0


@_loop(_SUMS)
def _sort_out(x: Any, own: Any, kept: Any) -> Any:
    """Copy the finite elements, count the others into `own`, and return how many there are of the former."""
    size = 0
    for i in range(x.size):
        if np.isnan(x[i]):
            own[7] += 1
        elif np.isinf(x[i]):
            own[8 if x[i] > 0 else 9] += 1
        else:
            kept[size] = x[i]
            size += 1
    return size


@_compiled
def _sweep(
    reference: Any,
    candidate: Any,
    same: Any,
    start: Any,
    epsilon: Any,
    width: Any,
    together: Any,
    own: Any,
    errors: Any,
    powers: Any,
    buckets: Any,
) -> Any:
    scratch, with_gaps = np.empty(_BLOCK), np.empty(_BLOCK)
    kept_r, kept_c = np.empty(_BLOCK, reference.dtype), np.empty(_BLOCK, candidate.dtype)
    pairs_r, pairs_c = np.empty(_BLOCK, reference.dtype), np.empty(_BLOCK, candidate.dtype)
    places = np.empty(_BLOCK, np.int64)
    spare_r, spare_c = np.zeros(own.shape[2]), np.zeros(own.shape[2])
    highest = -1.0
    for block in range(together.shape[0]):
        at = block * _BLOCK
        stop = min(at + _BLOCK, reference.size)
        r, c, d = reference[at:stop], candidate[at:stop], scratch[: stop - at]
        row, own_r, own_c = together[block], own[0, block], own[1, block]
        row[14], row[21], row[22] = -1.0, np.inf, np.inf
        sums = _differences(r, c, d)
        if np.isfinite(sums[0]) and np.isfinite(sums[1]) and np.isfinite(sums[2]):
            if same:
                _own(r, own_r)
                _spread(r, sums[0], own_r)
                own_c[:] = own_r
                _alike(own_r, row, buckets)
            else:
                _together(r, c, d, sums, own_r, own_c, epsilon, row, buckets)
            if row[14] > highest:
                highest = row[14]
                i = _place(d, highest)
                row[15], row[16], row[17] = start + at + i, r[i], c[i]
            if width:
                _by_token(r, d, start % width + at, width, errors, powers)
            continue

        _alone(kept_r[: _sort_out(r, own_r, kept_r)], own_r)
        _alone(kept_c[: _sort_out(c, own_c, kept_c)], own_c)
        size = 0
        for i in range(r.size):
            if np.isfinite(r[i]) and np.isfinite(c[i]):
                pairs_r[size], pairs_c[size], places[size] = r[i], c[i], i
                kept_r[i], with_gaps[i] = r[i], np.float64(c[i]) - np.float64(r[i])
                size += 1
            else:
                kept_r[i] = with_gaps[i] = 0
                row[19] += 1
                row[22] = min(row[22], start + at + i)
                if r[i] == c[i] or (np.isnan(r[i]) and np.isnan(c[i])):
                    row[18] += 1
                else:
                    row[20] += 1
                    row[21] = min(row[21], start + at + i)
        if not size:
            continue
        x, y, e = pairs_r[:size], pairs_c[:size], scratch[:size]
        sums = _differences(x, y, e)
        _together(x, y, e, sums, spare_r, spare_c, epsilon, row, buckets)
        if row[14] > highest:
            highest = row[14]
            i = _place(e, highest)
            row[15], row[16], row[17] = start + at + places[i], x[i], y[i]
        if width:
            _by_token(kept_r[: r.size], with_gaps[: r.size], start % width + at, width, errors, powers)


def sweep(
    reference: Array, candidate: Array, *, buckets: Array, same: bool = False, start: int = 0,
    epsilon: float = 1e-8, width: int = 0,
) -> Swept:  # fmt: skip
    """Sweep contiguous elements, both float32 or both float64, that stand at positions `start` and on.

    `same` says that both sides have the same bits. |d| is counted into `buckets`. With a `width`, squares are added up
    token by token, a token being that many elements.
    """
    blocks = -(-reference.size // _BLOCK)
    together, own = np.zeros((blocks, len(Together._fields))), np.zeros((2, blocks, len(Alone._fields)))
    tokens = -(-(start % width + reference.size) // width) if width else 0
    errors, powers = np.zeros(tokens), np.zeros(tokens)
    _sweep(reference, candidate, same, start, epsilon, width, together, own, errors, powers, buckets)
    return Swept(together, own[0], own[1], errors, powers)
