"""One pass over a pair of weights: sums by row and by column, from which factors and residuals follow.

    sums = Sums.of(reference, candidate)
    sums.rows.factor, sums.rows.left      # each row as the reference's times a factor, and what that leaves

The pass goes piece by piece, so that an embedding of billions of bytes costs no second copy.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from layerscope.diagnose.causes.closeness import coarser, precision

_PIECE = 1 << 20  # elements in float64 at a time


@dataclass(frozen=True, slots=True)
class Lines:
    """All rows, or all columns: the sums of squares and products of each; how many elements no rounding explains."""

    rr: torch.Tensor
    cr: torch.Tensor
    cc: torch.Tensor
    wrong: torch.Tensor

    def __len__(self) -> int:
        return len(self.rr)

    @property
    def factor(self) -> torch.Tensor:
        """What each line of the reference is best multiplied by to give the candidate's."""
        return self.cr / self.rr.clamp(min=1e-300)

    @property
    def left(self) -> torch.Tensor:
        """What that leaves of each line, relatively."""
        rest = (self.cc - self.factor * self.cr).clamp(min=0)
        return (rest / self.cc.clamp(min=1e-300)).sqrt()


@dataclass(frozen=True, slots=True)
class Sums:
    """The pair's sums, by row and by column; a vector is one row."""

    rows: Lines
    columns: Lines
    telling: float  # how many elements have a say in the factor: a few large ones outvote the rest
    mean: float  # of the difference
    unit: float  # the rounding of the coarser dtype

    @classmethod
    def of(cls, reference: torch.Tensor, candidate: torch.Tensor) -> Sums:
        """Go through both tensors once."""
        unit, tiny = _rounding(reference, candidate)
        wanted, got = as_matrix(reference), as_matrix(candidate)
        step = max(1, _PIECE // max(1, wanted.shape[1]))
        rows: list[torch.Tensor] = []
        columns = torch.zeros(4, wanted.shape[1], dtype=torch.float64, device=wanted.device)
        fourth = apart = 0.0
        for at in range(0, len(wanted), step):
            r = wanted[at : at + step].to(torch.float64)
            c = got[at : at + step].to(r.device).to(torch.float64)
            d = c - r
            terms = torch.stack([r * r, c * r, c * c, (d.abs() > unit * r.abs() + tiny).to(torch.float64)])
            rows.append(terms.sum(2))
            columns += terms.sum(1)
            fourth += float((terms[0] ** 2).sum())
            apart += float(d.sum())
        by_row = torch.cat(rows, 1)
        by_column = columns.view(4, reference.shape[1], -1).sum(2) if reference.ndim > 2 else columns
        squares = float(by_row[0].sum())
        return cls(
            Lines(*by_row), Lines(*by_column), squares**2 / fourth if fourth else 1.0, apart / reference.numel(), unit
        )

    @property
    def whole(self) -> Lines:
        """All of it as one line."""
        lines = self.rows
        return Lines(*(term.sum()[None] for term in (lines.rr, lines.cr, lines.cc, lines.wrong)))

    @property
    def relative(self) -> float:
        """The relative L2 difference."""
        whole = self.whole
        apart = float((whole.cc - 2 * whole.cr + whole.rr).clamp(min=0))
        return float((apart / float(whole.rr)) ** 0.5) if float(whole.rr) else float("inf")

    @property
    def cosine(self) -> float:
        """The cosine of the two."""
        whole = self.whole
        size = float((whole.rr * whole.cc).sqrt())
        return float(whole.cr) / size if size else 0.0


def as_matrix(tensor: torch.Tensor) -> torch.Tensor:
    """Return a tensor as rows of its first axis; a vector is one row."""
    return tensor.reshape(1, -1) if tensor.ndim < 2 else tensor.reshape(tensor.shape[0], -1)


def same(reference: torch.Tensor, candidate: torch.Tensor) -> bool:
    """Whether the candidate's values are the reference's, cast where the dtypes differ."""
    if reference.shape != candidate.shape:
        return False
    dtype = coarser(reference.dtype, candidate.dtype)
    wanted, got = as_matrix(reference), as_matrix(candidate)
    step = max(1, _PIECE // max(1, wanted.shape[1]))
    return all(
        torch.equal(
            wanted[at : at + step].to(dtype).to(torch.float64),
            got[at : at + step].to(wanted.device).to(dtype).to(torch.float64),
        )
        for at in range(0, len(wanted), step)
    )


def _rounding(reference: torch.Tensor, candidate: torch.Tensor) -> tuple[float, float]:
    dtype = coarser(reference.dtype, candidate.dtype)
    if not dtype.is_floating_point:
        return 0.0, 0.0
    # Below the smallest normal number the steps no longer shrink.
    return precision(dtype), float(torch.finfo(dtype).tiny) * precision(dtype)
