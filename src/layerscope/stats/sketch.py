"""A mergeable picture of how values are distributed, from which any quantile can be read.

    sketch = Sketch.of(values)
    sketch.quantile(0.95)
    sketch + other               # the sketch of both
    Sketch.parse(str(sketch))    # the same again

Written here because no library takes a million floats in under a millisecond; `docs/log.md` has the figures.
"""

from __future__ import annotations

import base64
import math
import struct
import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from layerscope.errors import BadText
from layerscope.stats.tensor_views import Array

STEPS = 64  # buckets between one power of two and the next
LOWEST = -126  # magnitudes below 2**LOWEST count as zero


class Histogram(NamedTuple):
    """Counts between fixed edges: signed powers of two, and one bin around zero.

    `counts[i]` values lie between `edges[i]` and `edges[i + 1]`; a value that is itself an edge counts away from zero.
    The edges are always of the same grid, so histograms of different tensors lie on each other; only
    the occupied stretch of it is listed.
    """

    edges: tuple[float, ...]
    counts: tuple[int, ...]


@dataclass(frozen=True, slots=True, eq=False)
class Sketch:
    """Counts of values in buckets of fixed, logarithmic width: 64 to each power of two, either sign.

    Error bound: `quantile` is numpy's linear definition, interpolated between two neighbouring order statistics
    lo <= hi, and the estimate is within 2**-7 * max(|lo|, |hi|) + 2**-126 of the exact one. This holds for every
    input in every order, because a bucket's edges are fixed: [a, b) is read as 2ab / (a + b), which is within
    (b - a) / (a + b) <= 1/129 of everything in it, relatively. Magnitudes below 2**-126 are read as zero.

    Buckets are counted, never merged or sampled, so `+` is exact, and neither order nor grouping matters. At most
    147 201 buckets exist for float64 and 32 513 for narrower types; a layer's activations fill one or two thousand.
    """

    keys: npt.NDArray[np.int32]  # ascending, and so are the values; 0 is the bucket around zero
    counts: npt.NDArray[np.int64]  # all positive

    @classmethod
    def of(cls, values: Array, counts: Array | None = None) -> Sketch:
        """Sketch the finite values, each counted `counts` times."""
        values = np.asarray(values, dtype=np.float64).reshape(-1)
        counts = np.ones(values.size, np.int64) if counts is None else np.asarray(counts, np.int64)
        keep = np.isfinite(values) & (counts > 0)
        return cls._gathered(buckets(values[keep]), counts[keep])

    @classmethod
    def _gathered(cls, keys: Array, counts: Array) -> Sketch:
        if not keys.size:
            return cls(np.empty(0, np.int32), np.empty(0, np.int64))
        order = np.argsort(keys, kind="stable")
        keys, counts = keys[order], counts[order]
        starts = np.flatnonzero(np.r_[True, keys[1:] != keys[:-1]])
        return cls(keys[starts].astype(np.int32), np.add.reduceat(counts, starts).astype(np.int64))

    @property
    def total(self) -> int:
        """How many values were counted."""
        return int(self.counts.sum())

    def __add__(self, other: Sketch) -> Sketch:
        if not isinstance(other, Sketch):
            return NotImplemented
        return self._gathered(np.r_[self.keys, other.keys], np.r_[self.counts, other.counts])

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Sketch):
            return NotImplemented
        return np.array_equal(self.keys, other.keys) and np.array_equal(self.counts, other.counts)

    def __hash__(self) -> int:
        return hash((self.keys.tobytes(), self.counts.tobytes()))

    def quantile(self, q: float, *, low: float = -math.inf, high: float = math.inf) -> float:
        """Estimate the q-quantile, 0 <= q <= 1, within the class's bound; `low` and `high` are known extremes."""
        return self.quantiles([q], low=low, high=high)[0]

    def quantiles(self, qs: Sequence[float], *, low: float = -math.inf, high: float = math.inf) -> list[float]:
        """Estimate several quantiles at once."""
        for q in qs:
            if not 0.0 <= q <= 1.0:
                raise ValueError(f"a quantile lies between 0 and 1, and {q!r} does not.")
        if not self.keys.size:
            return [math.nan] * len(qs)
        ends = np.cumsum(self.counts)
        last = int(ends[-1]) - 1
        lower = [min(math.floor(q * last), last) for q in qs]
        upper = [min(below + 1, last) for below in lower]
        middles = _middles(self.keys[np.searchsorted(ends, lower + upper, side="right")]).tolist()
        found = []
        for q, below, *ends_of in zip(qs, lower, middles, middles[len(qs) :], strict=False):
            left, right = (min(max(middle, low), high) for middle in ends_of)
            left = low if below == 0 and low > -math.inf else left
            right = high if below + 1 >= last and high < math.inf else right
            share = q * last - below
            found.append(right if below == last or left == right else (1.0 - share) * left + share * right)
        return found

    def histogram(self, *, parts: int = 1, octaves: int | None = None) -> Histogram:
        """Add the buckets up between powers of two, each octave cut into `parts` of equal width.

        What is smaller than the largest magnitude by more than `octaves` counts around zero: for pictures, whose scale
        is linear.
        """
        if parts < 1 or STEPS % parts:
            raise ValueError(f"parts={parts!r} does not divide the {STEPS} buckets of an octave.")
        if not self.keys.size:
            return Histogram((), ())
        bins = np.sign(self.keys) * ((np.abs(self.keys) - 1) // (STEPS // parts) + 1)  # 1 begins at 2**-126
        floor = int(np.abs(bins[bins != 0]).min()) - 1 if bins.any() else 0
        if octaves is not None:
            floor = max(floor, int(np.abs(bins).max()) - octaves * parts)
            bins = np.where(np.abs(bins) > floor, bins, 0)
        place = np.where(bins > 0, bins - floor, np.where(bins < 0, bins + floor, 0))
        first, last = int(place.min()), int(place.max())
        counts = np.zeros(last - first + 1, np.int64)
        np.add.at(counts, place - first, self.counts)
        at = range(first, last + 2)
        lower = [_edge(bin - 1 + floor, parts) if bin > 0 else -_edge(-bin + floor, parts) for bin in at]
        return Histogram(tuple(lower), tuple(counts.tolist()))

    # Bytes: a deflated record, little-endian: how many buckets, how many bytes a step and a count take, the first key,
    # the steps from key to key, the counts. Text: the same in base64.

    def to_bytes(self) -> bytes:
        """Return a compact form: a byte or two for each bucket of a layer."""
        steps, counts = (_narrowed(numbers) for numbers in (np.diff(self.keys), self.counts))
        first = int(self.keys[0]) if self.keys.size else 0
        header = _HEADER.pack(self.keys.size, steps.itemsize, counts.itemsize, first)
        return zlib.compress(header + steps.tobytes() + counts.tobytes(), 1)

    @classmethod
    def from_bytes(cls, data: bytes) -> Sketch:
        """Read `to_bytes` back."""
        try:
            return cls._unpacked(data)
        except (ValueError, TypeError, struct.error, zlib.error) as error:
            raise BadText(f"these bytes are not a sketch ({error}); pass what Sketch.to_bytes gave.") from None

    @classmethod
    def _unpacked(cls, packed: bytes) -> Sketch:
        inflate = zlib.decompressobj()
        data = inflate.decompress(packed, _LONGEST)
        if not inflate.eof:
            raise ValueError("it is cut off")
        size, step, count, first = _HEADER.unpack_from(data)
        if not size:
            return cls(np.empty(0, np.int32), np.empty(0, np.int64))
        steps, counts = data[_HEADER.size : -count * size], data[-count * size :]
        keys = np.cumsum(np.r_[first, np.frombuffer(steps, f"<u{step}").astype(np.int64)])
        read = cls(keys.astype(np.int32), np.frombuffer(counts, f"<u{count}").astype(np.int64))
        if not read.keys.size == read.counts.size == size:
            raise ValueError("its lists differ in length")
        return read

    def __str__(self) -> str:
        return base64.b64encode(self.to_bytes()).decode("ascii")

    @classmethod
    def parse(cls, text: str) -> Sketch:
        """Read a text form back."""
        try:
            return cls._unpacked(base64.b64decode(text, validate=True))
        except (ValueError, TypeError, struct.error, zlib.error) as error:
            raise BadText(f"{text[:40]!r} is not a sketch ({error}); pass what str(sketch) gave, unchanged.") from None


def quantiles(
    qs: Sequence[float], keys: Array, counts: Array, starts: Array, sizes: Array, *, low: Array, high: Array
) -> list[npt.NDArray[np.float64]]:
    """Estimate quantiles of many sketches at once, each as `Sketch.quantile` does; NaN where a sketch is empty.

    Sketch i is `keys[starts[i]:starts[i] + sizes[i]]` and their counts; `low` and `high` are known extremes.
    """
    full = np.flatnonzero(sizes)
    results = [np.full(len(sizes), math.nan) for _ in qs]
    if not full.size:
        return results
    order = full[np.argsort(starts[full], kind="stable")]
    first, size = starts[order].astype(np.int64), sizes[order].astype(np.int64)
    ends = np.cumsum(counts.astype(np.int64))
    before = ends[first] - counts[first].astype(np.int64)  # how many values all sketches before it count
    last = ends[first + size - 1] - before - 1
    least, most = low[order], high[order]

    def read(bucket: Array) -> Array:
        return np.clip(_middles(keys[bucket]), least, most)

    for q, result in zip(qs, results, strict=True):
        rank = q * last
        below = np.minimum(np.floor(rank).astype(np.int64), last)
        bucket = np.searchsorted(ends, before + below, side="right")
        # The next value is in the same bucket, or in the next one: none is empty.
        left, right = read(bucket), read(bucket + (ends[bucket] <= before + np.minimum(below + 1, last)))
        left = np.where((below == 0) & (least > -math.inf), least, left)
        right = np.where((below + 1 >= last) & (most < math.inf), most, right)
        share = rank - below
        between = np.where(left == right, left, (1.0 - share) * left + share * right)
        result[order] = np.where(below == last, right, between)
    return results


_HEADER = struct.Struct("<IBBi")
_LONGEST = 1 << 21  # more than every bucket at its widest


def buckets(values: Array) -> Array:
    """Return each finite value's bucket: sign, exponent and six bits of the fraction, as one ordered integer."""
    bits = np.ascontiguousarray(values, dtype=np.float64).view(np.int64)
    steps = ((bits & (1 << 63) - 1) >> 46) - ((1023 + LOWEST) * STEPS - 1)
    keys: Array = np.maximum(steps, 0).astype(np.int32)
    keys[bits < 0] *= -1
    return keys


def _middles(keys: Array) -> Array:
    """Return the value each bucket is read as: 2ab / (a + b), relatively as far from one end as from the other."""
    magnitude = np.abs(keys.astype(np.int64))
    octave, step = np.divmod(np.maximum(magnitude - 1, 0), STEPS)
    edge = STEPS + step
    middle = np.ldexp(2.0 * edge * (edge + 1) / ((2 * edge + 1) * STEPS), octave + LOWEST)
    return np.where(magnitude > 0, np.copysign(middle, keys), 0.0)


def _edge(bin: int, parts: int) -> float:
    octave, part = divmod(bin, parts)
    return math.ldexp(1.0 + part / parts, octave + LOWEST) if octave + LOWEST < 1024 else math.inf


def _narrowed(numbers: Array) -> Array:
    """Positive numbers in as few bytes as the largest needs."""
    largest = int(numbers.max(initial=0))
    return numbers.astype(next(f"<u{size}" for size in (1, 2, 4, 8) if largest < 1 << 8 * size))
