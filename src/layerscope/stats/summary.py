"""Statistics of a tensor, as a value that adds up.

    both = summarize(one) + summarize(other)
    both.mean, both.percentile(95), both.has_nan

This file knows what the numbers mean, how they add up and how they are written; `sweeps` knows how they are taken.
"""

from __future__ import annotations

import base64
import math
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, cast

from layerscope.errors import BadText, Unsupported
from layerscope.stats.channels import Channels
from layerscope.stats.sketch import Histogram, Sketch

if TYPE_CHECKING:
    from layerscope.report.parts import Value

PERCENTILES = (1, 5, 50, 95, 99)


@dataclass(frozen=True, slots=True, eq=False)
class Summary:
    """Mergeable statistics of one tensor, or of several added up.

    Moments and extremes are over the finite values (`std` is the population's) and NaN when there are none;
    the norms are then 0. Complex values count by their modulus. `a + b` is what one tensor with the values of
    both would give: exactly for counts, extremes, fingerprints and sketch, to rounding for mean, std and norms;
    neither order nor grouping matters. What tensors do not share is not kept: `first` is then empty, `shape`
    None and `dtype` "mixed"; `sketch` and fingerprints need both sides to have them, and
    `channels` as many of them on both. `placed` of a sum knows the places
    within each tensor, not the order of the tensors.
    """

    count: int
    nan: int
    posinf: int
    neginf: int
    zeros: int
    mean: float
    std: float
    min: float
    max: float
    l1: float
    first: tuple[float, ...]
    dtype: str
    shape: tuple[int, ...] | None
    tensors: int = 1
    sketch: Sketch | None = None
    fingerprint: int | None = None
    placed: int | None = None
    channels: Channels | None = None

    @property
    def finite(self) -> int:
        """How many values are neither NaN nor infinite."""
        return self.count - self.nan - self.posinf - self.neginf

    @property
    def has_nan(self) -> bool:
        """Whether any value is NaN."""
        return self.nan > 0

    @property
    def has_inf(self) -> bool:
        """Whether any value is infinite."""
        return self.posinf + self.neginf > 0

    @property
    def absmax(self) -> float:
        """The largest finite magnitude."""
        return max(abs(self.min), abs(self.max))

    @property
    def rms(self) -> float:
        """The root of the mean square."""
        return math.hypot(self.mean, self.std)

    @property
    def l2(self) -> float:
        """The root of the sum of squares."""
        return self.rms * math.sqrt(self.finite) if self.finite else 0.0

    def percentile(self, q: float) -> float:
        """Estimate the q-th percentile, 0 <= q <= 100, of the finite values, as `Sketch` bounds it."""
        if not 0 <= q <= 100:
            raise ValueError(f"a percentile lies between 0 and 100, and {q!r} does not.")
        return self._sketch().quantile(q / 100, low=self.min, high=self.max) if self.finite else math.nan

    @property
    def percentiles(self) -> dict[int, float]:
        """The 1st, 5th, 50th, 95th and 99th percentile; empty without a sketch."""
        if self.sketch is None or not self.finite:
            return {} if self.sketch is None else dict.fromkeys(PERCENTILES, math.nan)
        found = self.sketch.quantiles([q / 100 for q in PERCENTILES], low=self.min, high=self.max)
        return dict(zip(PERCENTILES, found, strict=True))

    def histogram(self, *, parts: int = 1, octaves: int | None = None) -> Histogram:
        """Count the finite values between signed powers of two; `parts` and `octaves` are those of the sketch."""
        return self._sketch().histogram(parts=parts, octaves=octaves)

    def _sketch(self) -> Sketch:
        if self.sketch is None:
            raise Unsupported(
                "percentiles and histograms come from the sketch, and this summary has none; "
                'summarize with level="full" (all of them, when they are added up).'
            )
        return self.sketch

    def __add__(self, other: object) -> Summary:
        if not isinstance(other, Summary):
            return NotImplemented
        mean, std = _merged_moments(self, other)
        finite = [s for s in (self, other) if s.finite]
        return Summary(
            count=self.count + other.count,
            nan=self.nan + other.nan,
            posinf=self.posinf + other.posinf,
            neginf=self.neginf + other.neginf,
            zeros=self.zeros + other.zeros,
            mean=mean,
            std=std,
            min=min((s.min for s in finite), key=_ordered, default=math.nan),
            max=max((s.max for s in finite), key=_ordered, default=math.nan),
            l1=self.l1 + other.l1,
            first=_shared_first(self, other),
            dtype=self.dtype if self.dtype == other.dtype else "mixed",
            shape=self.shape if self.shape == other.shape else None,
            tensors=self.tensors + other.tensors,
            sketch=None if self.sketch is None or other.sketch is None else self.sketch + other.sketch,
            fingerprint=_sum64(self.fingerprint, other.fingerprint),
            placed=_sum64(self.placed, other.placed),
            channels=_shared_channels(self.channels, other.channels),
        )

    def __radd__(self, other: object) -> Summary:
        return self if other == 0 else NotImplemented  # sum() starts from 0

    def __eq__(self, other: object) -> bool:
        """Whether every field is the same, to the last bit; NaN is the same as NaN."""
        return self._key == other._key if isinstance(other, Summary) else NotImplemented

    def __hash__(self) -> int:
        return hash(self._key)

    @property
    def _key(self) -> tuple[object, ...]:
        floats = _bytes(self.mean, self.std, self.min, self.max, self.l1, *self.first)
        counts = (self.count, self.nan, self.posinf, self.neginf, self.zeros, self.tensors)
        return counts, floats, self.dtype, self.shape, self.sketch, self.fingerprint, self.placed, self.channels

    def to_json(self) -> dict[str, Any]:
        """Return strict JSON values: non-finite numbers named, fingerprints hexadecimal, sketch and channels base64."""
        data: dict[str, Any] = {name: getattr(self, name) for name in _COUNTS}
        data |= {name: _named(getattr(self, name)) for name in _MOMENTS}
        data["first"] = [_named(value) for value in self.first]
        data["dtype"] = self.dtype
        data["shape"] = None if self.shape is None else list(self.shape)
        if self.sketch is not None:
            data["sketch"] = str(self.sketch)
        if self.fingerprint is not None:
            data["fingerprint"] = _hex(self.fingerprint)
        if self.placed is not None:
            data["placed"] = _hex(self.placed)
        if self.channels is not None:
            data["channels"] = base64.b64encode(self.channels.packed()).decode()
        return data

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Summary:
        """Read `to_json` back, to the last bit."""
        try:
            counts: dict[str, Any] = {name: int(data[name]) for name in _COUNTS}
            moments: dict[str, Any] = {name: float(data[name]) for name in _MOMENTS}
            return cls(
                **counts,
                **moments,
                first=tuple(float(value) for value in data["first"]),
                dtype=str(data["dtype"]),
                shape=None if data["shape"] is None else tuple(int(n) for n in data["shape"]),
                sketch=Sketch.parse(data["sketch"]) if "sketch" in data else None,
                fingerprint=int(data["fingerprint"], 16) if "fingerprint" in data else None,
                placed=int(data["placed"], 16) if "placed" in data else None,
                channels=Channels.unpacked(base64.b64decode(data["channels"])) if "channels" in data else None,
            )
        except (KeyError, TypeError, ValueError) as error:
            raise BadText(f"this is not a summary ({error!r}); pass what Summary.to_json gave.") from error

    def _repr_html_(self) -> str:
        from layerscope.report import Document, Fact, Facts, Histograms, html

        row = {key: value for key, value in self.row().items() if value is not None and key != "first_10"}
        facts = Facts("summary", tuple(Fact(key, cast("Value", value), "number") for key, value in row.items()))
        drawn = self.histogram(octaves=16) if self.sketch is not None and self.finite else None
        parts = () if drawn is None else (Histograms("histogram", "values", drawn.edges, (("values", drawn.counts),)),)
        return html.fragment(Document("", (facts, *parts)))

    def row(self) -> dict[str, object]:
        """Return everything under flat names, for a table."""
        names = (*_COUNTS, "finite", "has_nan", "has_inf", *_MOMENTS, "absmax", "l2", "rms", "dtype", "shape")
        row: dict[str, object] = {name: getattr(self, name) for name in names}
        percentiles = self.percentiles
        row |= {f"p{q}": percentiles.get(q) for q in PERCENTILES}
        row["first_10"] = list(self.first)
        row["fingerprint"] = None if self.fingerprint is None else _hex(self.fingerprint)
        row["placed"] = None if self.placed is None else _hex(self.placed)
        return row


_COUNTS = ("tensors", "count", "nan", "posinf", "neginf", "zeros")
_MOMENTS = ("mean", "std", "min", "max", "l1")


# Merging ----------------------------------------------------------------------------------------


def _merged_moments(a: Summary, b: Summary) -> tuple[float, float]:
    """Mean and std of both together (Chan et al. 1979), without squaring anything that could overflow.

    The operands are put in an order of their own first, so that a + b and b + a agree to the last bit.
    """
    if not a.finite or not b.finite:
        known = a if a.finite else b
        return known.mean, known.std
    if (a.finite, a.mean, a.std) < (b.finite, b.mean, b.std):
        a, b = b, a
    share = b.finite / (a.finite + b.finite)
    half = b.mean * 0.5 - a.mean * 0.5
    scale = max(a.std, b.std, abs(half))
    if not 0.0 < scale < math.inf:
        return a.mean + half * (2 * share), scale
    within = (1 - share) * (a.std / scale) ** 2 + share * (b.std / scale) ** 2
    between = 4 * share * (1 - share) * (half / scale) ** 2
    return a.mean + half * (2 * share), scale * math.sqrt(within + between)


def _shared_first(a: Summary, b: Summary) -> tuple[float, ...]:
    """The first values both have; a tensor without any has no say."""
    if not a.count or not b.count:
        return a.first or b.first
    return a.first if _bytes(*a.first) == _bytes(*b.first) else ()


def _shared_channels(a: Channels | None, b: Channels | None) -> Channels | None:
    return a + b if a is not None and b is not None and a.is_like(b) else None


def _bytes(*values: float) -> bytes:
    return struct.pack(f"{len(values)}d", *(math.nan if math.isnan(value) else value for value in values))


def _sum64(a: int | None, b: int | None) -> int | None:
    return None if a is None or b is None else (a + b) % 2**64


def _ordered(value: float) -> tuple[float, float]:
    return value, math.copysign(1.0, value)  # -0.0 before 0.0


# Writing ----------------------------------------------------------------------------------------


def _hex(number: int) -> str:
    return f"{number:016x}"


def _named(value: float) -> float | str:
    """JSON has no NaN: non-finite numbers are written by name, and float() reads the names."""
    if math.isfinite(value):
        return value
    return "NaN" if math.isnan(value) else "Infinity" if value > 0 else "-Infinity"
