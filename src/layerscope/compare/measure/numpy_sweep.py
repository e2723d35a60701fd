"""The verb of `numba_sweep` in numpy alone, block by block: the same numbers, slower. And complex numbers, for both.

    sweep(reference, candidate, buckets=buckets)
    sweep_complex(reference, candidate, buckets=buckets)

Complex tensors are rare: speed does not matter here.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from layerscope.compare.measure.sums import Alone, Swept, Together
from layerscope.stats.sketch import buckets as bucket_of
from layerscope.stats.tensor_views import Array

_BLOCK = 1 << 15  # elements at a time: their copies as float64 stay in the second-level cache


def sweep(
    reference: Array, candidate: Array, *, buckets: Array, same: bool = False, start: int = 0,
    epsilon: float = 1e-8, width: int = 0,
) -> Swept:  # fmt: skip
    """Sweep contiguous real elements, as `numba_sweep.sweep` does."""
    return _swept(reference, candidate, np.dtype(np.float64), buckets, start, epsilon, width)


def sweep_complex(
    reference: Array, candidate: Array, *, buckets: Array, same: bool = False, start: int = 0,
    epsilon: float = 1e-8, width: int = 0,
) -> Swept:  # fmt: skip
    """Sweep elements of which one side's are complex: its own statistics are of |z|, and so are those of d.

    What is not finite in one of its parts is not finite; it is a NaN where one part is.
    """
    return _swept(reference, candidate, np.dtype(np.complex128), buckets, start, epsilon, width)


def _swept(
    reference: Array, candidate: Array, kind: np.dtype[Any], buckets: Array, start: int, epsilon: float, width: int
) -> Swept:
    tokens = -(-(start % width + reference.size) // width) if width else 0
    errors, powers = np.zeros(tokens), np.zeros(tokens)
    rows: tuple[list[Together], list[Alone], list[Alone]] = ([], [], [])
    with np.errstate(all="ignore"):  # sums may overflow; a signalling NaN may turn quiet
        for at in range(0, reference.size, _BLOCK):
            own = [_real(side[at : at + _BLOCK]) for side in (reference, candidate)]
            r, c = (side[at : at + _BLOCK].astype(kind) for side in (reference, candidate))
            finite = np.isfinite(own[0]) & np.isfinite(own[1])
            rows[0].append(_together(r, c, own, finite, buckets, start + at, epsilon))
            rows[1].append(_alone(own[0]))
            rows[2].append(_alone(own[1]))
            if width:
                _by_token(r, c, finite, start % width + at, width, errors, powers)
    widths = (len(Together._fields), len(Alone._fields), len(Alone._fields))
    made = [np.array(part, np.float64).reshape(-1, width) for part, width in zip(rows, widths, strict=True)]
    return Swept(made[0], made[1], made[2], errors, powers)


def _alone(x: Array) -> Alone:
    finite = x[np.isfinite(x)]
    nan = np.count_nonzero(np.isnan(x))
    posinf = np.count_nonzero(x == np.inf)
    others = (nan, posinf, x.size - finite.size - nan - posinf)
    if not finite.size:
        return Alone(0, 0.0, 0.0, 0.0, np.inf, -np.inf, 0, *others)
    lowest, highest = finite.min(), finite.max()
    mean = lowest if lowest == highest else finite.mean()
    away = finite - mean
    zeros = np.count_nonzero(finite == 0)
    return Alone(finite.size, mean, (away * away).sum(), np.abs(finite).sum(), lowest, highest, zeros, *others)


def _together(r: Array, c: Array, own: list[Array], finite: Array, buckets: Array, at: int, epsilon: float) -> Together:
    """Sum up a block; `own` is what each side's own statistics are of."""
    nonfinite = r.size - int(np.count_nonzero(finite))
    equal, differing, first, first_at_all = 0, 0, np.inf, np.inf
    places = None
    if nonfinite:
        odd = np.flatnonzero(~finite)
        agree = (r[odd] == c[odd]) | (np.isnan(r[odd]) & np.isnan(c[odd]))
        equal, differing = int(np.count_nonzero(agree)), int(np.count_nonzero(~agree))
        first_at_all = at + int(odd[0])
        first = at + int(odd[~agree][0]) if differing else np.inf
        places = np.flatnonzero(finite)
        r, c, own = r[places], c[places], [side[places] for side in own]
    if not r.size:
        return Together._make([*[0.0] * 14, -1.0, 0, 0.0, 0.0, equal, nonfinite, differing, first, first_at_all])
    d = c - r
    magnitude = np.abs(d)
    _count(magnitude, buckets)
    size = np.abs(own[0])
    ratio = magnitude / (size + epsilon)
    mean_r, mean_c = _centre(r), _centre(c)
    told = d if d.dtype.kind == "f" else magnitude
    mean_d = told.mean()
    away_r, away_c, away_d = ((x - mean).view(np.float64) for x, mean in ((r, mean_r), (c, mean_c), (told, mean_d)))
    worst = int(magnitude.argmax())
    return Together(
        r.size, mean_r.real, mean_r.imag, mean_c.real, mean_c.imag, mean_d,
        (away_r * away_r).sum(), (away_c * away_c).sum(), (away_r * away_c).sum(), (away_d * away_d).sum(),
        size.sum(), magnitude.sum(), ratio.sum(), ratio.max(),
        magnitude[worst], at + (worst if places is None else int(places[worst])), own[0][worst], own[1][worst],
        equal + np.count_nonzero(magnitude == 0), nonfinite, differing, first, first_at_all,
    )  # fmt: skip


def _centre(x: Array) -> Any:
    """The mean; exactly the value of a constant."""
    return x[0] if (x == x[0]).all() else x.mean()


def _real(x: Array) -> Array:
    """Real numbers as float64, complex ones as their modulus: a NaN where either part is one."""
    if x.dtype.kind != "c":
        return x.astype(np.float64)
    size: Array = np.abs(x.astype(np.complex128))
    size[np.isnan(x)] = np.nan  # hypot says infinite when the other part is
    return size


def _count(magnitude: Array, buckets: Array) -> None:
    keys = bucket_of(magnitude)
    if keys.size < buckets.size // 32:
        np.add.at(buckets, keys, 1)
    else:
        half = buckets[: buckets.size // 2]
        half += np.bincount(keys, minlength=half.size)


def _by_token(r: Array, c: Array, finite: Array, at: int, width: int, errors: Array, powers: Array) -> None:
    d, x = np.where(finite, c - r, 0), np.where(finite, r, 0)
    error, power = (np.abs(part) ** 2 for part in (d, x))
    first, last = at // width, (at + r.size - 1) // width
    starts = np.maximum(np.arange(first, last + 1) * width - at, 0)
    errors[first : last + 1] += np.add.reduceat(error, starts)
    powers[first : last + 1] += np.add.reduceat(power, starts)
