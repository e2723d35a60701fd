"""Which records a run has, as arrays: where and when each was taken, and how some of them are found.

    records = Records.of([part, ...])
    records.find(["model.layers.3:output"], {"step": 0})      # their places, in the order they were made

Of two records with the same point and moment the later one counts; the other is only counted.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import numpy as np
import numpy.typing as npt

from layerscope.points import Moment
from layerscope.store.columns import Has

Array = npt.NDArray[Any]

WHEN = ("epoch", "step", "batch", "call", "rank")


@dataclass(frozen=True, slots=True)
class Part:
    """Some records of one origin: a segment, a journal, a list in memory.

    `arrays` has a number per record for `point` (counted in `points`), `has` and each of WHEN. `alive` are those that
    are what was written. `age` sorts records of the same point and moment: by their writer's claim, then by number.
    """

    points: Sequence[str]
    arrays: Mapping[str, Array]
    size: int
    alive: Array | None = None
    age: Array | None = None
    unique: bool = False
    # First and last step, and the ranks, where they are known without looking; they tell that parts do not overlap.
    span: tuple[int, int] | None = None
    ranks: Sequence[int] = ()


@dataclass(frozen=True)
class Records:
    """All records of a run; a place is an index into every array."""

    names: list[str]
    point: Array
    when: dict[str, Array]
    has_epoch: Array
    starts: Array  # where each part begins
    kept: Array  # the places that count, in the order they were made
    _points: dict[str, int] = field(repr=False)

    @classmethod
    def of(cls, parts: Sequence[Part]) -> Records:
        """Put parts one after the other."""
        codes: dict[str, int] = {}
        points, sizes = [], []
        for part in parts:
            table = np.array([codes.setdefault(text, len(codes)) for text in part.points] or [0], np.int32)
            points.append(table[np.minimum(part.arrays["point"], len(table) - 1)])
            sizes.append(part.size)
        when = {name: _joined([part.arrays[name] for part in parts]) for name in WHEN}
        has = _joined([part.arrays["has"] for part in parts])
        starts = np.cumsum([0, *sizes])[:-1]
        point = _joined(points)
        has_epoch = (has & Has.EPOCH) != 0
        alive = [np.ones(p.size, bool) if p.alive is None else p.alive for p in parts]
        kept = np.flatnonzero(np.concatenate(alive)) if alive else np.empty(0, np.int64)
        doubtful = _doubtful(parts, starts)
        if len(doubtful):
            doubtful = doubtful[np.concatenate(alive)[doubtful]]
            age = np.concatenate([_age(part, at) for at, part in zip(starts, parts, strict=True)])
            later = _latest(doubtful, age, [point, has_epoch, *when.values()])
            gone = np.setdiff1d(doubtful, later, assume_unique=True)
            kept = np.setdiff1d(kept, gone, assume_unique=True) if len(gone) else kept
        return cls(list(codes), point, when, has_epoch, starts, kept, codes)

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

    @cached_property
    def points(self) -> list[str]:
        """Every point that has records, in the order they were first recorded."""
        codes, first = np.unique(self.point[self.kept], return_index=True)
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
        if texts is None:
            found = self.kept
        else:
            order, ends = self._by_point
            codes = [self._points[text] for text in dict.fromkeys(texts) if text in self._points]
            slices = [order[ends[code] : ends[code + 1]] for code in codes]
            found = np.sort(np.concatenate(slices)) if slices else np.empty(0, np.int64)
            found = self.kept[found]
        for name, value in (when or {}).items():
            right = self.when[name][found] == value
            found = found[right & self.has_epoch[found] if name == "epoch" else right]
        return found

    @cached_property
    def _by_point(self) -> tuple[Array, Array]:
        """The kept records ordered by point, and where those of each point begin."""
        points = self.point[self.kept]
        ends = np.cumsum(np.bincount(points, minlength=len(self.names)))
        narrow = points.astype(np.uint16) if len(self.names) <= 1 << 16 else points  # of which numpy sorts by radix
        return np.argsort(narrow, kind="stable"), np.concatenate([[0], ends])


def _joined(arrays: Sequence[Array]) -> Array:
    if not arrays:
        return np.empty(0, np.int64)
    kind = np.result_type(*arrays)
    return np.concatenate(arrays).astype(np.int64 if kind.kind not in "iu" else kind, copy=False)


def _age(part: Part, start: int) -> Array:
    return np.arange(start, start + part.size) if part.age is None else part.age


def _doubtful(parts: Sequence[Part], starts: Array) -> Array:
    """Return the places of records that another may repeat, as far as the parts do not rule that out themselves.

    A part whose rows differ, and whose steps no other of its ranks has, needs no look; of two segments that a step was
    cut in, the rows of that step do.
    """
    if not all(part.unique for part in parts):
        return np.arange(sum(part.size for part in parts))
    shared: list[Array] = []
    for at, part in zip(starts, parts, strict=True):
        for other in parts:
            if other is part or not other.size or not part.size:
                continue
            if part.span is None or other.span is None:
                return np.arange(sum(each.size for each in parts))
            low, high = max(part.span[0], other.span[0]), min(part.span[1], other.span[1])
            if low <= high and not set(part.ranks).isdisjoint(other.ranks):
                steps = part.arrays["step"]
                shared.append(at + np.flatnonzero((steps >= low) & (steps <= high)))
    return np.unique(np.concatenate(shared)) if shared else np.empty(0, np.int64)


def _latest(kept: Array, age: Array, columns: Sequence[Array]) -> Array:
    """Return the places of which no other is of the same point and moment and later."""
    order = kept[np.argsort(age[kept], kind="stable")[::-1]]
    first = _first_of_each([column[order] for column in columns])
    return np.sort(order[first])


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
