"""The numbers of `summarize`, made on the GPU that holds the tensor, in one pass that nobody waits for (Triton).

    slots = Slots(device, "full", stream)      # room for the numbers of several tensors
    slots.start(0, tensor)                     # one launch on the model's stream
    sheet = slots.gather(1)                    # one more, for all of them
    Numbers.read(sheet, bring)[0].summary("bfloat16", (4, 8))   # `bring` copies from the device, when it is time

Counts, extremes, fingerprints and sketch are those of the CPU to the last bit. Each program of the launch takes sums
in float64 of the distance from a mean it has scouted, and Chan's formula joins the programs, so that mean and std are
as accurate as the CPU's second look at the tensor, which is gone by the time anybody could ask for it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from functools import cache
from importlib import import_module
from typing import Any, Literal, NamedTuple

import numpy as np
import torch

from layerscope.stats.bits import Array, byte_values
from layerscope.stats.prints import BLOCK, MIX_ADD, MIX_FIRST, MIX_SECOND, WEIGHTS
from layerscope.stats.sketch import LOWEST, STEPS, Sketch
from layerscope.stats.summary import Summary

__all__ = ["Level", "Numbers", "Sheet", "Slots", "prepare", "takes", "why_not"]

# Imported as Any, and only where it is installed: what Triton compiles is not Python to a type checker.
try:
    triton: Any = import_module("triton")
    tl: Any = import_module("triton.language")
    _absent = ""
except ImportError as missing:
    triton = tl = None
    _absent = f"Triton is not installed ({missing})"


def _jit(function: Callable[..., Any]) -> Any:
    return function if triton is None else triton.jit(function)


def _constant(value: Any) -> Any:
    return value if tl is None else tl.constexpr(value)


class _Kind(NamedTuple):
    """How a kernel reads one dtype: as which numbers, from items of which width, how many threads take how many."""

    name: Literal["float32", "bfloat16", "float16", "float64", "integer", "byte"]
    item: torch.dtype
    threads: int
    vector: int


_KINDS = {
    torch.float32: _Kind("float32", torch.int32, 256, 4),
    torch.bfloat16: _Kind("bfloat16", torch.int16, 128, 8),
    torch.float16: _Kind("float16", torch.int16, 128, 8),
    torch.float64: _Kind("float64", torch.int64, 256, 4),
    **{t: _Kind("integer", t, 128, 8) for t in (torch.int16, torch.uint16)},
    **{t: _Kind("integer", t, 256, 4) for t in (torch.int32, torch.uint32, torch.int64, torch.uint64)},
    **{
        getattr(torch, name): _Kind("byte", torch.int8, 128, 8)
        for name in (
            "bool", "int8", "uint8",
            "float8_e4m3fn", "float8_e4m3fnuz", "float8_e5m2", "float8_e5m2fnuz", "float8_e8m0fnu",
        )
        if hasattr(torch, name)
    },
}  # fmt: skip

Level = Literal["moments", "full"]

_MOST = 1 << 31  # items of one tensor: the bucket counters are 32 bits wide
_PROGRAMS = 512  # that sweep one tensor, at most
_WORDS = 16  # in the row of each


def takes(tensor: torch.Tensor) -> bool:
    """Whether the kernels know this tensor's dtype, and have counters wide enough."""
    return tensor.dtype in _KINDS and tensor.numel() < _MOST


@cache
def why_not() -> str:
    """Say why tensors have to travel to the host to be summarised; empty when they need not."""
    if torch.version.hip is not None:
        return "the kernels are written for NVIDIA's devices"
    return _absent


def prepare(device: torch.device, dtypes: Iterable[torch.dtype], level: Level) -> None:
    """Compile the kernels for these dtypes now, or load them from Triton's cache, lest the first tensor wait for it."""
    for dtype in dtypes:
        if dtype in _KINDS:
            _sweeping(device, dtype, level == "full")
            _gathering(device, _buckets(level, wide=dtype is torch.float64))


# The kernels ------------------------------------------------------------------------------------
#
# A slot in device memory holds a row of numbers per program and one more row about the tensor:
#     0 sum, 1 sum of squares, both of the distance from 3 the centre; 2 sum of magnitudes; 4 finite; 5 lowest,
#     6 highest (float64 bits as ordered integers); 7 zeros, 8 nan, 9 +inf, 10 -inf; 11, 12 fingerprints
#     and in the last row: 0-9 the first values, 10 how many programs, 11 the largest magnitude of a float64 tensor,
#     12 the power of two it was scaled by.

_ROWS, _COLUMNS = _constant(_PROGRAMS), _constant(_WORDS)
_FIRST, _ADD, _SECOND = (_constant(number) for number in (MIX_FIRST, MIX_ADD, MIX_SECOND))
_PERIOD = _constant(BLOCK)
_LIFT = _constant(2.0**896)

# Counting buckets takes atomics in shared memory, which Triton has no word for: these few lines are PTX. The counters
# cover a window of 32 powers of two of either sign below the largest value a program has scouted; the last counter of
# each sign takes whatever lies outside, and what of that is not zero is then counted in global memory, which is rare.
_WINDOW = 32 * STEPS
_STRIDE = _WINDOW + 1
_DECLARE = _constant(f".shared .align 16 .b32 layerscope_bins[{2 * _STRIDE}]; mov.u32 $0, $1;")
_AT = "{ .reg .u32 at; mov.u32 at, layerscope_bins; mad.lo.u32 at, $1, 4, at;"
_CLEAR = _constant(f"{_AT} st.shared.u32 [at], 0; mov.u32 $0, 0; }}")
_READ = _constant(f"{_AT} ld.shared.u32 $0, [at]; }}")


def _counting(items: int, *, first: int, last: int, half: int) -> tuple[str, str]:
    """Write the counting of that many buckets, of the exponents from `first` until `last`, and its constraints."""
    low, table = f"${2 * items}", f"${3 * items}"
    lines = [
        f".reg .u32 base, at, x, most, least, m<{items}>, t<{items}>; .reg .pred far; .reg .u64 there;",
        "mov.u32 base, layerscope_bins; mov.u32 most, 0; mov.u32 least, 0xffffffff;",
    ]
    for i in range(items):
        bucket = f"${items + i}"
        lines += [
            f"and.b32 m{i}, {bucket}, {half - 1}; sub.u32 t{i}, m{i}, {low}; min.u32 at, t{i}, {_WINDOW};",
            f"shr.u32 x, {bucket}, {half.bit_length() - 1}; mad.lo.u32 at, x, {_STRIDE}, at;",
            "mad.lo.u32 at, at, 4, base; red.shared.add.u32 [at], 1;",
            f"max.u32 most, most, m{i}; sub.u32 x, m{i}, {first * STEPS}; min.u32 least, least, x;",
        ]
    lines += [
        f"add.u32 at, {low}, {_WINDOW}; setp.ge.u32 far, most, at;",
        f"sub.u32 at, {low}, {first * STEPS}; setp.lt.or.u32 far, least, at, far; @!far bra all_near;",
    ]
    for i in range(items):
        lines += [
            f"sub.u32 x, m{i}, {first * STEPS}; setp.ge.u32 far, t{i}, {_WINDOW};",
            f"setp.lt.and.u32 far, x, {(last - first) * STEPS}, far;",
            f"mad.wide.u32 there, ${items + i}, 4, {table}; @far red.global.add.u32 [there], 1;",
        ]
    lines += ["all_near:", *(f"mov.u32 ${i}, 0;" for i in range(items))]
    return "{ " + "\n".join(lines) + " }", ",".join(["=r"] * items + ["r"] * 2 * items + ["l"] * items)


_HALF, _HALF_WIDE = _constant(1 << 14), _constant(1 << 17)
_COUNT_4, _USING_4 = map(_constant, _counting(4, first=127 + LOWEST, last=255, half=1 << 14))
_COUNT_8, _USING_8 = map(_constant, _counting(8, first=127 + LOWEST, last=255, half=1 << 14))
_COUNT_WIDE, _USING_WIDE = map(_constant, _counting(2, first=1023 + LOWEST, last=2047, half=1 << 17))


@_jit
def _mixed(x: tl.tensor) -> Any:
    """`prints.mixed`."""
    x = x * _FIRST + _ADD
    x = (x ^ (x >> 32)) * _SECOND
    return x ^ (x >> 32)


@_jit
def _words(raw: tl.tensor) -> Any:
    """The stored bits, for fingerprints."""
    if raw.dtype.primitive_bitwidth == 8:
        return raw.to(tl.uint8, bitcast=True).to(tl.uint64)
    elif raw.dtype.primitive_bitwidth == 16:  # noqa: RET505  a branch that is not taken must not be compiled
        return raw.to(tl.uint16, bitcast=True).to(tl.uint64)
    elif raw.dtype.primitive_bitwidth == 32:
        return raw.to(tl.uint32, bitcast=True).to(tl.uint64)
    else:
        return raw.to(tl.uint64, bitcast=True)


@_jit
def _bits(raw: tl.tensor, worth: tl.tensor, kind: tl.constexpr) -> Any:
    """The items as the bits of float32 where that holds them exactly, else of float64."""
    if kind == "float32":
        return raw.to(tl.uint32, bitcast=True)
    elif kind == "bfloat16":  # noqa: RET505
        return raw.to(tl.uint16, bitcast=True).to(tl.uint32) << 16
    elif kind == "float16":
        return raw.to(tl.float16, bitcast=True).to(tl.float32).to(tl.uint32, bitcast=True)
    elif kind == "float64":
        return raw.to(tl.uint64, bitcast=True)
    elif kind == "byte":
        return tl.load(worth + raw.to(tl.uint8, bitcast=True).to(tl.int32)).to(tl.uint64, bitcast=True)
    else:
        return raw.to(tl.float64).to(tl.uint64, bitcast=True)


@_jit
def _values(bits: tl.tensor, scale: tl.tensor, kind: tl.constexpr) -> Any:
    """What the bits are worth, in float64; those of float32 are shifted into place, and so 2**896 times too small.

    Two shifts are cheaper than a conversion, which runs at an eighth of the rate of float64 arithmetic.
    """
    if kind == "float64":
        return bits.to(tl.float64, bitcast=True) * scale
    elif bits.dtype == tl.uint64:  # noqa: RET505
        return bits.to(tl.float64, bitcast=True)
    else:
        wide = (bits & 0x7FFFFFFF).to(tl.uint64) << 29 | (bits & 0x80000000).to(tl.uint64) << 32
        return wide.to(tl.float64, bitcast=True)


@_jit
def _count(bits: tl.tensor, low: tl.tensor, table: tl.tensor, kind: tl.constexpr) -> None:
    """Add one to each value's bucket: sign, exponent and six bits of the fraction."""
    table = table.to(tl.int64)
    if kind == "float64":
        bucket = (bits >> 46).to(tl.uint32)
        tl.inline_asm_elementwise(_COUNT_WIDE, _USING_WIDE, [bucket, low, table], tl.int32, is_pure=False, pack=2)
    else:
        if bits.dtype == tl.uint32:
            bucket = bits >> 17
        else:
            size = ((bits & 0x7FFFFFFFFFFFFFFF) >> 46).to(tl.uint32) - 896 * 64
            bucket = tl.where(size < _HALF, size, 0) | ((bits >> 63) << 14).to(tl.uint32)
        if bucket.shape[1] == 8:
            tl.inline_asm_elementwise(_COUNT_8, _USING_8, [bucket, low, table], tl.int32, is_pure=False, pack=8)
        else:
            tl.inline_asm_elementwise(_COUNT_4, _USING_4, [bucket, low, table], tl.int32, is_pure=False, pack=4)


@_jit
def _ordered(bits: tl.tensor) -> Any:
    """Float bits as float64 bits that compare as integers; -0.0 comes before 0.0."""
    if bits.dtype == tl.uint32:
        wide = bits.to(tl.float32, bitcast=True).to(tl.float64).to(tl.int64, bitcast=True)
    else:
        wide = bits.to(tl.int64, bitcast=True)
    return wide ^ ((wide >> 63) & 0x7FFFFFFFFFFFFFFF)


@_jit
def _added(
    a: tl.tensor, b: tl.tensor, c: tl.tensor, d: tl.tensor, e: tl.tensor,
    f: tl.tensor, g: tl.tensor, h: tl.tensor, i: tl.tensor,
    j: tl.tensor, k: tl.tensor, l: tl.tensor, m: tl.tensor, n: tl.tensor,  # noqa: E741
    o: tl.tensor, p: tl.tensor, q: tl.tensor, r: tl.tensor,
) -> Any:  # fmt: skip
    return a + j, b + k, c + l, d + m, e + n, f + o, g + p, h + q, i + r


@_jit
def _peak(items: tl.tensor, count: tl.tensor, slot: tl.tensor, block: tl.constexpr) -> None:
    """Leave the bits of the largest finite magnitude of a float64 tensor, whose squares may leave float64's range."""
    at = tl.program_id(0).to(tl.int64) * block + tl.arange(0, block)
    size = tl.load(items + at, mask=at < count, other=0) & 0x7FFFFFFFFFFFFFFF
    tl.atomic_max(slot + (_ROWS * _COLUMNS + 11), tl.max(tl.where(size < 0x7FF0000000000000, size, 0), 0))


@_jit
def _sweep(
    items: tl.tensor, count: tl.tensor, tiles: tl.tensor,
    slot: tl.tensor, table: tl.tensor, weights: tl.tensor, worth: tl.tensor,
    kind: tl.constexpr, full: tl.constexpr, threads: tl.constexpr, vector: tl.constexpr,
) -> None:  # fmt: skip
    """Sweep `tiles` tiles per program, taking every item for finite; where one was not, look again with care."""
    tile: tl.constexpr = threads * vector
    wide: tl.constexpr = (kind != "float32") & (kind != "bfloat16") & (kind != "float16")
    word: tl.constexpr = tl.uint64 if wide else tl.uint32
    integer: tl.constexpr = tl.int64 if wide else tl.int32
    infinity: tl.constexpr = 0x7FF0000000000000 if wide else 0x7F800000
    sign: tl.constexpr = 0x8000000000000000 if wide else 0x80000000
    lift: tl.constexpr = 1.0 if wide else _LIFT

    program = tl.program_id(0)
    start = program.to(tl.int64) * tiles * tile
    stop = tl.minimum(start + tiles * tile, count)
    whole = start + (stop - start) // tile * tile
    rows = tl.arange(0, threads)
    lanes = rows[:, None] * vector + tl.arange(0, vector)[None, :]

    power = tl.full([], 0, tl.int64)
    scale = 1.0
    if kind == "float64":
        exponent = tl.load(slot + (_ROWS * _COLUMNS + 11)) >> 52
        power = tl.minimum(tl.maximum(1022 - exponent, -1022), 1000)
        scale = ((power + 1023) << 52).to(tl.float64, bitcast=True)

    # Scout the first tile for a centre and for the window of the buckets.
    within = start + lanes < stop
    bits = _bits(tl.load(items + start + lanes, mask=within, other=0), worth, kind)
    finite = within & ((bits & (sign - 1)) < infinity)
    value = tl.where(finite, _values(bits, scale, kind) * lift, 0.0)
    known = tl.sum(tl.sum(finite.to(tl.int32), 1), 0)
    centre = tl.sum(tl.sum(value, 1), 0) / tl.maximum(known, 1)
    low = tl.full([], 0, tl.uint32)
    if full:
        largest_size = tl.max(tl.max(tl.where(finite, bits & (sign - 1), 0), 1), 0)
        if kind == "float64":
            low = tl.minimum(tl.maximum((largest_size >> 52).to(tl.int32) - 29, 897), 2047 - 32).to(tl.uint32) * 64
        elif wide:
            low = tl.minimum(tl.maximum((largest_size >> 52).to(tl.int32) - 925, 1), 255 - 32).to(tl.uint32) * 64
        else:
            low = tl.minimum(tl.maximum((largest_size >> 23).to(tl.int32) - 29, 1), 255 - 32).to(tl.uint32) * 64
        bins = tl.arange(0, 4096)
        tl.inline_asm_elementwise(_DECLARE, "=r,r", [rows], tl.int32, is_pure=False, pack=1)
        tl.inline_asm_elementwise(_CLEAR, "=r,r", [bins + (bins >> 11)], tl.int32, is_pure=False, pack=1)
        tl.debug_barrier()
        weight = tl.load(weights + lanes % _PERIOD)

    nothing = tl.zeros([threads], integer).to(word, bitcast=True)
    least = (nothing + (sign - 1) + 1).to(integer, bitcast=True)
    sums = tl.zeros([threads], tl.float64)
    squares = tl.zeros([threads], tl.float64)
    magnitude = tl.zeros([threads], tl.float64)
    signed, largest, smallest = least, nothing, nothing - 1
    zeros = tl.zeros([threads], tl.int32)
    nan = tl.zeros([threads], tl.int32)
    posinf = tl.zeros([threads], tl.int32)
    neginf = tl.zeros([threads], tl.int32)
    free = tl.zeros([threads], tl.uint64)
    placed = tl.zeros([threads], tl.uint64)

    for at in tl.range(start, whole, tile, loop_unroll_factor=2):  # two loads under way instead of one
        raw = tl.load(items + at + lanes)
        bits = _bits(raw, worth, kind)
        value = _values(bits, scale, kind)
        distance = value * lift - centre
        sums += tl.sum(distance, 1)
        squares += tl.sum(distance * distance, 1)
        magnitude += tl.sum(tl.abs(value), 1)
        signed = tl.maximum(signed, tl.max(bits.to(integer, bitcast=True), 1))
        largest = tl.maximum(largest, tl.max(bits, 1))
        smallest = tl.minimum(smallest, tl.min(bits, 1))
        zeros += tl.sum(((bits << 1) == 0).to(tl.int32), 1)
        if full:
            mixed = _mixed(_words(raw))
            free += tl.sum(mixed, 1)
            placed += tl.sum(mixed * weight, 1) * (_mixed(((at + rows * vector) // _PERIOD).to(tl.uint64)) | 1)
            _count(bits, low, table, kind)

    begin = whole
    if kind != "integer":
        spoiled = (tl.max(signed, 0) >= infinity) | (tl.max(largest, 0) >= (infinity + sign))
        begin = tl.where(spoiled, start, whole)
        sums = tl.where(spoiled, 0.0, sums)
        squares = tl.where(spoiled, 0.0, squares)
        magnitude = tl.where(spoiled, 0.0, magnitude)
        zeros = tl.where(spoiled, 0, zeros)
        signed = tl.where(spoiled, least, signed)
        largest = tl.where(spoiled, nothing, largest)
        smallest = tl.where(spoiled, nothing - 1, smallest)
    for at in tl.range(begin, stop, tile):
        within = at + lanes < stop
        raw = tl.load(items + at + lanes, mask=within, other=0)
        bits = _bits(raw, worth, kind)
        size = bits & (sign - 1)
        finite = within & (size < infinity)
        value = tl.where(finite, _values(bits, scale, kind), 0.0)
        distance = tl.where(finite, value * lift - centre, 0.0)
        sums += tl.sum(distance, 1)
        squares += tl.sum(distance * distance, 1)
        magnitude += tl.sum(tl.abs(value), 1)
        signed = tl.maximum(signed, tl.max(tl.where(finite, bits.to(integer, bitcast=True), least[:, None]), 1))
        largest = tl.maximum(largest, tl.max(tl.where(finite, bits, nothing[:, None]), 1))
        smallest = tl.minimum(smallest, tl.min(tl.where(finite, bits, nothing[:, None] - 1), 1))
        zeros += tl.sum((finite & (size == 0)).to(tl.int32), 1)
        nan += tl.sum((within & (size > infinity)).to(tl.int32), 1)
        posinf += tl.sum((within & (bits == infinity)).to(tl.int32), 1)
        neginf += tl.sum((within & (bits == infinity + sign)).to(tl.int32), 1)
        if full:
            new = within & (at >= whole)
            mixed = tl.where(new, _mixed(_words(raw)), 0)
            free += tl.sum(mixed, 1)
            placed += tl.sum(mixed * weight, 1) * (_mixed(((at + rows * vector) // _PERIOD).to(tl.uint64)) | 1)
            _count(tl.where(new, bits, 0), low, table, kind)

    # Unsigned, the negative bits come last, reversed.
    highest = tl.max(signed, 0)
    extreme = tl.max(largest, 0)
    other = tl.min(smallest, 0)
    highest = _ordered(tl.where(highest >= 0, highest.to(word, bitcast=True), other))
    lowest = _ordered(tl.where(extreme >= sign, extreme, other))
    sums, squares, magnitude, zeros, nan, posinf, neginf, free, placed = tl.reduce(
        (sums, squares, magnitude, zeros, nan, posinf, neginf, free, placed), 0, _added
    )
    plain = stop - start - nan - posinf - neginf
    row = slot + program * _COLUMNS
    tl.store(row, sums.to(tl.int64, bitcast=True))
    tl.store(row + 1, squares.to(tl.int64, bitcast=True))
    tl.store(row + 2, (magnitude * lift).to(tl.int64, bitcast=True))
    tl.store(row + 3, centre.to(tl.int64, bitcast=True))
    tl.store(row + 4, plain)
    tl.store(row + 5, tl.where(plain > 0, lowest, 0x7FFFFFFFFFFFFFFF))
    tl.store(row + 6, tl.where(plain > 0, highest, -0x7FFFFFFFFFFFFFFF))
    tl.store(row + 7, zeros.to(tl.int64))
    tl.store(row + 8, nan.to(tl.int64))
    tl.store(row + 9, posinf.to(tl.int64))
    tl.store(row + 10, neginf.to(tl.int64))
    tl.store(row + 11, free.to(tl.int64, bitcast=True))
    tl.store(row + 12, placed.to(tl.int64, bitcast=True))
    if program == 0:
        about = slot + _ROWS * _COLUMNS
        ten = tl.arange(0, 16)
        head = _bits(tl.load(items + ten, mask=ten < count, other=0), worth, kind)
        if wide:
            first = head.to(tl.int64, bitcast=True)
        else:
            first = head.to(tl.float32, bitcast=True).to(tl.float64).to(tl.int64, bitcast=True)
        tl.store(about + ten, first, mask=ten < 10)
        tl.store(about + 10, tl.num_programs(0).to(tl.int64))
        tl.store(about + 12, power)
    if full:
        tl.debug_barrier()
        counted = tl.inline_asm_elementwise(_READ, "=r,r", [bins + (bins >> 11)], tl.int32, is_pure=False, pack=1)
        half: tl.constexpr = _HALF_WIDE if kind == "float64" else _HALF
        tl.atomic_add(table + ((bins >> 11) * half + (bins & 2047) + low), counted, mask=counted > 0, sem="relaxed")


@_jit
def _gather(
    slots: tl.tensor, tables: tl.tensor, cursor: tl.tensor, next_cursor: tl.tensor,
    heads: tl.tensor, places: tl.tensor, counts: tl.tensor, size: tl.constexpr,
) -> None:  # fmt: skip
    """Join the programs' numbers of one slot and list its occupied buckets behind those of others; empty its table.

    A head is 0 mean, 1 sum of squared distances from it, 2 sum of magnitudes, 3 finite, 4 lowest, 5 highest, 6 zeros,
    7 nan, 8 +inf, 9 -inf, 10 and 11 fingerprints, 12 the power of two, 13 how many buckets, 14 where their list
    begins, 16-25 the first values.
    """
    index = tl.program_id(0).to(tl.int64)
    slot = slots + index * (_ROWS + 1) * _COLUMNS
    about = slot + _ROWS * _COLUMNS
    rows = tl.arange(0, _ROWS)
    on = rows < tl.load(about + 10)
    row = slot + rows * _COLUMNS
    finite = tl.load(row + 4, mask=on, other=0)
    share = tl.maximum(finite, 1).to(tl.float64)
    sums = tl.load(row, mask=on, other=0).to(tl.float64, bitcast=True)
    squares = tl.load(row + 1, mask=on, other=0).to(tl.float64, bitcast=True)
    means = tl.load(row + 3, mask=on, other=0).to(tl.float64, bitcast=True) + sums / share
    total = tl.sum(finite, 0)
    mean = tl.sum(means * finite.to(tl.float64), 0) / tl.maximum(total, 1).to(tl.float64)
    apart = means - mean
    spread = tl.sum(tl.maximum(squares - sums * sums / share, 0.0) + apart * apart * finite.to(tl.float64), 0)
    magnitude = tl.sum(tl.load(row + 2, mask=on, other=0).to(tl.float64, bitcast=True), 0)
    lowest = tl.min(tl.load(row + 5, mask=on, other=0x7FFFFFFFFFFFFFFF), 0)
    highest = tl.max(tl.load(row + 6, mask=on, other=-0x7FFFFFFFFFFFFFFF), 0)
    head = heads + index * 32
    tl.store(head, mean.to(tl.int64, bitcast=True))
    tl.store(head + 1, spread.to(tl.int64, bitcast=True))
    tl.store(head + 2, magnitude.to(tl.int64, bitcast=True))
    tl.store(head + 3, total)
    tl.store(head + 4, lowest ^ ((lowest >> 63) & 0x7FFFFFFFFFFFFFFF))
    tl.store(head + 5, highest ^ ((highest >> 63) & 0x7FFFFFFFFFFFFFFF))
    for column in tl.static_range(7, 13):
        tl.store(head + (column - 1), tl.sum(tl.load(row + column, mask=on, other=0), 0))
    tl.store(head + 12, tl.load(about + 12))
    ten = tl.arange(0, 16)
    tl.store(head + 16 + ten, tl.load(about + ten, mask=ten < 10, other=0))
    tl.store(about + 11, 0)
    buckets = tl.full([], 0, tl.int32)
    begin = tl.full([], 0, tl.int32)
    if size > 0:
        block = tl.arange(0, 8192)
        table = tables + index * size
        for start in tl.range(0, size, 8192):
            buckets += tl.sum((tl.load(table + start + block) > 0).to(tl.int32), 0)
        begin = tl.atomic_add(cursor, buckets, sem="relaxed")
        place = begin - 1
        for start in tl.range(0, size, 8192):
            counted = tl.load(table + start + block)
            some = counted > 0
            at = place + tl.cumsum(some.to(tl.int32), 0)
            tl.store(places + at, start + block, mask=some)
            tl.store(counts + at, counted, mask=some)
            tl.store(table + start + block, 0, mask=some)
            place += tl.sum(some.to(tl.int32), 0)
        if index == 0:
            tl.store(next_cursor, 0)
    tl.store(head + 13, buckets.to(tl.int64))
    tl.store(head + 14, begin.to(tl.int64))


# Launching them ---------------------------------------------------------------------------------

_ANY = (1 << 40) + 1  # stands for a number that is 64 bits wide and, to Triton, a multiple of nothing

Launch = Callable[..., None]


class Sheet(NamedTuple):
    """What a gathering leaves on the device: a head for each tensor, and one list of all their buckets."""

    heads: torch.Tensor
    lists: torch.Tensor  # places, and how often each


class Slots:
    """Room on one stream of one device for the numbers of `size` tensors of one level; float64's buckets take more.

    Whoever calls sees to it that a slot is started once between two calls of `gather`, which empties them all: what is
    launched later on one stream runs later.
    """

    def __init__(self, device: torch.device, level: Level, stream: int, *, wide: bool = False) -> None:
        self.size = 8 if wide else 128
        self._full = level == "full"
        self._buckets = _buckets(level, wide=wide)
        self._device = device
        self._stream = stream
        self._rows = torch.zeros((self.size, (_PROGRAMS + 1) * _WORDS), dtype=torch.int64, device=device)
        self._tables = torch.zeros((self.size, max(self._buckets, 4)), dtype=torch.int32, device=device)
        self._cursors = torch.zeros((2, 4), dtype=torch.int32, device=device)
        self._turn = 0
        self._weights = _on(device, WEIGHTS.view(np.int64))
        self._worth: dict[torch.dtype, torch.Tensor] = {}
        self._programs = min(_PROGRAMS, 4 * torch.cuda.get_device_properties(device).multi_processor_count)
        self._sweeps: dict[torch.dtype, Callable[[int, int, int], None]] = {}

    def start(self, index: int, tensor: torch.Tensor) -> None:
        """Launch the sweep of a contiguous tensor; on this stream, its memory may be changed or given back at once."""
        sweep = self._sweeps.get(tensor.dtype)
        if sweep is None:
            sweep = self._sweeps[tensor.dtype] = self._sweep_of(tensor.dtype)
        sweep(index, tensor.data_ptr(), tensor.numel())

    def gather(self, used: int) -> Sheet:
        """Launch the gathering of the first `used` slots."""
        sheet = Sheet(
            torch.empty((used, 32), dtype=torch.int64, device=self._device),
            torch.empty((2, used * self._buckets), dtype=torch.int32, device=self._device),
        )
        cursor, other = self._cursors[self._turn].data_ptr(), self._cursors[1 - self._turn].data_ptr()
        self._turn = 1 - self._turn
        _gathering(self._device, self._buckets)(
            used, self._stream,
            self._rows.data_ptr(), self._tables.data_ptr(), cursor, other,
            sheet.heads.data_ptr(), sheet.lists[0].data_ptr(), sheet.lists[1].data_ptr(), self._buckets,
        )  # fmt: skip
        return sheet

    def _sweep_of(self, dtype: torch.dtype) -> Callable[[int, int, int], None]:
        """Return a launch with as little as possible left to do in it."""
        kind = _KINDS[dtype]
        sweep = _sweeping(self._device, dtype, self._full)
        peak = _peaking(self._device) if dtype is torch.float64 else None
        worth = _on(self._device, byte_values(str(dtype)[6:]) if kind.name == "byte" else np.zeros(2))
        self._worth[dtype] = worth
        rows, row = self._rows.data_ptr(), self._rows.stride(0) * 8
        tables, table = self._tables.data_ptr(), self._tables.stride(0) * 4
        known = (self._weights.data_ptr(), worth.data_ptr(), kind.name, self._full, kind.threads, kind.vector)
        tile, most, stream = kind.threads * kind.vector, self._programs, self._stream

        def launch(index: int, items: int, count: int) -> None:
            tiles = -(-count // tile)
            each = -(-tiles // most)
            slot = rows + index * row
            if peak is not None:
                peak(-(-count // 4096), stream, items, count, slot, 4096)
            sweep(-(-tiles // each), stream, items, count, each, slot, tables + index * table, *known)

        return launch


def _buckets(level: Level, *, wide: bool) -> int:
    return 0 if level == "moments" else 1 << (18 if wide else 15)


def _launching(compiled: Any) -> Launch:
    """Call a compiled kernel without Triton's own look at every argument, which costs more than the launch."""
    run, function, metadata = compiled.run, compiled.function, compiled.packed_metadata

    def launch(programs: int, stream: int, *arguments: Any) -> None:
        run(programs, 1, 1, stream, function, metadata, None, None, None, *arguments)

    return launch


@cache
def _sweeping(device: torch.device, dtype: torch.dtype, full: bool) -> Launch:
    kind = _KINDS[dtype]
    with torch.cuda.device(device):
        return _launching(
            _sweep.warmup(
                kind.item, _ANY, _ANY, torch.int64, torch.int32, torch.uint64, torch.float64,
                kind.name, full, kind.threads, kind.vector,
                grid=(1,), num_warps=kind.threads // 32, maxnreg=128 if full else 80,
            )
        )  # fmt: skip


@cache
def _peaking(device: torch.device) -> Launch:
    with torch.cuda.device(device):
        return _launching(_peak.warmup(torch.int64, _ANY, torch.int64, 4096, grid=(1,), num_warps=8))


@cache
def _gathering(device: torch.device, buckets: int) -> Launch:
    word, number = torch.int64, torch.int32
    with torch.cuda.device(device):
        return _launching(
            _gather.warmup(
                word, number, number, number, word, number, number, buckets, grid=(1,), num_warps=16 if buckets else 4
            )
        )


def _on(device: torch.device, numbers: Array) -> torch.Tensor:
    """Send numbers to a device without waiting for them to arrive."""
    return torch.from_numpy(numbers).pin_memory().to(device, non_blocking=True)


# Reading the result -----------------------------------------------------------------------------


class _Buckets(NamedTuple):
    """Occupied places of a bucket table, ascending, and their counts: first the positive half, then the negative."""

    places: Array
    counts: Array
    wide: bool

    def sketch(self, finite: int) -> Sketch:
        """Read as a sketch; what no bucket counts lies around zero."""
        half = 1 << (17 if self.wide else 14)
        before = ((1023 if self.wide else 127) + LOWEST) * STEPS - 1
        split = int(np.searchsorted(self.places, half))
        positive, negative = self.places[:split] - before, before + half - self.places[split:][::-1]
        counts = self.counts.astype(np.int64)
        around = finite - int(counts.sum())
        zero = [0] if around else []
        return Sketch(
            np.concatenate([negative, np.array(zero, np.int32), positive], dtype=np.int32),
            np.concatenate([counts[split:][::-1], np.array([around] * len(zero), np.int64), counts[:split]]),
        )


class Numbers(NamedTuple):
    """What is known of one tensor: its head, and its buckets where they were asked for."""

    head: Array
    buckets: _Buckets | None

    @classmethod
    def read(cls, sheet: Sheet, bring: Callable[..., list[Array]]) -> list[Numbers]:
        """Have a sheet's heads brought to the host, and of the lists as much as there is."""
        [heads] = bring(sheet.heads)
        if not sheet.lists.numel():
            return [cls(head, None) for head in heads]
        listed = int(heads[:, 13].sum())
        places, counts = bring(sheet.lists[0, :listed], sheet.lists[1, :listed])
        wide = sheet.lists.shape[1] // len(heads) > 1 << 15
        parts = [slice(begin, begin + size) for size, begin in heads[:, 13:15].tolist()]
        return [cls(head, _Buckets(places[part], counts[part], wide)) for head, part in zip(heads, parts, strict=True)]

    def summary(self, dtype: str, shape: tuple[int, ...]) -> Summary:
        """Make the summary of the tensor that was swept."""
        whole, real = self.head.tolist(), self.head.view(np.float64).tolist()
        finite = whole[3]
        zeros, nan, posinf, neginf = whole[6:10]
        count = finite + nan + posinf + neginf
        lowest, highest = (real[4], real[5]) if finite else (math.nan, math.nan)
        mean, std, magnitude = math.nan, math.nan, 0.0
        if finite:
            mean, magnitude = _scaled(real[0], -whole[12]), _scaled(real[2], -whole[12])
            std = _scaled(math.sqrt(real[1] / finite), -whole[12])
            if lowest == highest:
                mean, std = highest, 0.0
        full = self.buckets is not None
        return Summary(
            count, nan, posinf, neginf, zeros,
            mean, std, lowest, highest, magnitude,
            tuple(real[16 : 16 + min(count, 10)]), dtype, shape, 1,
            None if self.buckets is None else self.buckets.sketch(finite),
            whole[10] % 2**64 if full else None, whole[11] % 2**64 if full else None,
        )  # fmt: skip


def _scaled(value: float, power: int) -> float:
    if not power:
        return value
    with np.errstate(over="ignore"):
        return float(np.ldexp(value, power))
