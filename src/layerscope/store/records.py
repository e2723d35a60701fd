"""Which records a run has, as arrays: where and when each was taken, and how some of them are found.

    records = Records([part, ...])
    records.find(["model.layers.3:output"], {"step": 0})      # their places, in the order they were made

Of two records with the same point and moment the later one counts; the other is only counted.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from functools import cached_property
from itertools import islice

import numpy as np

from layerscope.points import Moment
from layerscope.store.columns import Array, Columns, Has

WHEN = ("epoch", "step", "batch", "call", "rank")
# Records are numbered below that: who claimed a folder later recorded later.
_CLAIM_AT = 48
# So often all records are looked through for a point; who asks for more is about to ask for all, and they are sorted.
_LOOKS = 16


class Records:
    """All records of a run, of one part after the other; a place is an index into every array.

    `starts` is where each part begins, `kept` the places that count, in the order they were made.
    """

    def __init__(self, parts: Sequence[Columns], claims: Sequence[int] = ()) -> None:
        """Put parts one after the other; of the same point and moment that of the higher claim counts, then number."""
        codes: dict[str, int] = {}
        tables = [[codes.setdefault(text, len(codes)) for text in part.points] or [0] for part in parts]
        kind = np.uint16 if len(codes) <= 1 << 16 else np.int32  # by which numpy sorts by radix
        self.names, self._codes = list(codes), codes
        points = [
            _chosen(np.array(table, kind), part.array("point")) for table, part in zip(tables, parts, strict=True)
        ]
        self.point = _joined(points)
        self.when = {name: _joined([part.array(name) for part in parts]) for name in WHEN}
        self.has_epoch = (_joined([part.array("has") for part in parts]) & Has.EPOCH) != 0
        self._ends = np.cumsum([0, *(part.rows for part in parts)])
        self.starts = self._ends[:-1]
        self._asked = 0
        alive = np.ones(len(self.point), bool)
        for start, part in zip(self.starts, parts, strict=True):
            alive[[start + row for row in part.bad]] = False
        doubtful = _doubtful(parts, self.starts)
        doubtful = doubtful[alive[doubtful]]
        if len(doubtful):
            claimed = zip(parts, claims or [0] * len(parts), strict=True)
            age = np.concatenate([each.array("record") + np.int64(claim << _CLAIM_AT) for each, claim in claimed])
            order = doubtful[np.argsort(age[doubtful], kind="stable")[::-1]]
            columns = [self.point, self.has_epoch, *self.when.values()]
            alive[doubtful] = False
            alive[order[_first_of_each([column[order] for column in columns])]] = True
        self.kept = np.flatnonzero(alive)

    def __len__(self) -> int:
        return len(self.kept)

    @property
    def replaced(self) -> int:
        """How many gave way to a later one."""
        return len(self.point) - len(self.kept)

    def part(self, at: int) -> tuple[int, int]:
        """Return which part a place is in, and where in it."""
        number = int(np.searchsorted(self.starts, at, side="right")) - 1
        return number, at - int(self.starts[number])

    def by_part(self, places: Array) -> Iterator[tuple[int, Array, slice]]:
        """Yield the parts that ascending places are in, with the rows in each and where among the places those are."""
        ends = np.searchsorted(places, self._ends)
        for number in np.flatnonzero(np.diff(ends)):
            where = slice(int(ends[number]), int(ends[number + 1]))
            yield int(number), places[where] - self.starts[number], where

    @cached_property
    def points(self) -> list[str]:
        """Every point that has records, in the order they were first recorded."""
        if len(self.kept) == len(self.point):  # each part lists its own in that order
            return self.names
        codes, first = np.unique(self._kept_points, return_index=True)
        return [self.names[code] for code in codes[np.argsort(first)]]

    @cached_property
    def moments(self) -> list[Moment]:
        """Every moment that has records, in order."""
        epoch = np.where(self.has_epoch, self.when["epoch"], -1)[self.kept]
        columns = [self.has_epoch[self.kept], epoch, *(self.when[name][self.kept] for name in WHEN[1:])]
        first = _first_of_each(columns)
        return sorted(self.moment(int(self.kept[at])) for at in first)

    def moment(self, at: int) -> Moment:
        """Return when a record was taken."""
        epoch = int(self.when["epoch"][at]) if self.has_epoch[at] else None
        return Moment(epoch, *(int(self.when[name][at]) for name in WHEN[1:]))

    def text(self, at: int) -> str:
        """Return the text form of a record's point."""
        return self.names[int(self.point[at])]

    def find(self, texts: Sequence[str] | None = None, when: Mapping[str, int] | None = None) -> Array:
        """Return the places of records, in the order they were made: of some points, at some moments."""
        found = self.kept
        if texts is not None:
            codes = [self._codes[text] for text in dict.fromkeys(texts) if text in self._codes]
            self._asked += 1
            if self._asked <= _LOOKS:
                found = self.kept[np.isin(self._kept_points, codes)]
            else:
                order, ends = self._by_point
                slices = [order[ends[code] : ends[code + 1]] for code in codes]
                found = self.kept[np.sort(np.concatenate([np.empty(0, np.int64), *slices]))]
        for name, value in (when or {}).items():
            right = self.when[name][found] == value
            found = found[right & self.has_epoch[found] if name == "epoch" else right]
        return found

    @cached_property
    def _kept_points(self) -> Array:
        return self.point if len(self.kept) == len(self.point) else self.point[self.kept]

    @cached_property
    def _by_point(self) -> tuple[Array, Array]:
        """The kept records ordered by point, and where those of each point begin."""
        ends = np.cumsum(np.bincount(self._kept_points, minlength=len(self.names)))
        return np.argsort(self._kept_points, kind="stable"), np.concatenate([[0], ends])


def _chosen(values: Array, codes: Array) -> Array:
    """Return a value for each code; one that a damaged row made up is taken for the last."""
    return values[np.minimum(codes, len(values) - 1)]


def _joined(arrays: Sequence[Array]) -> Array:
    if not arrays:
        return np.empty(0, np.int64)
    kind = np.result_type(*arrays)
    return np.concatenate(arrays).astype(np.int64 if kind.kind not in "iu" else kind, copy=False)


def _doubtful(parts: Sequence[Columns], starts: Array) -> Array:
    """Return the places of records that another may repeat, as far as the parts do not rule that out themselves.

    A part whose rows differ, and whose steps no other of its ranks has, needs no look; of two segments that a step was
    cut in, the rows of that step do.
    """
    of_rank: dict[int, list[tuple[int, int, int]]] = {}
    for number, part in enumerate(parts):
        if part.rows and (part.steps is None or not part.unique):
            return np.arange(sum(each.rows for each in parts))
        for rank in part.ranks if part.rows else ():
            of_rank.setdefault(rank, []).append((*(part.steps or (0, 0)), number))
    shared: list[Array] = []
    for spans in of_rank.values():  # of thousands of segments few overlap: those that begin before others end
        spans.sort()
        for at, (_, last, one) in enumerate(spans):
            for first, end, other in islice(spans, at + 1, None):
                if first > last:
                    break
                for number in (one, other):
                    steps = parts[number].array("step")
                    shared.append(starts[number] + np.flatnonzero((steps >= first) & (steps <= min(last, end))))
    return np.unique(np.concatenate(shared)) if shared else np.empty(0, np.int64)


def _first_of_each(columns: Sequence[Array]) -> Array:
    """Return where each distinct row is met first."""
    if not columns[0].size:
        return np.empty(0, np.int64)
    key = np.zeros(columns[0].size, np.int64)
    spread = 1
    for column in columns:
        low, high = int(column.min()), int(column.max())
        if high - low + 1 > (1 << 62) // spread:  # more than 64 bits tell apart: compare row by row
            rows = np.stack([each.astype(np.int64) for each in columns], axis=1)
            return np.unique(rows, axis=0, return_index=True)[1]
        key = key * (high - low + 1) + (column.astype(np.int64) - low)
        spread *= high - low + 1
    return np.unique(key, return_index=True)[1]
