"""One output of one layer, and where its tensors are: in memory, or in the run that the Monitor writes.

    capture.output(fetch)       # the tensors in the structure the layer gave them, each time anew

Containers are plain: every kind of tuple is a tuple, what has named parts is a dict. None stays None.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils._pytree import tree_leaves, tree_map_only

from layerscope.points import Moment, Point


@dataclass(frozen=True, slots=True, eq=False)
class Held:
    """One tensor: the record it is in the run, and the copy in memory where there was room for one."""

    point: Point
    moment: Moment
    dtype: torch.dtype
    shape: tuple[int, ...]
    nbytes: int
    copy: Callable[[], torch.Tensor] | None = None


Fetch = Callable[[Held], torch.Tensor]
Pieces = Callable[[Held], Iterator[torch.Tensor]]  # the same values in row-major order, flat, to be read and let go


@dataclass(frozen=True, slots=True, eq=False)
class EpochColumn:
    """One tensor of an epoch: those of its batches, one behind the other along dimension 0."""

    parts: tuple[Held, ...]
    shape: tuple[int, ...]

    @property
    def dtype(self) -> torch.dtype:
        """That of every part."""
        return self.parts[0].dtype


@dataclass(frozen=True, slots=True, eq=False)
class CapturedOutput:
    """What a layer gave in one call: its structure, with a `Held` in the place of each tensor."""

    epoch: int
    batch: int
    moment: Moment
    tree: Any
    samples: tuple[int, ...] | None = None

    @property
    def key(self) -> tuple[int, int]:
        """What it is found under: epoch and batch."""
        return self.epoch, self.batch

    @property
    def nbytes(self) -> int:
        """The bytes of its tensors."""
        return sum(held.nbytes for held in held_in(self.tree))

    @property
    def held(self) -> int:
        """The bytes of those that are in memory."""
        return sum(held.nbytes for held in held_in(self.tree) if held.copy is not None)

    @property
    def in_memory(self) -> bool:
        """Whether nothing has to be read from the run."""
        return all(held.copy is not None for held in held_in(self.tree))

    def output(self, fetch: Fetch) -> Any:
        """Return the output, with tensors of its own."""
        return tree_map_only(Held, fetch, self.tree)


def held_in(tree: Any) -> list[Held]:
    """Return the tensors of a tree in order."""
    return [leaf for leaf in tree_leaves(tree) if isinstance(leaf, Held)]


def shape_of(value: Any) -> Any:
    """Return the shape of a tensor as a list, of a tuple or list as a list of shapes; None where there is no tensor.

    >>> shape_of((torch.zeros(2, 3), None))
    [[2, 3], None]
    """
    if isinstance(value, (torch.Tensor, Held, EpochColumn)):
        return list(value.shape)
    if isinstance(value, (tuple, list)):
        return [shape_of(child) for child in value]
    return {key: shape_of(child) for key, child in value.items()} if isinstance(value, dict) else None
