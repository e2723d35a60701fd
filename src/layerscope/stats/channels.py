"""Statistics of each channel of a tensor, as a value that adds up.

    both = summarize(one, channels=-1).channels + summarize(other, channels=-1).channels
    both.absmax, both.mean, both.rms, both.share, both.kurtosis      # an array each, a number per channel
    both.outlying(), both.bits()                                     # which stand out, and what they cost

A channel is a place along one axis: the last one of what linear layers give, axis 1 of what convolutions give.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from layerscope.errors import BadText
from layerscope.stats.tensor_views import Array

MOST = 1 << 18  # channels; a tensor that has more is taken as one channel
TIMES = 6.0  # the median channel, from which one may be an outlier

FINITE, ABSMAX, SUM, SQUARES, CUBES, FOURTHS = ROWS = range(6)  # the rows of a table: sums of powers are of float64

_HEADER = struct.Struct("<4siqq")  # which format, the axis, how many channels, and how many finite values each has
_MAGIC = b"LSC1"
_NO_AXIS, _UNEQUAL = -(1 << 31), -1
_FOLDED = 512  # columns from which a pass over rows is quick
_BLOCK = 1 << 16  # items that are swept for everything before the next ones: they stay in the second-level cache


class Layout(NamedTuple):
    """How channels lie in a tensor in row-major order: `inner` items of each of `width` channels, over and over."""

    axis: int | None
    width: int
    inner: int

    @classmethod
    def of(cls, shape: Sequence[int], axis: int) -> Layout:
        """Return the layout; a tensor without such an axis, or with more than `MOST` channels, is one channel."""
        if not -len(shape) <= axis < len(shape) or shape[axis] > MOST:
            return cls(None, 1, 1)
        return cls(axis, shape[axis], math.prod(shape[axis % len(shape) + 1 :]))


@dataclass(frozen=True, slots=True, eq=False)
class Channels:
    """Mergeable statistics of each channel, over its finite values; NaN of a channel that has none.

    `table` has a row each for the number of finite values, the largest magnitude, and the sums of the values, their
    squares, cubes and fourth powers. `a + b` adds the rows, and takes the larger magnitude: exact for counts and
    magnitudes, to the rounding of float64 for sums. `axis` is the one that was asked for; None where the tensor has no
    such axis or more than 262,144 channels: all of it is then one channel.
    """

    axis: int | None
    table: Array

    def __len__(self) -> int:
        return int(self.table.shape[1])

    @property
    def finite(self) -> Array:
        """How many values of each are finite."""
        return np.asarray(self.table[FINITE], np.int64)

    @property
    def absmax(self) -> Array:
        """The largest finite magnitude."""
        return np.where(self.table[FINITE] > 0, self.table[ABSMAX], math.nan)

    @property
    def mean(self) -> Array:
        """The mean."""
        return self._mean_of(SUM)

    @property
    def rms(self) -> Array:
        """The root of the mean square."""
        root: Array = np.sqrt(self._mean_of(SQUARES))
        return root

    @property
    def share(self) -> Array:
        """The share of the layer's range that a channel fills: its largest magnitude over that of all."""
        largest = self.table[ABSMAX].max(initial=0.0)
        with np.errstate(invalid="ignore", divide="ignore"):
            return np.asarray(self.absmax / largest)

    @property
    def kurtosis(self) -> Array:
        """The fourth central moment over the squared variance: 3 of a normal distribution.

        NaN where all values are one, or the mean is a thousand times the spread: sums of float64 cannot tell it then.
        """
        one, two, three, four = (self._mean_of(row) for row in (SUM, SQUARES, CUBES, FOURTHS))
        with np.errstate(all="ignore"):
            variance = two - one**2
            fourth = four - 4 * one * three + 6 * one**2 * two - 3 * one**4
            return np.where(variance > 1e-6 * one**2, fourth / variance**2, math.nan)

    @property
    def tokens(self) -> Array:
        """The share of its places that carry a channel: (sum of squares)^2 / (places * sum of fourth powers).

        1 where every place, a token say, has the same magnitude, k / n where k of n have it and the others nothing, and
        a third for a normal distribution around zero.
        """
        with np.errstate(all="ignore"):
            return np.asarray(self.table[SQUARES] ** 2 / (self.table[FINITE] * self.table[FOURTHS]))

    @property
    def whole(self) -> Channels:
        """All channels as one."""
        return Channels(None, _added(self.table[:, :, None]))

    def outlying(self, *, times: float = TIMES) -> Array:
        """Tell which channels stand out of the others.

        Such a channel's largest magnitude is at least `times` the median one, and in bits it is more than six times as
        far above the median as the upper quartile is: where channels are of many sizes, none of them stands out.
        Channels that are zero throughout have no say.
        """
        size = self.table[ABSMAX]
        some = size > 0
        if not some.any():
            return np.zeros(len(self), bool)
        octaves = np.log2(size[some])
        middle, upper = np.quantile(octaves, (0.5, 0.75))
        beyond = np.zeros(len(self), bool)
        beyond[some] = octaves - middle >= max(math.log2(times), 6 * (upper - middle))
        return beyond

    def bits(self, *, times: float = TIMES) -> Array:
        """Return what each outlier costs in bits, and 0 of the others: log2 of its range over that of the others.

        A tensor that is quantised by one scale, its absmax over the largest code, leaves the channels that do not stand
        out so many bits fewer than they would have without the channel. The largest number is what a layer loses.
        """
        beyond = self.outlying(times=times)
        size = self.table[ABSMAX]
        ordinary = size[~beyond].max(initial=0.0)
        cost = np.zeros(len(self))
        cost[beyond] = np.log2(size[beyond] / ordinary)
        return cost

    def is_like(self, other: Channels) -> bool:
        """Whether both are of channels along the same axis, of the same number: only these can be added up."""
        return (self.axis, len(self)) == (other.axis, len(other))

    def __add__(self, other: object) -> Channels:
        if not isinstance(other, Channels):
            return NotImplemented
        if not self.is_like(other):
            one, two = (f"{len(c)} channels along axis {c.axis}" for c in (self, other))
            raise ValueError(f"{one} and {two} cannot be added up; add those of tensors with the same channels.")
        return Channels(self.axis, _added(np.stack([self.table, other.table], axis=1)))

    def __radd__(self, other: object) -> Channels:
        return self if other == 0 else NotImplemented  # sum() starts from 0

    def __eq__(self, other: object) -> bool:
        """Whether every number is the same, to the last bit."""
        return self.packed() == other.packed() if isinstance(other, Channels) else NotImplemented

    def __hash__(self) -> int:
        return hash(self.packed())

    def _mean_of(self, row: int) -> Array:
        with np.errstate(invalid="ignore", divide="ignore"):
            return np.asarray(self.table[row] / self.table[FINITE])

    def packed(self) -> bytes:
        """Return the table as bytes, little-endian: the counts once where they are all the same, 40 bytes a channel."""
        finite = self.table[FINITE]
        equal = int(finite[0]) if len(self) and (finite == finite[0]).all() else _UNEQUAL
        header = _HEADER.pack(_MAGIC, _NO_AXIS if self.axis is None else self.axis, len(self), equal)
        return header + self.table[FINITE if equal == _UNEQUAL else ABSMAX :].astype("<f8").tobytes()

    @classmethod
    def unpacked(cls, data: bytes) -> Channels:
        """Read `packed` back, to the last bit."""
        try:
            magic, axis, width, equal = _HEADER.unpack_from(data)
            numbers = np.frombuffer(data, "<f8", offset=_HEADER.size).astype(np.float64)
            if magic != _MAGIC or width < 0 or equal < _UNEQUAL:
                raise ValueError(f"it begins with {data[: _HEADER.size]!r}")
            table = np.empty((len(ROWS), width))
            table[FINITE] = equal
            table[FINITE if equal == _UNEQUAL else ABSMAX :] = numbers.reshape(-1, width) if width else 0.0
        except (struct.error, ValueError) as error:
            raise BadText(f"these bytes are not channels ({error}); pass what Channels.packed gave.") from error
        return cls(None if axis == _NO_AXIS else axis, table)

    def to_dicts(self) -> list[dict[str, Any]]:
        """Return a row for each channel."""
        names = ("finite", "absmax", "mean", "rms", "share", "kurtosis", "tokens")
        columns = [getattr(self, name).tolist() for name in names]
        return [
            {"channel": i, **dict(zip(names, row, strict=True))} for i, row in enumerate(zip(*columns, strict=True))
        ]


class Adding:
    """The table of one tensor while it is swept in row-major order.

    Narrow rows are taken several at a time, as if they were one row with several times the channels.
    """

    def __init__(self, shape: Sequence[int], axis: int) -> None:
        self._layout = Layout.of(shape, axis)
        _, width, inner = self._layout
        width *= max(1, _FOLDED // max(width, 1)) if inner == 1 else 1
        self.table = np.zeros((len(ROWS), width))
        whole = 4 * width if inner == 1 else inner  # rows are taken four together
        self.block = max(_BLOCK // max(whole, 1), 1) * max(whole, 1)
        self.laid = (self.block, width, inner, self.table)  # as the kernels take it

    def channels(self) -> Channels:
        """Return what was added up."""
        return folded(self._layout, self.table)


def folded(layout: Layout, table: Array) -> Channels:
    """Read a table in which several rows of the tensor may stand for one."""
    if table.shape[1] == layout.width:
        return Channels(layout.axis, table)
    return Channels(layout.axis, _added(table.reshape(len(ROWS), -1, layout.width)))


@np.errstate(all="ignore")  # powers of float64 may leave its range
def _added(tables: Array) -> Array:
    table: Array = tables.sum(axis=1)
    table[ABSMAX] = tables[ABSMAX].max(axis=0, initial=0.0)
    return table
