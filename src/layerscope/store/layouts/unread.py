"""A tensor in a foreign file: dtype and shape are known, its values are read when they are asked for.

    unread = npy(files, "layer_3.npy")          # one of the readers beside this file
    next(unread.pieces(1024))                   # the first values, and nothing else of the file
    unread.item(Point("layers.3"))              # what a foreign_run is made of

What is handed out has memory of its own: writing to it does not change the file, and it outlives the file.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np

from layerscope.errors import Damaged
from layerscope.points import Moment, Point
from layerscope.store.address import Folder
from layerscope.store.dtypes import nbytes, stored
from layerscope.store.source import Item
from layerscope.store.strictjson import JSON

if TYPE_CHECKING:
    import torch

    from layerscope.stats import Summary

_AT_A_TIME = 1 << 20  # bytes that are copied at a time, where pieces are smaller
_BLOCK = 1 << 25  # and that are put in order at a time, while the block before is still in use
_Mapped: TypeAlias = Any  # a tensor, or an array of numpy's, over the bytes of the file


@dataclass(frozen=True, slots=True)
class Unread:
    """One tensor of a file. `dtype` is torch's name without the prefix."""

    dtype: str
    shape: tuple[int, ...]
    load: Callable[[], torch.Tensor]
    pieces: Callable[[int], Iterator[torch.Tensor]]

    def __str__(self) -> str:
        return f"{self.dtype} of shape {list(self.shape)}"

    @property
    def nbytes(self) -> int:
        """How many bytes the values take."""
        return nbytes(self.dtype, self.shape)

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


def mapped(dtype: str, shape: tuple[int, ...], place: str, again: Callable[[], _Mapped]) -> Unread:
    """Return a tensor that `again()` maps; it is asked before each copy, and must find what it found before.

    A file that is cut while it is mapped ends the process: the time for that is the one of a copy.
    """

    def values() -> _Mapped:
        try:
            found = again()
        except FileNotFoundError as error:
            raise Damaged(f"{place} is not there any more") from error
        name = found.dtype.name if isinstance(found, np.ndarray) else str(found.dtype).removeprefix("torch.")
        if (name, tuple(found.shape)) != (dtype, shape):
            raise Damaged(f"{place} is not what it was when it was opened")
        return found

    def load() -> torch.Tensor:
        import torch

        return _own(values()) if math.prod(shape) else torch.empty(shape, dtype=getattr(torch, dtype))

    def pieces(items: int) -> Iterator[torch.Tensor]:
        count, itemsize = math.prod(shape), stored(dtype).itemsize
        if count and _is_row_major(values()):
            copied = items * max(1, _AT_A_TIME // (items * itemsize))
            for start in range(0, count, copied):
                yield from flat_pieces(_own(values().reshape(-1)[start : start + copied]), items)
        elif count:
            for at in blocks(shape, max(items, _BLOCK // itemsize)):
                yield from flat_pieces(_own(values()[at]), items)

    return Unread(dtype, shape, load, pieces)


def later(
    files: Folder, name: str, dtype: str, shape: tuple[int, ...], find: Callable[[Folder, str], Unread], said_by: str
) -> Unread:
    """Return a tensor whose file `find` opens when its values are first asked for: a list beside it says what it is.

    A dump of ten thousand files opens as fast as its list is read. What the file turns out to hold must be what was
    said, else it is Damaged; so it is when the file is gone.
    """

    @functools.cache
    def found() -> Unread:
        place = f"{files.address}/{name}"
        try:
            unread = find(files, name)
        except FileNotFoundError as error:
            raise Damaged(f"{place} is not there any more") from error
        if (unread.dtype, unread.shape) != (dtype, shape):
            raise Damaged(f"{place} holds {unread}, and {said_by} speaks of {dtype} of shape {list(shape)}")
        return unread

    return Unread(dtype, shape, lambda: found().load(), lambda items: found().pieces(items))


def blocks(shape: tuple[int, ...], most: int) -> Iterator[tuple[int | slice, ...]]:
    """Cut an array into blocks of at most `most` values, each before the next in row-major order: their indices."""
    inner = math.prod(shape[1:])
    if math.prod(shape) <= most:
        yield ()
    elif inner > most:
        yield from ((n, *rest) for n in range(shape[0]) for rest in blocks(shape[1:], most))
    else:
        yield from ((slice(n, n + most // inner),) for n in range(0, shape[0], most // inner))


def flat_pieces(values: torch.Tensor, items: int) -> Iterator[torch.Tensor]:
    """Go through row-major values, flat and at most `items` at a time."""
    flat = values.reshape(-1)
    yield from (flat[start : start + items] for start in range(0, len(flat), items))


def _own(values: _Mapped) -> torch.Tensor:
    """Copy values into row-major memory of their own, in this machine's byte order."""
    import torch

    if isinstance(values, torch.Tensor):
        return values.clone(memory_format=torch.contiguous_format)
    return torch.from_numpy(np.array(values, values.dtype.newbyteorder("="), order="C"))


def _is_row_major(values: _Mapped) -> bool:
    return bool(values.flags.c_contiguous if isinstance(values, np.ndarray) else values.is_contiguous())
