"""Where a run's records come from: files of our own, memory, several runs joined, another tool's dump.

    Run(Items(address, items, manifest))

A source says what there is as a table, and gives the tensor and the statistics of a place in it; `Run` has the reading
verbs. A table may grow while it is read: `records` returns what there is now.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from layerscope.points import Moment, Point
from layerscope.store.columns import COUNTS, FIRST, Array, Has, bits_of
from layerscope.store.manifest import Manifest
from layerscope.store.records import WHEN, Part, Records
from layerscope.store.strictjson import JSON

if TYPE_CHECKING:
    import torch

    from layerscope.stats import Summary
    from layerscope.store.recovery import Damage


class Kept(NamedTuple):
    """What is kept of a record: dtype, shape and bytes of its tensor; dtype and shape are None where there is none."""

    dtype: str | None
    shape: tuple[int, ...] | None
    nbytes: int


class Sketches(NamedTuple):
    """The sketches of some records: those of record i are `keys[starts[i]:starts[i] + sizes[i]]`, and their counts."""

    keys: Array
    counts: Array
    starts: Array
    sizes: Array


class Statistics(ABC):
    """The stored statistics of some records as columns, each made when it is asked for.

    `has` has the bits of each record; the numbers of one without a summary mean nothing.
    """

    has: Array

    @abstractmethod
    def column(self, name: str) -> Array:
        """Return one of COUNTS or MOMENTS, `first`, `first_count` or `fingerprint`, with a number or row per record."""

    def lost(self) -> Array | None:
        """Tell the records of which a column turned out damaged since `has` was read; None where there are none."""
        return None

    @abstractmethod
    def described(self) -> tuple[list[str], list[tuple[int, ...] | None]]:
        """Return dtype and shape of what each summary is of."""

    @abstractmethod
    def sketches(self) -> Sketches:
        """Return the sketches."""


class Source(ABC):
    """Records, and how what was kept of each is read. `refresh` is called with no other verb under way."""

    address: str
    path: str
    layout = "layerscope"
    notes: list[str]
    manifest: Manifest

    @abstractmethod
    def records(self) -> Records:
        """Return what there is."""

    @abstractmethod
    def kept(self, at: int) -> Kept:
        """Return what is kept of a record."""

    @abstractmethod
    def tensor(self, at: int, rows: range | None) -> torch.Tensor:
        """Return a record's tensor, or rows of it."""

    @abstractmethod
    def summary(self, at: int) -> Summary | None:
        """Return the statistics that were stored with a record."""

    @abstractmethod
    def note(self, at: int) -> dict[str, Any]:
        """Return what the recorder noted beside a record."""

    def pieces(self, at: int, items: int) -> Iterator[torch.Tensor]:
        """Go through a tensor's values in row-major order; a source that can read a stretch of a file does better."""
        flat = self.tensor(at, None).reshape(-1)
        for start in range(0, flat.numel(), items):
            yield flat[start : start + items]

    def statistics(self, places: Array) -> Statistics:
        """Return the stored statistics of records as columns."""
        return Summaries([self.summary(int(at)) for at in places])

    @property
    def damaged(self) -> list[Damage]:
        """What was written and cannot be read, as far as that shows without reading every tensor."""
        return []

    def refresh(self) -> None:  # noqa: B027  (most never grow)
        """See what has been written since."""

    def reopened(self) -> tuple[Any, ...]:
        """Return the arguments of `open_run` that open the same again, in another process."""
        return (self.address,)


@dataclass(frozen=True, slots=True)
class Item:
    """One tensor of a list: where it belongs, what it is, and how it is read.

    `pieces(items)` goes through its values, flat and in row-major order, at most so many at a time; without it the
    whole is loaded. `dtype` and `shape` are None where there are statistics alone.
    """

    point: Point
    moment: Moment
    dtype: str | None
    shape: tuple[int, ...] | None
    nbytes: int
    load: Callable[[], torch.Tensor] | None
    pieces: Callable[[int], Iterator[torch.Tensor]] | None = None
    summary: Summary | Callable[[], Summary | None] | None = None
    note: Mapping[str, JSON] = field(default_factory=dict)


class Items(Source):
    """Records that are a list: those of another tool's dump, and those of several records joined."""

    def __init__(
        self,
        address: str,
        items: Iterable[Item],
        *,
        manifest: Manifest,
        layout: str = "layerscope",
        notes: Iterable[str] = (),
        reopen: tuple[Any, ...] = (),
    ) -> None:
        self.address, self.layout, self.notes, self.manifest = address, layout, list(notes), manifest
        self.path = str(reopen[0]) if reopen else address
        self._reopen = reopen
        self._items = list(items)
        self._table: Records | None = None
        self._tabled = 0

    def records(self) -> Records:
        """Return what there is; nothing of it waits for a device."""
        if self._table is None or self._tabled < self._size:
            self._tabled = self._size
            self._table = Records.of([_part([self._where(n) for n in range(self._tabled)])])
        return self._table

    @property
    def _size(self) -> int:
        return len(self._items)

    def _where(self, at: int) -> tuple[Point, Moment]:
        return self._items[at].point, self._items[at].moment

    def _item(self, at: int) -> Item:
        return self._items[at]

    def kept(self, at: int) -> Kept:
        """Return what is kept of a record."""
        item = self._item(at)
        return Kept(item.dtype, item.shape, item.nbytes)

    def tensor(self, at: int, rows: range | None) -> torch.Tensor:
        """Load a record's tensor, or rows of it."""
        load = self._item(at).load
        assert load is not None
        return load() if rows is None else load()[rows.start : rows.stop : rows.step]

    def pieces(self, at: int, items: int) -> Iterator[torch.Tensor]:
        """Go through its values, in pieces where it comes in pieces."""
        item = self._item(at)
        return super().pieces(at, items) if item.pieces is None else item.pieces(items)

    def summary(self, at: int) -> Summary | None:
        """Return the statistics beside it."""
        summary = self._item(at).summary
        return summary() if callable(summary) else summary

    def note(self, at: int) -> dict[str, Any]:
        """Return what was noted beside it."""
        return dict(self._item(at).note)

    def reopened(self) -> tuple[Any, ...]:
        """Return what opens it again."""
        return self._reopen or (self.address,)


def _part(where: Sequence[tuple[Point, Moment]]) -> Part:
    codes: dict[Point, int] = {}
    point = np.array([codes.setdefault(point, len(codes)) for point, _ in where], np.int64)
    arrays = {"point": point, "has": np.array([m.epoch is not None for _, m in where], np.int64) * int(Has.EPOCH)}
    for name in WHEN:
        arrays[name] = np.array([getattr(m, name) or 0 for _, m in where], np.int64)
    return Part([str(point) for point in codes], arrays, len(where))


class Summaries(Statistics):
    """Statistics that are values already."""

    def __init__(self, summaries: Sequence[Summary | None]) -> None:
        self._all = summaries
        self._there = np.flatnonzero([s is not None for s in summaries])
        self._here = [s for s in summaries if s is not None]
        self.has = np.array([0 if s is None else bits_of(s) for s in summaries], np.int64)

    def column(self, name: str) -> Array:
        """Return one column."""
        column: Array
        if name == "first":
            column = np.zeros((len(self._all), FIRST))
            for at, s in zip(self._there, self._here, strict=True):
                column[at, : len(s.first)] = s.first
            return column
        if name == "fingerprint":
            column = np.zeros((len(self._all), 2), np.uint64)
            values: Any = [(s.fingerprint or 0, s.placed or 0) for s in self._here]
        elif name == "first_count":
            column, values = np.zeros(len(self._all), np.int64), [len(s.first) for s in self._here]
        else:
            column = np.zeros(len(self._all), np.int64 if name in COUNTS else np.float64)
            values = [getattr(s, name) for s in self._here]
        if self._here:
            column[self._there] = values
        return column

    def described(self) -> tuple[list[str], list[tuple[int, ...] | None]]:
        """Return dtype and shape of each."""
        return ["" if s is None else s.dtype for s in self._all], [None if s is None else s.shape for s in self._all]

    def sketches(self) -> Sketches:
        """Return the sketches, one after the other."""
        found = [None if s is None else s.sketch for s in self._all]
        sizes = np.array([0 if k is None else k.keys.size for k in found], np.int64)
        known = [k for k in found if k is not None]
        keys = np.concatenate([k.keys for k in known]) if known else np.empty(0, np.int32)
        counts = np.concatenate([k.counts for k in known]) if known else np.empty(0, np.int64)
        return Sketches(keys, counts, np.cumsum(sizes) - sizes, sizes)
