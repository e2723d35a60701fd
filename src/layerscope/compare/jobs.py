"""One pair of records that belong together, and measuring it.

Job(pair, reference, candidate, "exact").measured()
"""

from __future__ import annotations

from dataclasses import dataclass

from layerscope.compare.alignment import Pair
from layerscope.compare.floors import Key
from layerscope.compare.masks import masked, unmasked
from layerscope.compare.measure import measure
from layerscope.compare.measure.metrics import Metrics
from layerscope.compare.measure.operands import operand
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
        metrics = self._measured(self.reference, self.candidate, threads)
        return (
            metrics
            if not masked(metrics)
            else self._measured(unmasked(self.reference), unmasked(self.candidate), threads)
        )

    def _measured(self, reference: Entry, candidate: Entry, threads: int) -> Metrics:
        left = operand(reference, cut=self.pair.reference_cut)
        shape = left.shape if self.pair.flat else None
        right = operand(candidate, cut=self.pair.candidate_cut, shape=shape)
        return measure(left, right, threads=threads, exact=self.exact)


def _cut(entry: Entry, cut: tuple[int, int] | None) -> tuple[int, ...]:
    shape = entry.shape or ()
    return shape if cut is None else (*shape[:-1], cut[1] - cut[0])
