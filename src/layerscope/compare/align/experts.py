"""Rows that experts compute, in other calls and in another order: one run calls them in turn, another all at once.

    grouped([entries of one step], [entries of the other])       # two records of as many rows, token by token
    order_of_rows(reference, candidate)

Which row is which token's is told by their values: kernels sort tokens by expert as they like.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from layerscope.compare.align.positions import Rows
from layerscope.compare.noise_floor import rounding
from layerscope.store import Entry

if TYPE_CHECKING:
    import torch

_OFF = 0.1  # a row this far from its other side, relatively, may be another row
_MOST_ROWS = 4096  # that may be other ones: each is held against each


def rows_together(entries: Sequence[Entry]) -> int | None:
    """Return how many rows the calls of one step have together; None where they are no rows of one width."""
    shapes = [entry.shape or () for entry in entries]
    fit = all(len(shape) == 2 and shape[1:] == shapes[0][1:] for shape in shapes)
    return sum(shape[0] for shape in shapes) if fit and all(rounding(e.dtype or "") for e in entries) else None


def grouped(ours: Sequence[Entry], theirs: Sequence[Entry]) -> tuple[Entry, Entry]:
    """Return the rows of all calls of one step on both sides, in the order of the reference."""

    def mine() -> torch.Tensor:
        import torch

        return torch.cat([entry.tensor() for entry in ours])

    def its() -> torch.Tensor:
        import torch

        rows = torch.cat([entry.tensor() for entry in theirs])
        return rows[order_of_rows(mine(), rows)]

    return Rows.of(ours[0], mine, _shape(ours)), Rows.of(theirs[0], its, _shape(theirs))


def _shape(entries: Sequence[Entry]) -> tuple[int, ...]:
    return rows_together(entries) or 0, *(entries[0].shape or ())[1:]


def order_of_rows(reference: torch.Tensor, candidate: torch.Tensor) -> torch.Tensor:
    """Return which row of the candidate is which of the reference, by their values; each is used once.

    Rows that agree stay where they are, and so does everything when there are too many others to look at.
    """
    import torch

    ours, theirs = reference.double(), candidate.double()
    order = torch.arange(len(ours))
    off = ((ours - theirs).norm(dim=1) > _OFF * ours.norm(dim=1)).nonzero().flatten()
    if not 0 < len(off) <= _MOST_ROWS:
        return order
    apart = torch.cdist(ours[off], theirs[off])
    nearest = apart.argmin(dim=1)
    if len(set(nearest.tolist())) < len(off):  # the surest first
        for row in apart.min(dim=1).values.argsort().tolist():
            at = int(apart[row].argmin())
            nearest[row] = at = row if apart[row, row] == apart[row, at] else at
            apart[:, at] = torch.inf
    order[off] = off[nearest]
    return order
