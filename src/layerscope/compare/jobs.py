"""One pair of records that belong together, and measuring it.

Job(pair, reference, candidate, "exact").measured()
"""

from __future__ import annotations

from dataclasses import dataclass

from layerscope.compare.alignment import Pair
from layerscope.compare.floors import Key
from layerscope.compare.masks import masked, unmasked
from layerscope.compare.measure import Values, measure
from layerscope.compare.metrics import Metrics
from layerscope.store import Entry

__all__ = ["Job"]


@dataclass(frozen=True, slots=True, eq=False)
class Job:
    """One pair at one moment, to be measured."""

    pair: Pair
    reference: Entry
    candidate: Entry
    method: str
    exact: bool = False  # percentiles to the bit, for a second look at both sides

    @property
    def key(self) -> Key:
        """The reference's point and moment."""
        return self.reference.point, self.reference.moment

    @property
    def nbytes(self) -> int:
        """How much is read for it."""
        return self.reference.nbytes + self.candidate.nbytes

    @property
    def shapes(self) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Both shapes, of what is to be compared of them."""
        return _cut(self.reference, self.pair.reference_cut), _cut(self.candidate, self.pair.candidate_cut)

    def measured(self, *, threads: int = 1) -> Metrics:
        """Measure both sides; once more, with the masked values left out, where there are such."""
        metrics = measure(*self._sides(self.reference, self.candidate), threads=threads, exact=self.exact)
        if not masked(metrics):
            return metrics
        sides = self._sides(unmasked(self.reference), unmasked(self.candidate))
        return measure(*sides, threads=threads, exact=self.exact)

    def _sides(self, reference: Entry, candidate: Entry) -> tuple[Values, Values]:
        shape, other = self.shapes
        right = shape if self.pair.flat and shape != other else None
        return Values(reference, self.pair.reference_cut), Values(candidate, self.pair.candidate_cut, right)

    def __str__(self) -> str:
        """Name the pair for the memory of an interrupted comparison."""
        cuts = f"{self.pair.reference_cut} {self.pair.candidate_cut} {self.pair.flat}"
        return (
            f"{self.reference.point} {self.reference.moment!r} {self.candidate.point} {self.candidate.moment!r} {cuts}"
        )


def _cut(entry: Entry, cut: tuple[int, int] | None) -> tuple[int, ...]:
    shape = entry.shape or ()
    return shape if cut is None else (*shape[:-1], cut[1] - cut[0])
