"""The kernels that take a tensor's numbers in one pass, and the one that gathers many tensors' numbers (Triton).

They are launched by `slots.py`, which knows the memory they write to.
"""

from __future__ import annotations

from typing import Any

from layerscope.stats.fingerprints import BLOCK, MIX_ADD, MIX_FIRST, MIX_SECOND
from layerscope.stats.launching import INTERPRETED, constant, jit, tl
from layerscope.stats.sketch import LOWEST, STEPS

PROGRAMS = 512  # that sweep one tensor, at most
WORDS = 16  # in the row of each
HEAD = 32  # words in what they come to together

# A slot in device memory holds a row of numbers per program and one more row about the tensor:
#     0 sum, 1 sum of squares, both of the distance from 3 the centre; 2 sum of magnitudes; 4 finite; 5 lowest,
#     6 highest (float64 bits as ordered integers); 7 zeros, 8 nan, 9 +inf, 10 -inf; 11, 12 fingerprints
#     and in the last row: 0-9 the first values, 10 how many programs, 11 the largest magnitude of a float64 tensor,
#     12 the power of two it was scaled by.

_ROWS, _COLUMNS, _HEAD = constant(PROGRAMS), constant(WORDS), constant(HEAD)
_FIRST, _ADD, _SECOND = (constant(number) for number in (MIX_FIRST, MIX_ADD, MIX_SECOND))
_PERIOD = constant(BLOCK)
_ON_HOST = constant(INTERPRETED)
_LIFT = constant(2.0**896)
_ROUNDER = constant(1.5 * 2.0**37)  # times a power of two, added and taken away again: 15 binary digits below it remain

# Counting buckets takes atomics in shared memory, which Triton has no word for: these few lines are PTX. The counters
# cover a window of 32 powers of two of either sign below the largest value a program has scouted; the last counter of
# each sign takes whatever lies outside, and what of that is not zero is then counted in global memory, which is rare.
_WINDOW = 32 * STEPS
_STRIDE = _WINDOW + 1
_DECLARE = constant(f".shared .align 16 .b32 layerscope_bins[{2 * _STRIDE}]; mov.u32 $0, $1;")
_AT = "{ .reg .u32 at; mov.u32 at, layerscope_bins; mad.lo.u32 at, $1, 4, at;"
_CLEAR = constant(f"{_AT} st.shared.u32 [at], 0; mov.u32 $0, 0; }}")
_READ = constant(f"{_AT} ld.shared.u32 $0, [at]; }}")


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


_HALF, _HALF_WIDE = constant(1 << 14), constant(1 << 17)
_LEAST, _LEAST_WIDE = constant((127 + LOWEST) * STEPS), constant((1023 + LOWEST) * STEPS)
_COUNT_4, _USING_4 = map(constant, _counting(4, first=127 + LOWEST, last=255, half=1 << 14))
_COUNT_8, _USING_8 = map(constant, _counting(8, first=127 + LOWEST, last=255, half=1 << 14))
_COUNT_WIDE, _USING_WIDE = map(constant, _counting(2, first=1023 + LOWEST, last=2047, half=1 << 17))


@jit
def _mixed(x: tl.tensor) -> Any:
    """`prints.mixed`."""
    x = x * _FIRST + _ADD
    x = (x ^ (x >> 32)) * _SECOND
    return x ^ (x >> 32)


@jit
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


@jit
def bits_of(raw: tl.tensor, worth: tl.tensor, kind: tl.constexpr) -> Any:
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


@jit
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


@jit
def _count(bits: tl.tensor, low: tl.tensor, table: tl.tensor, kind: tl.constexpr) -> None:
    """Add one to each value's bucket: sign, exponent and six bits of the fraction."""
    if kind == "float64":
        bucket = (bits >> 46).to(tl.uint32)
    elif bits.dtype == tl.uint32:
        bucket = bits >> 17
    else:
        size = ((bits & 0x7FFFFFFFFFFFFFFF) >> 46).to(tl.uint32) - 896 * 64
        bucket = tl.where(size < _HALF, size, 0) | ((bits >> 63) << 14).to(tl.uint32)
    if _ON_HOST:  # where no PTX runs
        half: tl.constexpr = _HALF_WIDE if kind == "float64" else _HALF
        least: tl.constexpr = _LEAST_WIDE if kind == "float64" else _LEAST
        size = bucket & (half - 1)
        known = (size >= least) & (size < half - 64)  # no zero, and not the exponent of infinity
        tl.atomic_add(table + bucket.to(tl.int32), 1, mask=known)
    elif kind == "float64":
        using = [bucket, low, table.to(tl.int64)]
        tl.inline_asm_elementwise(_COUNT_WIDE, _USING_WIDE, using, tl.int32, is_pure=False, pack=2)
    elif bucket.shape[1] == 8:
        using = [bucket, low, table.to(tl.int64)]
        tl.inline_asm_elementwise(_COUNT_8, _USING_8, using, tl.int32, is_pure=False, pack=8)
    else:
        using = [bucket, low, table.to(tl.int64)]
        tl.inline_asm_elementwise(_COUNT_4, _USING_4, using, tl.int32, is_pure=False, pack=4)


@jit
def _ordered(bits: tl.tensor) -> Any:
    """Float bits as float64 bits that compare as integers; -0.0 comes before 0.0."""
    if bits.dtype == tl.uint32:
        wide = bits.to(tl.float32, bitcast=True).to(tl.float64).to(tl.int64, bitcast=True)
    else:
        wide = bits.to(tl.int64, bitcast=True)
    return wide ^ ((wide >> 63) & 0x7FFFFFFFFFFFFFFF)


@jit
def _added(
    a: tl.tensor, b: tl.tensor, c: tl.tensor, d: tl.tensor, e: tl.tensor,
    f: tl.tensor, g: tl.tensor, h: tl.tensor, i: tl.tensor,
    j: tl.tensor, k: tl.tensor, l: tl.tensor, m: tl.tensor, n: tl.tensor,  # noqa: E741
    o: tl.tensor, p: tl.tensor, q: tl.tensor, r: tl.tensor,
) -> Any:  # fmt: skip
    return a + j, b + k, c + l, d + m, e + n, f + o, g + p, h + q, i + r


@jit
def peak(items: tl.tensor, count: tl.tensor, slot: tl.tensor, block: tl.constexpr) -> None:
    """Leave the bits of the largest finite magnitude of a float64 tensor, whose squares may leave float64's range."""
    at = tl.program_id(0).to(tl.int64) * block + tl.arange(0, block)
    size = tl.load(items + at, mask=at < count, other=0) & 0x7FFFFFFFFFFFFFFF
    tl.atomic_max(slot + (_ROWS * _COLUMNS + 11), tl.max(tl.where(size < 0x7FF0000000000000, size, 0), 0))


@jit
def sweep(
    items: tl.tensor, count: tl.tensor, tiles: tl.tensor,
    slot: tl.tensor, table: tl.tensor, weights: tl.tensor, worth: tl.tensor,
    kind: tl.constexpr, full: tl.constexpr, threads: tl.constexpr, vector: tl.constexpr,
) -> None:  # fmt: skip
    """Take the numbers of one tensor, `tiles` tiles in each program."""
    program = tl.program_id(0)
    _sweep(
        items, count, tiles, program, tl.num_programs(0), slot, table, weights, worth,
        kind, full, threads, vector,
    )  # fmt: skip


@jit
def sweep_all(
    like: tl.tensor, entries: tl.tensor, first: tl.tensor, most: tl.tensor,
    slots: tl.tensor, tables: tl.tensor, weights: tl.tensor, worth: tl.tensor,
    kind: tl.constexpr, full: tl.constexpr, threads: tl.constexpr, vector: tl.constexpr, size: tl.constexpr,
) -> None:  # fmt: skip
    """Take the numbers of many tensors of one dtype, `most` programs to each; their slots begin with the `first`.

    An entry is a tensor's address, how many items it has, and how many tiles each of its programs takes. `like` is a
    pointer to such items, and nothing lies there.
    """
    program = tl.program_id(0).to(tl.int64)
    index, part = program // most, program % most
    entry = entries + index * 3
    count, tiles = tl.load(entry + 1), tl.load(entry + 2)
    programs = tl.cdiv(tl.cdiv(count, threads * vector), tiles)
    slot = slots + (first + index) * ((_ROWS + 1) * _COLUMNS)
    if part < programs:
        items = tl.multiple_of(tl.load(entry).to(like.dtype), 16)
        _sweep(
            items, count, tiles, part, programs, slot, tables + (first + index) * size, weights, worth,
            kind, full, threads, vector,
        )  # fmt: skip


@jit
def _sweep(
    items: tl.tensor, count: tl.tensor, tiles: tl.tensor, program: tl.tensor, programs: tl.tensor,
    slot: tl.tensor, table: tl.tensor, weights: tl.tensor, worth: tl.tensor,
    kind: tl.constexpr, full: tl.constexpr, threads: tl.constexpr, vector: tl.constexpr,
) -> None:  # fmt: skip
    """Sweep `tiles` tiles per program in the quickest arithmetic; where that was not good enough, look again with care.

    Floats of up to 32 bits are added up eight or four at a time in float32, and these sums in float64. That is not good
    enough where an item is not finite, or where squares leave the range of float32.
    """
    tile: tl.constexpr = threads * vector
    wide: tl.constexpr = (kind != "float32") & (kind != "bfloat16") & (kind != "float16")
    word: tl.constexpr = tl.uint64 if wide else tl.uint32
    integer: tl.constexpr = tl.int64 if wide else tl.int32
    infinity: tl.constexpr = 0x7FF0000000000000 if wide else 0x7F800000
    sign: tl.constexpr = 0x8000000000000000 if wide else 0x80000000
    lift: tl.constexpr = 1.0 if wide else _LIFT
    unroll: tl.constexpr = 2 if full else 4  # H200, bfloat16: 2.6 TB/s with two, 3.05 with four; full 0.98 and 0.97

    start = program.to(tl.int64) * tiles * tile
    stop = tl.minimum(start + tiles * tile, count)
    whole = start + (stop - start) // tile * tile
    rows = tl.arange(0, threads)
    transfers = rows[:, None] * vector + tl.arange(0, vector)[None, :]

    power = tl.full([], 0, tl.int64)
    scale = 1.0
    if kind == "float64":
        exponent = tl.load(slot + (_ROWS * _COLUMNS + 11)) >> 52
        power = tl.minimum(tl.maximum(1022 - exponent, -1022), 1000)
        scale = ((power + 1023) << 52).to(tl.float64, bitcast=True)

    # Scout the first tile for a centre and for the window of the buckets.
    within = start + transfers < stop
    bits = bits_of(tl.load(items + start + transfers, mask=within, other=0), worth, kind)
    finite = within & ((bits & (sign - 1)) < infinity)
    value = tl.where(finite, _values(bits, scale, kind) * lift, 0.0)
    known = tl.sum(tl.sum(finite.to(tl.int32), 1), 0)
    centre = tl.sum(tl.sum(value, 1), 0) / tl.maximum(known, 1)
    if not wide:  # of few digits, so that the distance of a value of few digits is exact
        highest_power = tl.max(tl.max(tl.abs(value), 1), 0).to(tl.int64, bitcast=True) & 0x7FF0000000000000
        rounder = highest_power.to(tl.float64, bitcast=True) * _ROUNDER
        centre = ((centre + rounder) - rounder).to(tl.float32)
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
        if not _ON_HOST:
            tl.inline_asm_elementwise(_DECLARE, "=r,r", [rows], tl.int32, is_pure=False, pack=1)
            tl.inline_asm_elementwise(_CLEAR, "=r,r", [bins + (bins >> 11)], tl.int32, is_pure=False, pack=1)
            tl.debug_barrier()
        weight = tl.load(weights + transfers % _PERIOD)

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

    for at in tl.range(start, whole, tile, loop_unroll_factor=unroll):  # several loads under way instead of one
        raw = tl.load(items + at + transfers)
        bits = bits_of(raw, worth, kind)
        item = _values(bits, scale, kind) if wide else bits.to(tl.float32, bitcast=True)
        away = item - centre
        sums += tl.sum(away, 1)
        squares += tl.sum(away * away, 1)
        magnitude += tl.sum(tl.abs(item), 1)
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
        if not wide:
            spread = tl.sum(squares, 0)
            spoiled = spoiled | (spread < (whole - start) * 2.0**-100) | (spread > 2.0**126)
        begin = tl.where(spoiled, start, whole)
        sums = tl.where(spoiled, 0.0, sums)
        squares = tl.where(spoiled, 0.0, squares)
        magnitude = tl.where(spoiled, 0.0, magnitude)
        zeros = tl.where(spoiled, 0, zeros)
        signed = tl.where(spoiled, least, signed)
        largest = tl.where(spoiled, nothing, largest)
        smallest = tl.where(spoiled, nothing - 1, smallest)
    for at in tl.range(begin, stop, tile):
        within = at + transfers < stop
        raw = tl.load(items + at + transfers, mask=within, other=0)
        bits = bits_of(raw, worth, kind)
        size = bits & (sign - 1)
        finite = within & (size < infinity)
        value = tl.where(finite, _values(bits, scale, kind) * lift, 0.0)
        distance = tl.where(finite, value - centre, 0.0)
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
    tl.store(row + 2, magnitude.to(tl.int64, bitcast=True))
    tl.store(row + 3, centre.to(tl.float64).to(tl.int64, bitcast=True))
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
        head = bits_of(tl.load(items + ten, mask=ten < count, other=0), worth, kind)
        if wide:
            first = head.to(tl.int64, bitcast=True)
        else:
            first = head.to(tl.float32, bitcast=True).to(tl.float64).to(tl.int64, bitcast=True)
        tl.store(about + ten, first, mask=ten < 10)
        tl.store(about + 10, programs.to(tl.int64))
        tl.store(about + 12, power)
    if full and not _ON_HOST:
        tl.debug_barrier()
        counted = tl.inline_asm_elementwise(_READ, "=r,r", [bins + (bins >> 11)], tl.int32, is_pure=False, pack=1)
        half: tl.constexpr = _HALF_WIDE if kind == "float64" else _HALF
        tl.atomic_add(table + ((bins >> 11) * half + (bins & 2047) + low), counted, mask=counted > 0, sem="relaxed")


@jit
def gather(
    slots: tl.tensor, tables: tl.tensor, cursor: tl.tensor, next_cursor: tl.tensor,
    buffer: tl.tensor, size: tl.constexpr,
) -> None:  # fmt: skip
    """Join the programs' numbers of one slot and list its occupied buckets behind those of others; empty its table.

    A buffer is the heads of all slots and, behind them, the list: of each bucket the place in the lower half of a word
    and the count in the upper. A head is 0 mean, 1 sum of squared distances from it, 2 sum of magnitudes, 3 finite,
    4 lowest, 5 highest, 6 zeros, 7 nan, 8 +inf, 9 -inf, 10 and 11 fingerprints, 12 the power of two, 13 how many
    buckets, 14 where in the list they begin, 16-25 the first values.
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
    head = buffer + index * _HEAD
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
        listed = buffer + tl.num_programs(0) * _HEAD
        for start in tl.range(0, size, 8192):
            buckets += tl.sum((tl.load(table + start + block) > 0).to(tl.int32), 0)
        begin = tl.atomic_add(cursor, buckets, sem="relaxed")
        place = begin - 1
        for start in tl.range(0, size, 8192):
            counted = tl.load(table + start + block)
            some = counted > 0
            at = place + tl.cumsum(some.to(tl.int32), 0)
            tl.store(listed + at, (counted.to(tl.int64) << 32) | (start + block), mask=some)
            tl.store(table + start + block, 0, mask=some)
            place += tl.sum(some.to(tl.int32), 0)
        if index == 0:
            tl.store(next_cursor, 0)
    tl.store(head + 13, buckets.to(tl.int64))
    tl.store(head + 14, begin.to(tl.int64))
