"""What both kernels do with the elements they have read: their values, the larger, the relative error, the worst.

r = side_of(tl.load(reference + at), worth_r, power, "bfloat16", False).to(tl.float64)
"""

from __future__ import annotations

from typing import Any

from layerscope.compare.device.reading import values
from layerscope.stats.launching import INTERPRETED, constant, jit, tl

__all__ = ["COLUMNS", "FAR", "WORDS", "either", "how_many", "larger", "most", "ratio_of", "side_of", "worst"]

# A row of float64 per program, zero at first:
#     0 pairs; 1, 2, 3 centres of reference, candidate and d; 4, 5, 6 sums of the distances from them, 7, 8 squares of
#     the first two, 9 their product, 10 squares of d's; 11, 12 magnitudes of reference and d; 13 relative errors, 14
#     the largest of them; 15 the largest |d|, 16 where, 17, 18 both sides there; 19 equal, 20 not finite, 21 of these
#     differing, 22 the first of those, 23 the first at all; 24-33 the reference by itself (count, sum, squares,
#     magnitudes, lowest, highest, zeros, nan, +inf, -inf), 34-43 the candidate; 44 whether a bit differs; 45 whether
#     all of it is to be taken again.
WORDS = 48
COLUMNS = constant(WORDS)
FAR = constant(1 << 62)
_ON_HOST = constant(INTERPRETED)


@jit
def larger(a: tl.tensor, b: tl.tensor) -> Any:
    """Return the larger of two."""
    return tl.where(a > b, a, b)


@jit
def most(x: tl.tensor) -> Any:
    """The largest of each thread; a comparison and a choice are cheaper than float64's own maximum."""
    if _ON_HOST:  # which takes such reductions one by one
        return tl.max(x, 1)
    else:  # noqa: RET505
        return tl.reduce(x, 1, larger)


@jit
def _joined(a: tl.tensor, b: tl.tensor) -> Any:
    return a | b


@jit
def either(x: tl.tensor) -> Any:
    """The bits that any of a thread's has."""
    if _ON_HOST:
        return tl.max((x != 0).to(x.dtype), 1)
    else:  # noqa: RET505
        return tl.reduce(x, 1, _joined)


@jit
def how_many(condition: tl.tensor) -> Any:
    """Count each thread's in float32, exact up to 2**24 and added where nothing else is."""
    return tl.sum(tl.where(condition, 1.0, 0.0), 1)


@jit
def _power(exponent: tl.tensor) -> Any:
    return ((exponent.to(tl.int64) + 1023) << 52).to(tl.float64, bitcast=True)


@jit
def side_of(raw: tl.tensor, worth: tl.tensor, power: tl.tensor, kind: tl.constexpr, scaled: tl.constexpr) -> Any:
    """What items are worth, times a power of two that may itself leave float64's range."""
    value = values(raw, worth, kind)
    if scaled:
        half = power // 2
        value = value.to(tl.float64) * _power(half) * _power(power - half)
    return value


@jit
def ratio_of(d: tl.tensor, size: tl.tensor, narrow: tl.constexpr) -> Any:
    """`d / size`; of float32's values within 1e-12, at a quarter of the price: a guess of 20 bits, and one step."""
    if _ON_HOST or not narrow:
        return d / size
    else:  # noqa: RET505
        guess = tl.inline_asm_elementwise(
            "rcp.approx.ftz.f64 $0, $1;", "=d,d", [size], tl.float64, is_pure=True, pack=1
        )
        return d * tl.fma(guess, tl.fma(-size, guess, 1.0), guess)


@jit
def worst(
    reference: tl.tensor, candidate: tl.tensor, where: tl.tensor, until: tl.tensor, top: tl.tensor, power: tl.tensor,
    worth_r: tl.tensor, worth_c: tl.tensor,
    kind_r: tl.constexpr, kind_c: tl.constexpr, scaled: tl.constexpr, vector: tl.constexpr,
) -> Any:  # fmt: skip
    """Which of a thread's few elements is the first with |d| of `top`, and both sides there."""
    lane = tl.arange(0, vector)
    some = where + lane < until
    r = side_of(tl.load(reference + where + lane, mask=some, other=0), worth_r, power, kind_r, scaled).to(tl.float64)
    c = side_of(tl.load(candidate + where + lane, mask=some, other=0), worth_c, power, kind_c, scaled).to(tl.float64)
    which = tl.min(tl.where(some & (tl.abs(c - r) == top), lane, vector - 1), 0)
    chosen = lane == which
    return which, tl.sum(tl.where(chosen, r, 0.0), 0), tl.sum(tl.where(chosen, c, 0.0), 0)
