"""One side of a pair as a stream of flat parts, wherever its tensor is and whatever is cut out of it.

    side = stream(Values(entry, cut=(0, 4096)))
    for reference, candidate in pairs(side, other): ...      # equally long, in row-major order

However large a tensor on disk is, a few parts of it are in memory at a time.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING, NamedTuple, TypeGuard

import numpy as np

from layerscope.errors import Unsupported
from layerscope.stats.tensor_views import Array, Bits, byte_values, item_of, read
from layerscope.store import Entry
from layerscope.store.dtypes import stored

if TYPE_CHECKING:
    import torch

__all__ = ["PART", "Part", "Stream", "Values", "elsewhere", "pairs", "stream"]

PART = 1 << 19  # elements: so many that what Python does for each part does not show

_PACKED = "float4_e2m1fn_x2"


@dataclass(frozen=True, slots=True)
class Values:
    """One side of a pair: a record's tensor, or a cut of it along its last axis (one part of a fused projection).

    `cut` is start and stop along the last axis; `shape` the shape to be compared as, with the same number of elements.
    """

    entry: Entry
    cut: tuple[int, int] | None = None
    shape: tuple[int, ...] | None = None


class Part(NamedTuple):
    """Contiguous items, and whatever keeps their memory alive."""

    items: Array
    owner: object


@dataclass(frozen=True, slots=True)
class Stream:
    """One side: its dtype, its shape counted in values (packed float4 has two to an item), and its parts."""

    dtype: str
    shape: tuple[int, ...]
    parts: Callable[[], Iterator[Part]]

    @property
    def kind(self) -> np.dtype[np.generic]:
        """The narrowest of float32, float64 and complex128 that holds the values; integers are exact to 2**53."""
        if self.dtype.startswith("complex"):
            return np.dtype(np.complex128)
        exact = item_of(self.dtype).itemsize <= 2 or self.dtype == "float32"
        return np.dtype(np.float32 if exact else np.float64)

    def values(self, items: Array) -> Array:
        """Return what items are worth, as `kind` or, for complex ones, narrower."""
        if self.dtype == _PACKED:
            return items
        if items.itemsize == 1:
            return _table(self.dtype).take(items)
        if self.dtype == "bfloat16":
            return np.left_shift(items, np.uint32(16), dtype=np.uint32).view(np.float32)
        if self.dtype == "float16":
            return _table(self.dtype).take(items.view(np.uint16))
        if self.dtype.startswith("complex"):
            halves = items.view(f"f{items.itemsize // 2}")
            return halves.astype(np.float32).view(np.complex64) if self.dtype == "complex32" else items
        return Bits(self.dtype, (), items, None).values(items)


def stream(side: Values | torch.Tensor | Array) -> Stream:
    """Make a stream of one side; refuses, with the reason, what has no plain values.

    Of a tensor on a device it is the stream of a copy, which is made when it is read.
    """
    if isinstance(side, Values):
        return _stored(side)
    if elsewhere(side):
        dtype = str(side.dtype).removeprefix("torch.")
        item_of(dtype)
        return Stream(dtype, _counted(dtype, tuple(side.shape)), lambda: _parts(read(side.detach().cpu())))
    bits = read(side)
    return Stream(bits.dtype, _counted(bits.dtype, bits.shape), lambda: _parts(bits))


def elsewhere(side: object) -> TypeGuard[torch.Tensor]:
    """Whether this is a tensor whose values lie in the memory of a device."""
    return getattr(getattr(side, "device", None), "type", "cpu") not in ("cpu", "meta")  # numpy's is a plain text


def pairs(reference: Stream, candidate: Stream) -> Iterator[tuple[Part, Part]]:
    """Go through both sides at once, in parts of the same length; to the end, where a damaged file says so."""
    sides = (reference.parts(), candidate.parts())
    left: list[Part | None] = [None, None]
    while True:
        for i, parts in enumerate(sides):
            while left[i] is None and (part := next(parts, None)) is not None:
                left[i] = part if part.items.size else None
        one, other = left
        if one is None or other is None:
            return
        size = min(one.items.size, other.items.size, PART)
        yield Part(one.items[:size], one.owner), Part(other.items[:size], other.owner)
        left = [Part(p.items[size:], p.owner) if p.items.size > size else None for p in (one, other)]


def _stored(side: Values) -> Stream:
    entry, cut = side.entry, side.cut
    if entry.dtype is None or entry.shape is None:
        raise Unsupported(
            f"{entry.point} at {entry.moment} has a summary and no tensor; record with keep='tensor' or keep='both'."
        )
    own = entry.shape
    if cut is not None:
        if not own or not 0 <= cut[0] <= cut[1] <= own[-1]:
            raise Unsupported(f"{entry.point} of shape {list(own)} has no part {cut[0]}:{cut[1]} along its last axis.")
        own = (*own[:-1], cut[1] - cut[0])
    own = _counted(entry.dtype, own)
    shape = own if side.shape is None else tuple(side.shape)
    if math.prod(shape) != math.prod(own):
        raise Unsupported(f"{entry.point} of shape {list(own)} cannot be compared as {list(shape)}.")
    if cut is None:
        return Stream(entry.dtype, shape, lambda: _pieces(entry, PART))
    return Stream(entry.dtype, shape, lambda: _cut(entry, *cut))


def _counted(dtype: str, shape: tuple[int, ...]) -> tuple[int, ...]:
    return stored(dtype).header_shape(shape) if dtype == _PACKED else tuple(shape)


def _parts(bits: Bits) -> Iterator[Part]:
    for items in bits.pieces():
        yield Part(_table(_PACKED).take(items, axis=0).reshape(-1) if bits.dtype == _PACKED else items, bits.owner)


def _pieces(entry: Entry, items: int) -> Iterator[Part]:
    for piece in entry.pieces(items):
        yield from _parts(read(piece))


def _cut(entry: Entry, start: int, stop: int) -> Iterator[Part]:
    """Read whole rows, or stretches of them where they are long, and keep some columns."""
    assert entry.shape is not None
    width = entry.shape[-1]
    each = 2 if entry.dtype == _PACKED else 1
    width, start, stop = width * each, start * each, stop * each
    if 0 < width <= PART:
        for items, owner in _whole(_pieces(entry, PART // width * width // each), width):
            yield Part(np.ascontiguousarray(items.reshape(-1, width)[:, start:stop]).reshape(-1), owner)
        return
    at = 0
    for items, owner in _pieces(entry, PART):
        while items.size:
            rest = items[: width - at]
            yield Part(rest[max(start - at, 0) : max(stop - at, 0)], owner)
            items, at = items[rest.size :], (at + rest.size) % width


def _whole(parts: Iterator[Part], width: int) -> Iterator[Part]:
    """Join parts until they are whole rows: a strided piece comes in smaller ones."""
    held: list[Array] = []
    for items, owner in parts:
        if not held and items.size % width == 0:
            yield Part(items, owner)
            continue
        held.append(items.copy())
        if sum(each.size for each in held) % width == 0:
            yield Part(np.concatenate(held), None)
            held = []


@cache
def _table(dtype: str) -> Array:
    """What each code of one byte is worth, as float32, which is exact; and of float16, which numpy is slow to widen."""
    if dtype == "float16":
        with np.errstate(invalid="ignore"):  # a signalling NaN turns quiet, which is no news
            return np.arange(1 << 16, dtype=np.uint16).view(np.float16).astype(np.float32)
    return byte_values(dtype).astype(np.float32)
