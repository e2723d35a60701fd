"""One point at one moment, of two runs: what is to be measured, and what was.

pair = RecordPair.of(points, reference, candidate, "exact")
pair.measure()
pair.metrics
"""

from __future__ import annotations

import sys
from dataclasses import dataclass

from layerscope.compare.align.alignment import Pair
from layerscope.compare.align.positions import Rows
from layerscope.compare.measure import measure
from layerscope.compare.measure.masks import masked, unmasked
from layerscope.compare.measure.metrics import Metrics
from layerscope.compare.measure.operands import operand
from layerscope.compare.noise_floor import Key
from layerscope.compare.result import Kind
from layerscope.points import Moment, Point
from layerscope.store import Entry


@dataclass(slots=True, eq=False)
class RecordPair:
    """Two records that belong together, or a point that found no partner; `because` says why not, or what was odd.

    Without metrics, `kind` is what the row is: `missing`, `unpaired`, or `same` and the like where statistics alone
    were kept. `dtypes` are those that the two sides were recorded in. `choice` is the pair of choices in whose order
    this one was read, one that `leads`. `place` is where it stands in the order of the reference.
    """

    point: Point
    moment: Moment
    counterpart: Point | None
    method: str
    metrics: Metrics | None = None
    kind: Kind = "unpaired"
    because: str = ""
    reference_has: bool = True
    weights_differ: bool = False
    dtypes: tuple[str, ...] = ()
    points: Pair | None = None
    records: tuple[Entry, Entry] | None = None
    choice: RecordPair | None = None
    leads: bool = False
    place: int = sys.maxsize

    @classmethod
    def of(
        cls, points: Pair, reference: Entry, candidate: Entry, method: str, dtypes: tuple[str, ...] = ()
    ) -> RecordPair:
        """Make a pair of records."""
        at = reference.point, reference.moment
        sides = reference, candidate
        return cls(*at, candidate.point, method, points=points, records=sides, place=reference._at, dtypes=dtypes)

    @property
    def reference(self) -> Entry:
        """The reference's record."""
        assert self.records is not None
        return self.records[0]

    @property
    def candidate(self) -> Entry:
        """The candidate's record."""
        assert self.records is not None
        return self.records[1]

    @property
    def by_token(self) -> bool:
        """Whether rows of the same tokens were picked on both sides."""
        return self.records is not None and isinstance(self.records[0], Rows)

    @property
    def whole(self) -> Entry:
        """The candidate's record with all its rows."""
        return self.candidate.whole if isinstance(self.candidate, Rows) else self.candidate

    @property
    def key(self) -> Key:
        """The reference's point and moment."""
        return self.point, self.moment

    @property
    def cuts(self) -> tuple[tuple[int, int] | None, tuple[int, int] | None]:
        """Which columns of each side are compared; None for all."""
        return (None, None) if self.points is None else (self.points.reference_cut, self.points.candidate_cut)

    @property
    def flat(self) -> bool:
        """Whether shapes do not count."""
        return self.points is not None and self.points.flat

    @property
    def nbytes(self) -> int:
        """How much is read for it."""
        return self.reference.nbytes + self.candidate.nbytes

    @property
    def shapes(self) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Both shapes, of what is to be compared of them."""
        mine, theirs = (
            shape if cut is None else (*shape[:-1], cut[1] - cut[0])
            for shape, cut in zip((self.reference.shape or (), self.candidate.shape or ()), self.cuts, strict=True)
        )
        return mine, theirs

    def measure(self, *, threads: int = 1, exact: bool = False) -> Metrics:
        """Measure both sides; once more, with the masked values left out, where there are such."""
        metrics = self._measured(self.reference, self.candidate, threads, exact)
        if masked(metrics):
            metrics = self._measured(unmasked(self.reference), unmasked(self.candidate), threads, exact)
        self.metrics = metrics
        return metrics

    def _measured(self, reference: Entry, candidate: Entry, threads: int, exact: bool) -> Metrics:
        left = operand(reference, cut=self.cuts[0])
        right = operand(candidate, cut=self.cuts[1], shape=left.shape if self.flat else None)
        return measure(left, right, threads=threads, exact=exact)
