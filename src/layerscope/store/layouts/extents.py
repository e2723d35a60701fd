"""A tensor's bytes at one place of one file: known before they are read, and read in stretches.

    extent = Extent(files, "layer_3.npy", 128, "float32", (2, 512, 768))
    extent.stretch(0, 1024)         # the first values, and nothing else of the file
    extent.item(Point("layers.3"))  # what a ForeignRun is made of

Whoever makes one has compared it with the size of its file: no header makes anybody allocate what is not there.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

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


@dataclass(frozen=True, slots=True)
class Extent:
    """Where the values of one tensor lie, and how.

    `dtype` is torch's name without the prefix. `stride` counts elements, as torch's; None is row-major. `swapped` says
    that the bytes of each number are in the other order than this machine's. `unpack` gives the bytes of what is
    compressed, whole; without it they lie at `offset`. `verify` raises Damaged for the wrong bytes, when all were read.
    """

    files: Folder
    name: str
    offset: int
    dtype: str
    shape: tuple[int, ...]
    stride: tuple[int, ...] | None = None
    swapped: bool = False
    verify: Callable[[bytearray], None] | None = field(default=None, compare=False)
    unpack: Callable[[], bytearray] | None = field(default=None, compare=False)

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

    @property
    def in_order(self) -> bool:
        """Whether the values lie one after the other in row-major order, so that a stretch of them can be read."""
        return self.unpack is None and (self.stride is None or self.stride == _row_major(self.shape))

    def load(self) -> torch.Tensor:
        """Read the whole tensor."""
        data = self.unpack() if self.unpack is not None else self._read(0, self.span)
        if self.verify is not None:
            self.verify(data)
        flat = self._values(data)
        if self.stride is None or not self.count:
            return flat.view(self.shape)
        return flat.as_strided(self.shape, self.stride)

    def stretch(self, start: int, stop: int) -> torch.Tensor:
        """Read some of the values of a tensor that lies in order."""
        itemsize = stored(self.dtype).itemsize
        return self._values(self._read(start * itemsize, (stop - start) * itemsize))

    def item(
        self,
        point: Point,
        moment: Moment | None = None,
        *,
        summary: Summary | None = None,
        note: Mapping[str, JSON] | None = None,
    ) -> Item:
        """Return it as a tensor of a dump."""
        stretch = self.stretch if self.in_order else None
        where = (point, moment or Moment(), self.dtype, self.shape, self.nbytes)
        return Item(*where, self.load, stretch, summary, note or {})

    def _read(self, start: int, length: int) -> bytearray:
        data = self.files.read(self.name, offset=self.offset + start, length=length)
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
            import numpy as np

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
