"""What is measured of one aligned pair of tensors, with d = candidate - reference in float64.

    metrics = measure(reference, candidate)          # measure.py
    metrics.relative_l2, metrics.correlation, metrics.worst.index

Everything is over the elements that are finite on both sides (`compared` of `count`); the others are counted apart.
What is not defined (the correlation of a constant, a ratio to zero) is NaN, never a guess.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

PERCENTILES = (50, 90, 95, 99)


@dataclass(frozen=True, slots=True)
class Side:
    """One side's own statistics, over its own finite values."""

    dtype: str
    mean: float
    std: float
    min: float
    max: float
    rms: float
    mean_abs: float
    nan: int
    posinf: int
    neginf: int
    zeros: int

    @property
    def finite(self) -> bool:
        """Whether every value is finite."""
        return not (self.nan or self.posinf or self.neginf)


@dataclass(frozen=True, slots=True)
class Worst:
    """The element with the largest |d|: where it is, and what both sides have there."""

    index: tuple[int, ...]
    reference: float
    candidate: float


@dataclass(frozen=True, slots=True)
class NonfiniteCounts:
    """Elements that are not finite on at least one side.

    `differing` counts those where the two sides are not the same NaN or the same infinity; `first` is where the first
    of them is, in row-major order.
    """

    either: int
    differing: int
    first: tuple[int, ...] | None


@dataclass(frozen=True, slots=True)
class Tokens:
    """Relative L2 error token by token, where there is a token axis: the last but one of three or more axes.

    `worst` is the position of the worst token in the flattened leading axes, `error` its error; `median` and `p90`
    say whether it stands out. `largest` are the positions and errors of the few worst, from the worst down.
    """

    count: int
    worst: int
    error: float
    median: float
    p90: float
    largest: tuple[tuple[int, float], ...] = ()


@dataclass(frozen=True, slots=True)
class Sets:
    """Integer tensors as sets along their last axis (routing, top-k): how many rows changed, and how much is shared.

    `changed` rows hold other members; a row with the same members in another order is `reordered`. `overlap` is the
    mean share of members that both sides have.
    """

    rows: int
    changed: int
    reordered: int
    overlap: float


@dataclass(frozen=True, slots=True)
class Metrics:
    """All measures of one pair.

    `bitwise` says that dtype and every bit agree. `equal` counts elements of equal value (a NaN equals a NaN, an
    infinity the same infinity). `scale` is the factor that fits candidate to reference best, <c, r> / <r, r>.
    `percentiles` are of |d|, in the order of PERCENTILES, each within `percentile_bound` (relative; 0 is exact).
    """

    shape: tuple[int, ...]
    count: int
    compared: int
    bitwise: bool
    equal: int
    reference: Side
    candidate: Side
    mean: float
    std: float
    mae: float
    max_abs: float
    worst: Worst | None
    mse: float
    relative_mse: float
    relative_mae: float
    max_relative: float
    mean_relative: float
    correlation: float
    cosine: float
    sqnr: float
    relative_l2: float
    scale: float
    percentiles: tuple[float, ...]
    percentile_bound: float
    nonfinite: NonfiniteCounts
    tokens: Tokens | None = None
    sets: Sets | None = None

    @property
    def rmse(self) -> float:
        """The root of the mean squared error."""
        return math.sqrt(self.mse)

    @property
    def mean_abs(self) -> float:
        """The mean of |d|: another name of the MAE."""
        return self.mae

    @property
    def fraction_equal(self) -> float:
        """The share of elements of equal value; 1 for an empty tensor."""
        return self.equal / self.count if self.count else 1.0

    def to_json(self) -> dict[str, Any]:
        """Return plain values with the derived ones beside the stored; non-finite numbers stay as they are."""
        derived = {"rmse": self.rmse, "mean_abs": self.mean_abs, "fraction_equal": self.fraction_equal}
        return {**asdict(self), **derived}

    @classmethod
    def from_json(cls, value: Mapping[str, Any]) -> Metrics:
        """Undo `to_json`."""
        fields = {name: value[name] for name in cls.__slots__}
        nonfinite = dict(value["nonfinite"])
        nonfinite["first"] = None if nonfinite["first"] is None else tuple(nonfinite["first"])
        fields |= {
            "shape": tuple(value["shape"]),
            "reference": Side(**value["reference"]),
            "candidate": Side(**value["candidate"]),
            "percentiles": tuple(value["percentiles"]),
            "nonfinite": NonfiniteCounts(**nonfinite),
            "tokens": None if value["tokens"] is None else _tokens(value["tokens"]),
            "sets": None if value["sets"] is None else Sets(**value["sets"]),
        }
        if value["worst"] is not None:
            fields["worst"] = Worst(**{**value["worst"], "index": tuple(value["worst"]["index"])})
        return cls(**fields)


def _tokens(value: Mapping[str, Any]) -> Tokens:
    return Tokens(**{**value, "largest": tuple((at, error) for at, error in value["largest"])})
