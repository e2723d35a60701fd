"""What is added up of a pair of tensors, block by block, and how blocks are joined.

    together(rows)        # one row per block, as `Together` names the columns -> the sums of all
    alone(rows)           # the same for one side by itself

Each block's means are taken first and its spreads around them, so that a mean a million times the standard deviation
costs no digits: Chan et al. 1979, with the cross terms of all blocks at once. A row is float64 throughout; counts are
exact up to 2**53.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from layerscope.stats.tensor_views import Array


class Together(NamedTuple):
    """Sums over the elements that are finite on both sides, and what is known of the others.

    `reference`, `candidate` and `difference` are means (complex ones in two parts; the difference of complex numbers
    is its modulus), `..._spread` sums of squares around them, `..._size` sums of magnitudes, `product` the real part
    of the inner product around the means. `place` and `first` are positions in row-major order; `first` is infinite
    where nothing non-finite differs, `first_at_all` where nothing is non-finite.
    """

    count: Any
    reference: Any
    reference_imaginary: Any
    candidate: Any
    candidate_imaginary: Any
    difference: Any
    reference_spread: Any
    candidate_spread: Any
    product: Any
    difference_spread: Any
    reference_size: Any
    difference_size: Any
    relative: Any
    largest_relative: Any
    largest: Any
    place: Any
    worst_reference: Any
    worst_candidate: Any
    equal: Any
    nonfinite: Any
    differing: Any
    first: Any
    first_at_all: Any


class Alone(NamedTuple):
    """Sums over one side's own finite elements, and counts of the others."""

    count: Any
    mean: Any
    spread: Any
    size: Any
    lowest: Any
    highest: Any
    zeros: Any
    nan: Any
    posinf: Any
    neginf: Any


class Swept(NamedTuple):
    """What one pass over some elements leaves: rows for `together`, rows for `alone` of both sides, and per token.

    The last two are the sums of d**2 and of reference**2 of each token that the elements touch; empty without tokens.
    """

    together: Array
    reference: Array
    candidate: Array
    token_errors: Array
    token_powers: Array


def together(rows: Array) -> Together:
    """Join the rows of blocks, in order; the first of several equal largest differences stays the worst."""
    if len(rows) <= 1:
        return Together(*rows[0].tolist()) if len(rows) else _NO_PAIR
    part = Together(*rows.T)
    with np.errstate(all="ignore"):
        total = {name: float(getattr(part, name).sum()) for name in _ADDED}
        means = {name: _mean(part.count, getattr(part, name)) for name in _MEANS}
        away = {name: getattr(part, name) - mean for name, mean in means.items()}
        reference, candidate = away["reference"], away["candidate"]
        reference_, candidate_ = away["reference_imaginary"], away["candidate_imaginary"]
        n = part.count
        total["reference_spread"] += float((n * (reference * reference + reference_ * reference_)).sum())
        total["candidate_spread"] += float((n * (candidate * candidate + candidate_ * candidate_)).sum())
        total["product"] += float((n * (reference * candidate + reference_ * candidate_)).sum())
        total["difference_spread"] += float((n * away["difference"] * away["difference"]).sum())
    worst = int(part.largest.argmax())
    return Together(
        **total,
        **means,
        largest_relative=float(part.largest_relative.max()),
        largest=float(part.largest[worst]),
        place=float(part.place[worst]),
        worst_reference=float(part.worst_reference[worst]),
        worst_candidate=float(part.worst_candidate[worst]),
        first=float(part.first.min()),
        first_at_all=float(part.first_at_all.min()),
    )


def alone(rows: Array) -> Alone:
    """Join the rows of blocks of one side."""
    if len(rows) <= 1:
        return Alone(*rows[0].tolist()) if len(rows) else _NOTHING
    part = Alone(*rows.T)
    with np.errstate(all="ignore"):
        mean = _mean(part.count, part.mean)
        away = part.mean - mean
        spread = float(part.spread.sum()) + float((part.count * away * away).sum())
    return Alone(
        float(part.count.sum()),
        mean,
        spread,
        float(part.size.sum()),
        float(part.lowest.min()),
        float(part.highest.max()),
        float(part.zeros.sum()),
        float(part.nan.sum()),
        float(part.posinf.sum()),
        float(part.neginf.sum()),
    )


_NO_PAIR = Together._make([*[0.0] * 14, -1.0, *[0.0] * 6, np.inf, np.inf])
_NOTHING = Alone._make([*[0.0] * 4, np.inf, -np.inf, *[0.0] * 4])
_MEANS = ("reference", "reference_imaginary", "candidate", "candidate_imaginary", "difference")
_ADDED = (
    "count", "reference_spread", "candidate_spread", "product", "difference_spread", "reference_size",
    "difference_size", "relative", "equal", "nonfinite", "differing",
)  # fmt: skip


def _mean(counts: Array, means: Array) -> float:
    """Return the mean of all blocks; exactly that of each where they agree, so that a constant stays one."""
    means = np.where(counts > 0, means, means[counts.argmax()])
    if (means == means[0]).all():
        return float(means[0])
    return float((counts * means).sum() / counts.sum())
