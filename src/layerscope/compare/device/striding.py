"""The kernel that takes the plain of a pair (Triton): whole tiles of finite elements.

It is launched by `pairs.py`. A tensor is rows of `span` elements, and `threads` threads with `vector` elements each
take several rows at a time, `columns` threads to a row. Where an element was not finite, where |d| left the window of
its counters, or where a mean hides the spread, the program says so in its row, and `mend` takes all that it had.
"""

from __future__ import annotations

from typing import Any

from layerscope.compare.device.counting import (
    OUTSIDE,
    bins_of,
    clear,
    count_in,
    counted_in,
    counter_of,
    hand_over,
    magnitude_key,
    window,
)
from layerscope.compare.device.taking import COLUMNS, FAR, either, how_many, larger, most, ratio_of, side_of, worst
from layerscope.stats.launching import jit, tl

__all__ = ["stride"]


@jit
def _spread_enough(total: tl.tensor, squares: tl.tensor, number: tl.tensor) -> Any:
    """Whether a sum of squares keeps its digits when it is made one around the mean; not where it is no number."""
    spread = squares - total * total / tl.maximum(number, 1).to(tl.float64)
    return (spread >= squares * 1e-4) & (squares < float("inf"))


@jit
def stride(
    reference: tl.tensor, candidate: tl.tensor, count: tl.tensor, spans: tl.tensor, power: tl.tensor,
    epsilon: tl.tensor, worth_r: tl.tensor, worth_c: tl.tensor, rows: tl.tensor, table: tl.tensor, tokens: tl.tensor,
    scratch: tl.tensor,
    kind_r: tl.constexpr, kind_c: tl.constexpr, same_kind: tl.constexpr, narrow: tl.constexpr, scaled: tl.constexpr,
    by_token: tl.constexpr, unit: tl.constexpr, threads: tl.constexpr, vector: tl.constexpr, columns: tl.constexpr,
) -> None:  # fmt: skip
    """Take the whole tiles of a program's rows, in sums of squares as they are.

    That costs four digits where a mean is a hundred times the standard deviation; where it is more, it is taken again.
    `span` is `spans * unit`, so that the compiler knows its divisor.
    """
    abreast: tl.constexpr = threads // columns
    step: tl.constexpr = columns * vector
    program = tl.program_id(0)
    span = spans.to(tl.int64) * unit
    total = (count.to(tl.int64) + span - 1) // span
    groups = (total + abreast - 1) // abreast
    first = program * groups // tl.num_programs(0)
    last = tl.minimum((program + 1) * groups // tl.num_programs(0), count.to(tl.int64) // span // abreast)
    whole = span // step * step
    thread = tl.arange(0, threads)
    lane = tl.arange(0, vector)
    begin = (thread // columns).to(tl.int64) * span + thread % columns * vector
    tiny = epsilon.to(tl.int64).to(tl.float64, bitcast=True)
    bins = bins_of(program, scratch)
    row = rows + program * COLUMNS

    # Scout the first tile for the window of the counters.
    at = first * abreast * span + begin
    on = at[:, None] + lane[None, :] < tl.where(first < last, count.to(tl.int64), 0)
    rv = side_of(tl.load(reference + (at[:, None] + lane[None, :]), mask=on, other=0), worth_r, power, kind_r, scaled)
    cv = side_of(tl.load(candidate + (at[:, None] + lane[None, :]), mask=on, other=0), worth_c, power, kind_c, scaled)
    r, c = rv.to(tl.float64), cv.to(tl.float64)
    finite = (tl.abs(r) < float("inf")) & (tl.abs(c) < float("inf"))
    odd = tl.max(tl.max((~finite).to(tl.int32), 1), 0)
    low = window(r, c, on & finite)
    last = tl.where(odd > 0, first, last)
    clear(bins, threads)

    sum_r = tl.zeros([threads], tl.float64)
    sum_c = tl.zeros([threads], tl.float64)
    sum_d = tl.zeros([threads], tl.float64)
    square_r = tl.zeros([threads], tl.float64)
    square_c = tl.zeros([threads], tl.float64)
    square_d = tl.zeros([threads], tl.float64)
    product = tl.zeros([threads], tl.float64)
    size_r = tl.zeros([threads], tl.float64)
    size_c = tl.zeros([threads], tl.float64)
    size_d = tl.zeros([threads], tl.float64)
    relative = tl.zeros([threads], tl.float64)
    steepest = tl.zeros([threads], tl.float64)
    largest = tl.zeros([threads], tl.float64) - 1.0
    place = tl.zeros([threads], tl.int64)
    equal = tl.zeros([threads], tl.float32)
    zeros_r = tl.zeros([threads], tl.float32)
    zeros_c = tl.zeros([threads], tl.float32)
    lowest_r = tl.zeros([threads], rv.dtype) + float("inf")
    lowest_c = tl.zeros([threads], cv.dtype) + float("inf")
    highest_r = tl.zeros([threads], rv.dtype) - float("inf")
    highest_c = tl.zeros([threads], cv.dtype) - float("inf")
    if same_kind:
        bits = tl.zeros([threads], reference.dtype.element_ty)

    for group in tl.range(first, last):
        start = group * abreast * span + begin
        error = tl.zeros([threads], tl.float64)
        strength = tl.zeros([threads], tl.float64)
        for column in tl.range(0, whole, step):
            at = start + column
            raw_r = tl.load(reference + (at[:, None] + lane[None, :]))
            raw_c = tl.load(candidate + (at[:, None] + lane[None, :]))
            rv = side_of(raw_r, worth_r, power, kind_r, scaled)
            cv = side_of(raw_c, worth_c, power, kind_c, scaled)
            if same_kind:
                bits |= either(raw_r ^ raw_c)
            lowest_r = tl.minimum(lowest_r, tl.min(rv, 1))
            lowest_c = tl.minimum(lowest_c, tl.min(cv, 1))
            highest_r = tl.maximum(highest_r, tl.max(rv, 1))
            highest_c = tl.maximum(highest_c, tl.max(cv, 1))
            zeros_r += how_many(rv == 0)
            zeros_c += how_many(cv == 0)
            r, c = rv.to(tl.float64), cv.to(tl.float64)
            d = c - r
            away = tl.abs(d)
            if narrow:
                equal += how_many(rv == cv)
            else:
                equal += how_many(d == 0)
            sum_r += tl.sum(r, 1)
            sum_c += tl.sum(c, 1)
            sum_d += tl.sum(d, 1)
            strength += tl.sum(r * r, 1)
            square_c += tl.sum(c * c, 1)
            error += tl.sum(d * d, 1)
            product += tl.sum(r * c, 1)
            size_r += tl.sum(tl.abs(r), 1)
            size_c += tl.sum(tl.abs(c), 1)
            size_d += tl.sum(away, 1)
            ratio = ratio_of(away, tl.abs(r) + tiny, narrow)
            relative += tl.sum(ratio, 1)
            steepest = larger(steepest, most(ratio))
            farthest = most(away)
            place = tl.where(farthest > largest, at, place)
            largest = larger(largest, farthest)
            count_in(counter_of(magnitude_key(d), low), bins)
        square_r += strength
        square_d += error
        if by_token:
            line = group * abreast + tl.arange(0, abreast)
            tl.store(tokens + line, tl.sum(tl.reshape(error, [abreast, columns]), 1))
            tl.store(tokens + total + line, tl.sum(tl.reshape(strength, [abreast, columns]), 1))

    tl.debug_barrier()
    number = tl.maximum(last - first, 0) * abreast * whole
    same = tl.sum(equal.to(tl.int64), 0)
    sum_of_r, sum_of_c, sum_of_d = tl.sum(sum_r, 0), tl.sum(sum_c, 0), tl.sum(sum_d, 0)
    square_of_r, square_of_c, square_of_d = tl.sum(square_r, 0), tl.sum(square_c, 0), tl.sum(square_d, 0)
    outside = tl.max(counted_in(thread * 0 + OUTSIDE, bins), 0)
    plain = (odd == 0) & (outside == same)  # and no sum is infinite or NaN, which the comparisons below deny
    plain &= _spread_enough(sum_of_r, square_of_r, number)
    plain &= _spread_enough(sum_of_c, square_of_c, number)
    plain &= _spread_enough(sum_of_d, square_of_d, number)
    tl.store(row + 45, tl.where(plain, 0.0, 1.0).to(tl.float64))
    if plain:
        hand_over(bins, low, table)
        top = tl.max(largest, 0)
        where = tl.min(tl.where(largest == top, place, FAR), 0)
        until = tl.where(number > 0, where + vector, 0)
        which, worst_r, worst_c = worst(
            reference, candidate, where, until, top, power, worth_r, worth_c, kind_r, kind_c, scaled, vector
        )
        size_of_r = tl.sum(size_r, 0)
        tl.store(row, number.to(tl.float64))
        tl.store(row + 4, sum_of_r)
        tl.store(row + 5, sum_of_c)
        tl.store(row + 6, sum_of_d)
        tl.store(row + 7, square_of_r)
        tl.store(row + 8, square_of_c)
        tl.store(row + 9, tl.sum(product, 0))
        tl.store(row + 10, square_of_d)
        tl.store(row + 11, size_of_r)
        tl.store(row + 12, tl.sum(size_d, 0))
        tl.store(row + 13, tl.sum(relative, 0))
        tl.store(row + 14, tl.max(steepest, 0))
        tl.store(row + 15, top)
        tl.store(row + 16, (where + which).to(tl.float64))
        tl.store(row + 17, worst_r)
        tl.store(row + 18, worst_c)
        tl.store(row + 19, same.to(tl.float64))
        tl.store(row + 22 + tl.arange(0, 2), tl.zeros([2], tl.float64) + float("inf"))
        tl.store(row + 24, number.to(tl.float64))
        tl.store(row + 25, sum_of_r)
        tl.store(row + 26, square_of_r)
        tl.store(row + 27, size_of_r)
        tl.store(row + 28, tl.min(lowest_r, 0).to(tl.float64))
        tl.store(row + 29, tl.max(highest_r, 0).to(tl.float64))
        tl.store(row + 30, tl.sum(zeros_r.to(tl.int64), 0).to(tl.float64))
        tl.store(row + 34, number.to(tl.float64))
        tl.store(row + 35, sum_of_c)
        tl.store(row + 36, square_of_c)
        tl.store(row + 37, tl.sum(size_c, 0))
        tl.store(row + 38, tl.min(lowest_c, 0).to(tl.float64))
        tl.store(row + 39, tl.max(highest_c, 0).to(tl.float64))
        tl.store(row + 40, tl.sum(zeros_c.to(tl.int64), 0).to(tl.float64))
        if same_kind:
            tl.store(row + 44, tl.max((bits != 0).to(tl.int32), 0).to(tl.float64))
