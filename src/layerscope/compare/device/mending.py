"""The kernel that takes the rest of a pair (Triton): the rims that fill no tile, and whatever is not plain.

It is launched by `pairs.py` after `stride`, with as many programs. Each takes its sums around centres of its own, which
it has scouted in its first tile.
"""

from __future__ import annotations

from typing import Any

from layerscope.compare.device.counting import (
    LOWEST_KEY,
    OUTSIDE,
    bins_of,
    clear,
    count_in,
    counter_of,
    hand_over,
    magnitude_key,
    window,
)
from layerscope.compare.device.taking import COLUMNS, FAR, larger, most, ratio_of, side_of, worst
from layerscope.stats.launching import jit, tl

__all__ = ["mend"]


@jit
def _centre(x: tl.tensor, on: tl.tensor) -> Any:
    """The mean, of a constant exactly; 0 of nothing."""
    number = tl.sum(tl.sum(on.to(tl.int32), 1), 0)
    lowest = tl.min(tl.min(tl.where(on, x, float("inf")), 1), 0)
    highest = tl.max(tl.max(tl.where(on, x, float("-inf")), 1), 0)
    mean = tl.sum(tl.sum(tl.where(on, x, 0.0), 1), 0) / tl.maximum(number, 1).to(tl.float64)
    return tl.where(number == 0, 0.0, tl.where(lowest == highest, lowest, mean))


@jit
def _number(condition: tl.tensor) -> Any:
    return tl.sum(condition.to(tl.int32), 1)


@jit
def _added(x: tl.tensor) -> Any:
    return tl.sum(x.to(tl.int64), 0).to(tl.float64)


@jit
def mend(
    reference: tl.tensor, candidate: tl.tensor, count: tl.tensor, spans: tl.tensor, power: tl.tensor,
    epsilon: tl.tensor, worth_r: tl.tensor, worth_c: tl.tensor, rows: tl.tensor, table: tl.tensor, tokens: tl.tensor,
    scratch: tl.tensor,
    kind_r: tl.constexpr, kind_c: tl.constexpr, same_kind: tl.constexpr, narrow: tl.constexpr, scaled: tl.constexpr,
    by_token: tl.constexpr, unit: tl.constexpr, threads: tl.constexpr, vector: tl.constexpr, columns: tl.constexpr,
) -> None:  # fmt: skip
    """Take what `stride` left, element by element, whatever it is; the rows of this kernel come after its."""
    abreast: tl.constexpr = threads // columns
    step: tl.constexpr = columns * vector
    program = tl.program_id(0)
    programs = tl.num_programs(0)
    size = count.to(tl.int64)
    span = spans.to(tl.int64) * unit
    total = (size + span - 1) // span
    groups = (total + abreast - 1) // abreast
    first = program * groups // programs
    last = (program + 1) * groups // programs
    taken = tl.minimum(last, size // span // abreast)  # groups whose tiles `stride` took
    whole = span // step * step
    if tl.load(rows + program * COLUMNS + 45) != 0.0:
        whole = whole * 0
        taken = tl.minimum(taken, first)
    begin = tl.where(whole < span, first, tl.maximum(first, taken))
    if begin >= last:  # the usual case: there is nothing left
        return
    thread = tl.arange(0, threads)
    lane = tl.arange(0, vector)
    line = (thread // columns).to(tl.int64)
    across = thread % columns * vector
    tiny = epsilon.to(tl.int64).to(tl.float64, bitcast=True)
    bins = bins_of(program, scratch)
    infinity = float("inf")

    column = tl.where(begin < taken, whole, 0)
    here = begin * abreast + line
    at = (here * span + across + column)[:, None] + lane[None, :]
    on = ((across + column)[:, None] + lane[None, :] < span) & (at < tl.where(begin < last, size, 0))
    rv = side_of(tl.load(reference + at, mask=on, other=0), worth_r, power, kind_r, scaled)
    cv = side_of(tl.load(candidate + at, mask=on, other=0), worth_c, power, kind_c, scaled)
    fine_r, fine_c = on & (tl.abs(rv) < infinity), on & (tl.abs(cv) < infinity)
    r = tl.where(fine_r, rv, 0.0).to(tl.float64)
    c = tl.where(fine_c, cv, 0.0).to(tl.float64)
    centre_r, centre_c, centre_d = _centre(r, fine_r), _centre(c, fine_c), _centre(c - r, fine_r & fine_c)
    low = window(r, c, on)
    clear(bins, threads)

    sum_r = tl.zeros([threads], tl.float64)
    sum_c = tl.zeros([threads], tl.float64)
    sum_d = tl.zeros([threads], tl.float64)
    square_r = tl.zeros([threads], tl.float64)
    square_c = tl.zeros([threads], tl.float64)
    square_d = tl.zeros([threads], tl.float64)
    product = tl.zeros([threads], tl.float64)
    size_r = tl.zeros([threads], tl.float64)
    size_d = tl.zeros([threads], tl.float64)
    relative = tl.zeros([threads], tl.float64)
    steepest = tl.zeros([threads], tl.float64)
    largest = tl.zeros([threads], tl.float64) - 1.0
    place = tl.zeros([threads], tl.int64)
    number = tl.zeros([threads], tl.int32)
    equal = tl.zeros([threads], tl.int32)
    differing = tl.zeros([threads], tl.int32)
    odd = tl.zeros([threads], tl.int32)
    foremost = tl.zeros([threads], tl.int64) + FAR
    foremost_odd = tl.zeros([threads], tl.int64) + FAR
    bits = tl.zeros([threads], tl.int32)
    own_sum_r = tl.zeros([threads], tl.float64)
    own_sum_c = tl.zeros([threads], tl.float64)
    own_square_r = tl.zeros([threads], tl.float64)
    own_square_c = tl.zeros([threads], tl.float64)
    own_size_r = tl.zeros([threads], tl.float64)
    own_size_c = tl.zeros([threads], tl.float64)
    number_r = tl.zeros([threads], tl.int32)
    number_c = tl.zeros([threads], tl.int32)
    lowest_r = tl.zeros([threads], rv.dtype) + infinity
    lowest_c = tl.zeros([threads], cv.dtype) + infinity
    highest_r = tl.zeros([threads], rv.dtype) - infinity
    highest_c = tl.zeros([threads], cv.dtype) - infinity
    zeros_r = tl.zeros([threads], tl.int32)
    zeros_c = tl.zeros([threads], tl.int32)
    nan_r = tl.zeros([threads], tl.int32)
    nan_c = tl.zeros([threads], tl.int32)
    up_r = tl.zeros([threads], tl.int32)
    up_c = tl.zeros([threads], tl.int32)
    down_r = tl.zeros([threads], tl.int32)
    down_c = tl.zeros([threads], tl.int32)

    for group in tl.range(begin, last):
        here = group * abreast + line
        error = tl.zeros([threads], tl.float64)
        strength = tl.zeros([threads], tl.float64)
        for column in tl.range(tl.where(group < taken, whole, 0), span, step):
            at = (here * span + across + column)[:, None] + lane[None, :]
            on = ((across + column)[:, None] + lane[None, :] < span) & (at < size)
            raw_r = tl.load(reference + at, mask=on, other=0)
            raw_c = tl.load(candidate + at, mask=on, other=0)
            rv = side_of(raw_r, worth_r, power, kind_r, scaled)
            cv = side_of(raw_c, worth_c, power, kind_c, scaled)
            if same_kind:
                bits |= tl.max((on & (raw_r != raw_c)).to(tl.int32), 1)
            fine_r, fine_c = on & (tl.abs(rv) < infinity), on & (tl.abs(cv) < infinity)
            both = fine_r & fine_c
            lowest_r = tl.minimum(lowest_r, tl.min(tl.where(fine_r, rv, infinity), 1))
            lowest_c = tl.minimum(lowest_c, tl.min(tl.where(fine_c, cv, infinity), 1))
            highest_r = tl.maximum(highest_r, tl.max(tl.where(fine_r, rv, -infinity), 1))
            highest_c = tl.maximum(highest_c, tl.max(tl.where(fine_c, cv, -infinity), 1))
            nan_r += _number(on & (rv != rv))
            nan_c += _number(on & (cv != cv))
            up_r += _number(on & (rv == infinity))
            up_c += _number(on & (cv == infinity))
            down_r += _number(on & (rv == -infinity))
            down_c += _number(on & (cv == -infinity))
            zeros_r += _number(fine_r & (rv == 0))
            zeros_c += _number(fine_c & (cv == 0))
            number_r += _number(fine_r)
            number_c += _number(fine_c)
            number += _number(both)
            strange = on & ~both
            alike = ((rv == cv) | ((rv != rv) & (cv != cv))) & strange
            odd += _number(strange)
            differing += _number(strange & ~alike)
            foremost = tl.minimum(foremost, tl.min(tl.where(strange & ~alike, at, FAR), 1))
            foremost_odd = tl.minimum(foremost_odd, tl.min(tl.where(strange, at, FAR), 1))
            r = tl.where(fine_r, rv, 0.0).to(tl.float64)
            c = tl.where(fine_c, cv, 0.0).to(tl.float64)
            x = tl.where(fine_r, r - centre_r, 0.0)
            y = tl.where(fine_c, c - centre_c, 0.0)
            own_sum_r += tl.sum(x, 1)
            own_sum_c += tl.sum(y, 1)
            own_square_r += tl.sum(x * x, 1)
            own_square_c += tl.sum(y * y, 1)
            own_size_r += tl.sum(tl.abs(r), 1)
            own_size_c += tl.sum(tl.abs(c), 1)
            r, c = tl.where(both, r, 0.0), tl.where(both, c, 0.0)
            x, y = tl.where(both, x, 0.0), tl.where(both, y, 0.0)
            d = c - r
            e = tl.where(both, d - centre_d, 0.0)
            away = tl.abs(d)
            equal += _number(alike | (both & (d == 0)))
            sum_r += tl.sum(x, 1)
            sum_c += tl.sum(y, 1)
            sum_d += tl.sum(e, 1)
            square_r += tl.sum(x * x, 1)
            square_c += tl.sum(y * y, 1)
            square_d += tl.sum(e * e, 1)
            product += tl.sum(x * y, 1)
            size_r += tl.sum(tl.abs(r), 1)
            size_d += tl.sum(away, 1)
            ratio = ratio_of(away, tl.abs(r) + tiny, narrow)
            relative += tl.sum(ratio, 1)
            steepest = larger(steepest, most(ratio))
            if by_token:
                error += tl.sum(d * d, 1)
                strength += tl.sum(r * r, 1)
            farthest = most(tl.where(both, away, -1.0))
            place = tl.where(farthest > largest, here * span + across + column, place)
            largest = larger(largest, farthest)
            key = tl.where(both, magnitude_key(d), 0)
            counter = counter_of(key, low)
            count_in(counter, bins)
            far = (counter == OUTSIDE) & (key >= LOWEST_KEY)
            tl.atomic_add(table + (key - (LOWEST_KEY - 1)), 1, mask=far, sem="relaxed")
        if by_token:
            lines = group * abreast + tl.arange(0, abreast)
            known = lines < total
            before = lines < tl.where(group < taken, total, 0)
            error_of = tl.load(tokens + lines, mask=before, other=0.0)
            strength_of = tl.load(tokens + total + lines, mask=before, other=0.0)
            error_of += tl.sum(tl.reshape(error, [abreast, columns]), 1)
            strength_of += tl.sum(tl.reshape(strength, [abreast, columns]), 1)
            tl.store(tokens + lines, error_of, mask=known)
            tl.store(tokens + total + lines, strength_of, mask=known)

    tl.debug_barrier()
    hand_over(bins, low, table)
    top = tl.max(largest, 0)
    where = tl.min(tl.where(largest == top, place, FAR), 0)
    until = tl.minimum((where // span + 1) * span, tl.where(top >= 0, size, 0))
    which, worst_r, worst_c = worst(
        reference, candidate, where, until, top, power, worth_r, worth_c, kind_r, kind_c, scaled, vector
    )
    row = rows + (programs + program) * COLUMNS
    tl.store(row, _added(number))
    tl.store(row + 1, centre_r)
    tl.store(row + 2, centre_c)
    tl.store(row + 3, centre_d)
    tl.store(row + 4, tl.sum(sum_r, 0))
    tl.store(row + 5, tl.sum(sum_c, 0))
    tl.store(row + 6, tl.sum(sum_d, 0))
    tl.store(row + 7, tl.sum(square_r, 0))
    tl.store(row + 8, tl.sum(square_c, 0))
    tl.store(row + 9, tl.sum(product, 0))
    tl.store(row + 10, tl.sum(square_d, 0))
    tl.store(row + 11, tl.sum(size_r, 0))
    tl.store(row + 12, tl.sum(size_d, 0))
    tl.store(row + 13, tl.sum(relative, 0))
    tl.store(row + 14, tl.max(steepest, 0))
    tl.store(row + 15, top)
    tl.store(row + 16, (where + which).to(tl.float64))
    tl.store(row + 17, worst_r)
    tl.store(row + 18, worst_c)
    tl.store(row + 19, _added(equal))
    tl.store(row + 20, _added(odd))
    tl.store(row + 21, _added(differing))
    foremost = tl.min(foremost, 0)
    foremost_odd = tl.min(foremost_odd, 0)
    tl.store(row + 22, tl.where(foremost < FAR, foremost.to(tl.float64), infinity))
    tl.store(row + 23, tl.where(foremost_odd < FAR, foremost_odd.to(tl.float64), infinity))
    tl.store(row + 24, _added(number_r))
    tl.store(row + 25, tl.sum(own_sum_r, 0))
    tl.store(row + 26, tl.sum(own_square_r, 0))
    tl.store(row + 27, tl.sum(own_size_r, 0))
    tl.store(row + 28, tl.min(lowest_r, 0).to(tl.float64))
    tl.store(row + 29, tl.max(highest_r, 0).to(tl.float64))
    tl.store(row + 30, _added(zeros_r))
    tl.store(row + 31, _added(nan_r))
    tl.store(row + 32, _added(up_r))
    tl.store(row + 33, _added(down_r))
    tl.store(row + 34, _added(number_c))
    tl.store(row + 35, tl.sum(own_sum_c, 0))
    tl.store(row + 36, tl.sum(own_square_c, 0))
    tl.store(row + 37, tl.sum(own_size_c, 0))
    tl.store(row + 38, tl.min(lowest_c, 0).to(tl.float64))
    tl.store(row + 39, tl.max(highest_c, 0).to(tl.float64))
    tl.store(row + 40, _added(zeros_c))
    tl.store(row + 41, _added(nan_c))
    tl.store(row + 42, _added(up_c))
    tl.store(row + 43, _added(down_c))
    tl.store(row + 44, tl.max(bits, 0).to(tl.float64))
