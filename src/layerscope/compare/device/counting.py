"""Counters of |d| in shared memory, one for each bucket of a sketch in a window of 64 powers of two.

    clear(bins, threads)
    count_in(counter_of(magnitude_key(d), low), bins)
    hand_over(bins, low, table)

Triton has no word for atomics in shared memory: these few lines are PTX. Where kernels are interpreted there is no such
memory, and `bins` takes its place. One more counter takes whatever lies outside of the window.
"""

from __future__ import annotations

from typing import Any

from layerscope.compare.device.taking import larger
from layerscope.stats.launching import INTERPRETED, constant, jit, tl
from layerscope.stats.sketch import LOWEST, STEPS

__all__ = [
    "BINS", "FIRST_KEY", "LOWEST_KEY", "OUTSIDE", "bins_of", "clear", "count_in", "counted_in", "counter_of",
    "hand_over", "magnitude_key", "window",
]  # fmt: skip

FIRST_KEY = (1023 + LOWEST) * STEPS  # what is below counts as zero

_WINDOW = 64 * STEPS
BINS = _WINDOW + 8
_DECLARE = constant(f".shared .align 16 .b32 layerscope_pairs[{BINS}]; mov.u32 $0, $1;")
_AT = "{ .reg .u32 at; mov.u32 at, layerscope_pairs; mad.lo.u32 at, $1, 4, at;"
_CLEAR = constant(f"{_AT} st.shared.u32 [at], 0; mov.u32 $0, 0; }}")
_READ = constant(f"{_AT} ld.shared.u32 $0, [at]; }}")
_ADD = constant(f"{_AT} red.shared.add.u32 [at], 1; mov.u32 $0, 0; }}")

OUTSIDE = constant(_WINDOW)
LOWEST_KEY = constant(FIRST_KEY)
_EACH = constant(BINS)
_LOWEST_EXPONENT = constant(1023 + LOWEST)
_ON_HOST = constant(INTERPRETED)


@jit
def magnitude_key(value: tl.tensor) -> Any:
    """Exponent and six bits of the fraction of a float64: what a sketch counts by, before `LOWEST` is taken off."""
    return ((value.to(tl.uint64, bitcast=True) >> 46) & 0x1FFFF).to(tl.int32)


@jit
def bins_of(program: tl.tensor, scratch: tl.tensor) -> Any:
    """Where the counters of one program lie when there is no shared memory."""
    return scratch + program * _EACH


@jit
def window(r: tl.tensor, c: tl.tensor, on: tl.tensor) -> Any:
    """The first key that the counters cover: a little above both sides' largest, no |d| being larger than their sum."""
    size = tl.max(tl.max(tl.where(on, larger(tl.abs(r), tl.abs(c)), 0.0), 1), 0)
    exponent = magnitude_key(size) >> 6
    exponent = tl.where(exponent == 0, 1031, exponent)
    return tl.minimum(tl.maximum(exponent - 61, _LOWEST_EXPONENT), 2048 - 64) * 64


@jit
def clear(bins: tl.tensor, threads: tl.constexpr) -> None:
    """Make the counters, all zero; to be called once in a kernel, before the others."""
    rows = tl.arange(0, threads)
    if not _ON_HOST:
        tl.inline_asm_elementwise(_DECLARE, "=r,r", [rows], tl.int32, is_pure=False, pack=1)
    for start in tl.static_range(0, OUTSIDE + 1, 1024):
        at = tl.minimum(start + tl.arange(0, 1024), OUTSIDE)
        if _ON_HOST:
            tl.store(bins + at, 0)
        else:
            tl.inline_asm_elementwise(_CLEAR, "=r,r", [at], tl.int32, is_pure=False, pack=1)
    tl.debug_barrier()


@jit
def counter_of(key: tl.tensor, low: tl.tensor) -> Any:
    """Which counter takes a key."""
    return tl.minimum((key - low).to(tl.uint32, bitcast=True), OUTSIDE).to(tl.int32, bitcast=True)


@jit
def count_in(place: tl.tensor, bins: tl.tensor) -> None:
    """Add one to each counter."""
    if _ON_HOST:
        tl.atomic_add(bins + place, 1)
    else:
        tl.inline_asm_elementwise(_ADD, "=r,r", [place], tl.int32, is_pure=False, pack=1)


@jit
def counted_in(place: tl.tensor, bins: tl.tensor) -> Any:
    """Return what counters say, after a barrier."""
    if _ON_HOST:
        return tl.load(bins + place)
    else:  # noqa: RET505
        return tl.inline_asm_elementwise(_READ, "=r,r", [place], tl.int32, is_pure=False, pack=1)


@jit
def hand_over(bins: tl.tensor, low: tl.tensor, table: tl.tensor) -> None:
    """Add this program's counters to those of all."""
    for start in tl.static_range(0, OUTSIDE, 1024):
        at = start + tl.arange(0, 1024)
        counted = counted_in(at, bins)
        tl.atomic_add(table + (at + low - (LOWEST_KEY - 1)), counted, mask=counted > 0, sem="relaxed")
