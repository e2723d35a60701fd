"""A tensor whose file is opened when its values are first asked for, because a list beside it says what it is.

    Later(files, "block.output.0.pt", "float32", (2, 8), find=tensor_file, said_by="dump.json").item(point, moment)

A dump of ten thousand files opens as fast as its list is read. What the file turns out to hold must be what was said.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING

from layerscope.errors import Damaged
from layerscope.points import Moment, Point
from layerscope.store.address import Folder
from layerscope.store.dtypes import nbytes
from layerscope.store.layouts.extents import Extent
from layerscope.store.layouts.foreign import Item
from layerscope.store.strictjson import JSON

if TYPE_CHECKING:
    import torch

__all__ = ["Later"]


@dataclass(frozen=True)
class Later:
    """The values of one tensor, in a file that `find` opens."""

    files: Folder
    name: str
    dtype: str
    shape: tuple[int, ...]
    find: Callable[[Folder, str], Extent]
    said_by: str

    def item(self, point: Point, moment: Moment, *, note: Mapping[str, JSON]) -> Item:
        """Return it as a tensor of a dump."""
        size = nbytes(self.dtype, self.shape)
        return Item(point, moment, self.dtype, self.shape, size, self.load, self.pieces, note=note)

    @cached_property
    def extent(self) -> Extent:
        """Where the values lie; raises Damaged when the file is gone, or holds something else than was said."""
        place = f"{self.files.address}/{self.name}"
        try:
            extent = self.find(self.files, self.name)
        except FileNotFoundError as error:
            raise Damaged(f"{place} is not there any more") from error
        if (extent.dtype, extent.shape) != (self.dtype, self.shape):
            raise Damaged(
                f"{place} holds {extent.dtype} of shape {list(extent.shape)}, "
                f"and {self.said_by} speaks of {self.dtype} of shape {list(self.shape)}"
            )
        return extent

    def load(self) -> torch.Tensor:
        """Read the whole tensor."""
        return self.extent.load()

    def pieces(self, items: int) -> Iterator[torch.Tensor]:
        """Go through its values in row-major order, at most `items` at a time."""
        return self.extent.pieces(items)
