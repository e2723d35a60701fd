"""Where a run's records come from: files of our own, memory, several runs joined, another tool's dump.

    Run(Items(address, items, manifest))

A source says what there is as a table, and gives the tensor and the statistics of a place in it; `Run` has the reading
verbs. A table may grow while it is read: `records` returns what there is now.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np

from layerscope.points import Moment, Point
from layerscope.store.columns import Array, Columns, Has, TableRow
from layerscope.store.manifest import Manifest
from layerscope.store.records import WHEN, Records
from layerscope.store.strictjson import JSON
from layerscope.store.table import StoredStatistics

if TYPE_CHECKING:
    import torch

    from layerscope.stats import Summary
    from layerscope.store.recovery import Damage


# Dtype, shape and bytes of what is kept of a record; dtype and shape are None where no tensor is.
Kept: TypeAlias = "tuple[str | None, tuple[int, ...] | None, int]"
NOTHING: Kept = (None, None, 0)


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
    def kept(self, places: Array) -> Iterator[Kept]:
        """Yield what is kept of each record; places ascend."""

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

    def statistics(self, places: Array) -> StoredStatistics:
        """Return the stored statistics of records as columns; places ascend."""
        rows = [TableRow(0, "", None, 0, 0, 0, 0, summary=self.summary(int(at))) for at in places]
        columns = Columns.of(rows, checks=[0] * len(rows))
        return StoredStatistics([(columns, np.arange(len(rows)), slice(None))], len(rows))

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
            self._table = Records([_table([self._where(n) for n in range(self._tabled)])])
        return self._table

    @property
    def _size(self) -> int:
        return len(self._items)

    def _where(self, at: int) -> tuple[Point, Moment]:
        return self._items[at].point, self._items[at].moment

    def _item(self, at: int) -> Item:
        return self._items[at]

    def kept(self, places: Array) -> Iterator[Kept]:
        """Yield what is kept of each record."""
        for at in places.tolist():
            item = self._item(at)
            yield item.dtype, item.shape, item.nbytes

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


def _table(where: Sequence[tuple[Point, Moment]]) -> Columns:
    """Return the columns that say where and when."""
    codes: dict[Point, int] = {}
    arrays = {
        "record": np.arange(len(where)),
        "point": np.array([codes.setdefault(point, len(codes)) for point, _ in where], np.int64),
        "has": np.array([m.epoch is not None for _, m in where], np.int64) * int(Has.EPOCH),
        **{name: np.array([getattr(m, name) or 0 for _, m in where], np.int64) for name in WHEN},
    }
    return Columns(len(where), arrays, [str(point) for point in codes], [], [])
