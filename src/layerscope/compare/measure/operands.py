"""One side of a pair as flat chunks of items, wherever its tensor is and whatever is cut out of it.

    side = operand(entry, cut=(0, 4096))
    for reference, candidate in chunk_pairs(side, other): ...      # equally long, in row-major order

However large a tensor on disk is, a few chunks of it are in memory at a time.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache, partial
from typing import TYPE_CHECKING, Any, TypeGuard

import numpy as np

from layerscope.errors import Unsupported
from layerscope.stats.tensor_views import Array, Bits, byte_values, item_of, read
from layerscope.store import Entry
from layerscope.store.dtypes import stored

if TYPE_CHECKING:
    import torch

CHUNK = 1 << 19  # elements: so many that what Python does for each chunk does not show

_PACKED = "float4_e2m1fn_x2"


@dataclass(frozen=True, slots=True)
class Operand:
    """One side: its dtype, its shape counted in values (packed float4 has two to an item), and its chunks of items."""

    dtype: str
    shape: tuple[int, ...]
    chunks: Callable[[], Iterator[Array]]

    @property
    def kind(self) -> np.dtype[Any]:
        """The narrowest of float32, float64 and complex128 that holds the values; integers are exact to 2**53."""
        return _kind(self.dtype)

    def values(self, items: Array) -> Array:
        """Return what items are worth, as `kind` or, for complex ones, narrower."""
        if self.dtype in ("float32", "float64", _PACKED):
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


def operand(
    side: Operand | Entry | torch.Tensor | Array,
    *,
    cut: tuple[int, int] | None = None,
    shape: tuple[int, ...] | None = None,
) -> Operand:
    """Make an operand of a record, a tensor or an array; refuses, with the reason, what has no plain values.

    `cut` is start and stop along a record's last axis (one part of a fused projection); `shape` the shape to be
    compared as, with as many elements. Of a tensor on a device a copy is made.
    """
    if isinstance(side, Operand):
        return side
    if isinstance(side, Entry):
        return _recorded(side, cut, shape)
    return _in_memory(side.detach().cpu() if elsewhere(side) else side)


def elsewhere(side: object) -> TypeGuard[torch.Tensor]:
    """Whether this is a tensor whose values lie in the memory of a device."""
    return getattr(getattr(side, "device", None), "type", "cpu") not in ("cpu", "meta")  # numpy's is a plain text


def chunk_pairs(reference: Operand, candidate: Operand) -> Iterator[tuple[Array, Array]]:
    """Go through both sides at once, in chunks of the same length; to the end, where a damaged file says so."""
    sides = (reference.chunks(), candidate.chunks())
    left: list[Array | None] = [None, None]
    while True:
        for i, chunks in enumerate(sides):
            while left[i] is None and (items := next(chunks, None)) is not None:
                left[i] = items if items.size else None
        one, other = left
        if one is None or other is None:
            return
        size = min(one.size, other.size, CHUNK)
        yield one[:size], other[:size]
        left = [items[size:] if items.size > size else None for items in (one, other)]


def _recorded(entry: Entry, cut: tuple[int, int] | None, shape: tuple[int, ...] | None) -> Operand:
    dtype, own = entry.dtype, entry.shape
    if dtype is None or own is None:
        raise Unsupported(
            f"{entry.point} at {entry.moment} has a summary and no tensor; record with keep='tensor' or keep='both'."
        )
    if cut is not None:
        if not own or not 0 <= cut[0] <= cut[1] <= own[-1]:
            raise Unsupported(f"{entry.point} of shape {list(own)} has no part {cut[0]}:{cut[1]} along its last axis.")
        own = (*own[:-1], cut[1] - cut[0])
    own = _counted(dtype, own)
    if shape is not None and math.prod(shape) != math.prod(own):
        raise Unsupported(f"{entry.point} of shape {list(own)} cannot be compared as {list(shape)}.")
    chunks = partial(_pieces, entry) if cut is None else _in_memory(entry.tensor()[..., cut[0] : cut[1]]).chunks
    return Operand(dtype, own if shape is None else shape, chunks)


def _in_memory(tensor: torch.Tensor | Array) -> Operand:
    """Make an operand that keeps the tensor's memory alive: its chunks do not."""
    bits = read(tensor)
    return Operand(bits.dtype, _counted(bits.dtype, bits.shape), partial(_items, bits))


def _counted(dtype: str, shape: tuple[int, ...]) -> tuple[int, ...]:
    return stored(dtype).header_shape(shape) if dtype == _PACKED else tuple(shape)


def _pieces(entry: Entry) -> Iterator[Array]:
    """Go through a record; a piece's memory is used again as soon as no chunk of it is held."""
    import torch

    item = item_of(str(entry.dtype))
    for piece in entry.pieces(CHUNK):
        if piece.ndim == 1 and piece.is_contiguous() and not (piece.is_conj() or piece.is_neg()):
            items: Array = piece.detach().view(torch.uint8).numpy().view(item)
        else:
            items = np.concatenate([np.array(each) for each in read(piece).pieces()])
        yield _unpacked(items) if entry.dtype == _PACKED else items


def _items(bits: Bits) -> Iterator[Array]:
    for items in bits.pieces():
        yield _unpacked(items) if bits.dtype == _PACKED else items


def _unpacked(items: Array) -> Array:
    return _table(_PACKED).take(items, axis=0).reshape(-1)


@cache
def _kind(dtype: str) -> np.dtype[Any]:
    if dtype.startswith("complex"):
        return np.dtype(np.complex128)
    exact = item_of(dtype).itemsize <= 2 or dtype == "float32"
    return np.dtype(np.float32 if exact else np.float64)


@cache
def _table(dtype: str) -> Array:
    """What each code of one byte is worth, as float32, which is exact; and of float16, which numpy is slow to widen."""
    if dtype == "float16":
        with np.errstate(invalid="ignore"):  # a signalling NaN turns quiet, which is no news
            return np.arange(1 << 16, dtype=np.uint16).view(np.float16).astype(np.float32)
    return byte_values(dtype).astype(np.float32)
