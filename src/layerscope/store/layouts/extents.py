"""A tensor's bytes at one place of one file: known before they are read, and read in stretches.

    extent = Extent(files, "layer_3.npy", 128, "float32", (2, 512, 768))
    next(extent.pieces(1024))       # the first values, and nothing else of the file
    extent.item(Point("layers.3"))  # what a ForeignRun is made of

Whoever makes one has compared it with the size of its file: no header makes anybody allocate what is not there.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import numpy as np

from layerscope.errors import Damaged
from layerscope.points import Moment, Point
from layerscope.store.address import Folder
from layerscope.store.dtypes import nbytes, stored
from layerscope.store.layouts.foreign import Item
from layerscope.store.strictjson import JSON

if TYPE_CHECKING:
    import torch

    from layerscope.stats import Summary

__all__ = ["Extent"]

_Read = Callable[[int, int], bytearray]
_BLOCK = 1 << 26  # bytes of values put in order at a time: fewer would have a column-major file read more often
_AT_A_TIME = 1 << 20  # bytes


@dataclass(frozen=True, slots=True)
class Extent:
    """Where the values of one tensor lie, and how.

    `dtype` is torch's name without the prefix. `stride` counts elements, as torch's; None is row-major. `swapped` says
    that the bytes of each number are in the other order than this machine's. `opened` reads what is compressed, where
    `offset` counts the bytes once decompressed. `verify` raises Damaged for the wrong bytes, given all of them.
    """

    files: Folder
    name: str
    offset: int
    dtype: str
    shape: tuple[int, ...]
    stride: tuple[int, ...] | None = None
    swapped: bool = False
    verify: Callable[[Iterable[bytearray]], None] | None = field(default=None, compare=False)
    opened: Callable[[], AbstractContextManager[_Read]] | None = field(default=None, compare=False)

    @property
    def count(self) -> int:
        """How many values there are."""
        return math.prod(self.shape)

    @property
    def nbytes(self) -> int:
        """How many bytes the values take, wherever they lie."""
        return nbytes(self.dtype, self.shape)

    @property
    def span(self) -> int:
        """How many bytes of the file the values lie in."""
        if self.stride is None or not self.count:
            return self.nbytes
        last = sum((n - 1) * step for n, step in zip(self.shape, self.stride, strict=True))
        return (last + 1) * stored(self.dtype).itemsize

    def load(self) -> torch.Tensor:
        """Read the whole tensor."""
        with self._reading() as read:
            data = read(self.offset, self.span)
        if self.verify is not None:
            self.verify([data])
        flat = self._values(data)
        if self.stride is None or not self.count:
            return flat.view(self.shape)
        return flat.as_strided(self.shape, self.stride)

    def pieces(self, items: int) -> Iterator[torch.Tensor]:
        """Go through the values in row-major order, at most `items` at a time, in little memory however they lie."""
        itemsize = stored(self.dtype).itemsize
        with self._reading() as read:
            if self.verify is not None:
                ends = self.offset + self.span
                places = range(self.offset, ends, _AT_A_TIME)
                self.verify(read(start, min(_AT_A_TIME, ends - start)) for start in places)
            if not self._row_major:
                yield from self._put_in_order(read, items)
                return
            for start in range(0, self.count, items):
                length = min(items, self.count - start) * itemsize
                yield self._values(read(self.offset + start * itemsize, length))

    def item(
        self,
        point: Point,
        moment: Moment | None = None,
        *,
        summary: Summary | None = None,
        note: Mapping[str, JSON] | None = None,
    ) -> Item:
        """Return it as a tensor of a dump."""
        where = (point, moment or Moment(), self.dtype, self.shape, self.nbytes)
        return Item(*where, self.load, self.pieces, summary, note or {})

    @property
    def _row_major(self) -> bool:
        return self.stride is None or not self.count or self.stride == _row_major(self.shape)

    def _put_in_order(self, read: _Read, items: int) -> Iterator[torch.Tensor]:
        """Copy one block after the other into the same memory, and pieces of it out of there."""
        itemsize = stored(self.dtype).itemsize
        most = max(1, _BLOCK // itemsize)
        memory = np.empty(min(most, self.count), f"V{itemsize}")
        for block in self._blocks(most):
            flat = memory[: block.count]
            block._copy(read, flat.reshape(block.shape))
            for start in range(0, block.count, items):
                yield self._values(bytearray(flat[start : start + items].view(np.uint8)))

    def _blocks(self, most: int) -> Iterator[Extent]:
        """Cut it into blocks of at most `most` values, each before the next in row-major order."""
        if self.count <= most:
            yield self
            return
        axis = next(axis for axis, n in enumerate(self.shape) if n > 1)
        for _, _, part in self._cut(axis, most * self.shape[axis] // self.count):
            yield from part._blocks(most)

    def _copy(self, read: _Read, into: np.ndarray[Any, np.dtype[np.void]]) -> None:
        """Copy the values into an array of its shape, from one stretch of the file after the other."""
        assert self.stride is not None
        if self.span <= max(_AT_A_TIME, into.itemsize):
            strides = tuple(step * into.itemsize for step in self.stride)
            into[...] = np.ndarray(self.shape, into.dtype, read(self.offset, self.span), strides=strides)
            return
        axis = max((axis for axis, n in enumerate(self.shape) if n > 1), key=self.stride.__getitem__)
        for start, length, part in self._cut(axis, _AT_A_TIME * self.shape[axis] // self.span):
            part._copy(read, into[(*[slice(None)] * axis, slice(start, start + length))])

    def _cut(self, axis: int, step: int) -> Iterator[tuple[int, int, Extent]]:
        """Cut it across an axis into parts `step` long, at least 1: where each starts, how long it is, and itself."""
        assert self.stride is not None
        for start in range(0, self.shape[axis], max(1, step)):
            length = min(max(1, step), self.shape[axis] - start)
            shape = (*self.shape[:axis], length, *self.shape[axis + 1 :])
            offset = self.offset + start * self.stride[axis] * stored(self.dtype).itemsize
            yield start, length, replace(self, offset=offset, shape=shape)

    def _reading(self) -> AbstractContextManager[_Read]:
        return nullcontext(self._read) if self.opened is None else self.opened()

    def _read(self, start: int, length: int) -> bytearray:
        data = self.files.read(self.name, offset=start, length=length)
        if len(data) != length:
            raise Damaged(
                f"{self.files.address}/{self.name} is truncated: {length - len(data)} bytes of its values are not there"
            )
        return data

    def _values(self, data: bytearray) -> torch.Tensor:
        import torch

        if not data:
            return torch.empty(0, dtype=getattr(torch, self.dtype))
        if self.swapped:
            # The halves of a complex number are swapped each on its own.
            width = stored(self.dtype).itemsize // (2 if self.dtype.startswith("complex") else 1)
            np.frombuffer(data, dtype=f"u{width}").byteswap(inplace=True)
        return torch.frombuffer(data, dtype=torch.uint8).view(getattr(torch, self.dtype))


def _row_major(shape: tuple[int, ...]) -> tuple[int, ...]:
    strides, step = [], 1
    for n in reversed(shape):
        strides.append(step)
        step *= max(n, 1)
    return tuple(reversed(strides))
