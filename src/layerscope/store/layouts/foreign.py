"""Somebody else's dump under the same reading verbs.

    ForeignRun(address, "neuron", items, manifest=Manifest(mode="fp32"))

A layout's reader says what there is, as items; nothing is loaded before it is asked for.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, final

from layerscope.points import Moment, Point
from layerscope.store.index import Index, Row
from layerscope.store.journal import Record
from layerscope.store.manifest import Manifest
from layerscope.store.reader import Reader
from layerscope.store.strictjson import JSON

if TYPE_CHECKING:
    import torch

    from layerscope.stats import Summary

__all__ = ["ForeignRun", "Item"]


@dataclass(frozen=True, slots=True)
class Item:
    """One tensor of a dump: where it belongs, what it is, and how it is read.

    `pieces(items)` goes through its values, flat and in row-major order, at most so many at a time; without it the
    whole is loaded. `dtype` and `shape` are None where the dump has statistics alone.
    """

    point: Point
    moment: Moment
    dtype: str | None
    shape: tuple[int, ...] | None
    nbytes: int
    load: Callable[[], torch.Tensor] | None
    pieces: Callable[[int], Iterator[torch.Tensor]] | None = None
    summary: Summary | None = None
    note: Mapping[str, JSON] = field(default_factory=dict)


@final
class ForeignRun(Reader):
    """A dump that layerscope did not write. `notes` says what was odd about it, in sentences."""

    def __init__(
        self,
        address: str,
        layout: str,
        items: Iterable[Item],
        *,
        manifest: Manifest,
        notes: Iterable[str] = (),
        reopen: tuple[Any, ...] = (),
    ) -> None:
        super().__init__()
        self.address, self.layout, self.notes = address, layout, list(notes)
        self._manifest = manifest
        self._items = list(items)
        self._table: Index | None = None
        self._reopen = reopen

    def __repr__(self) -> str:
        return f"ForeignRun({self.address!r}, {self.layout}, {len(self)} records)"

    def __reduce__(self) -> tuple[Any, ...]:
        return _opened, self._reopen or (self.address,)

    @property
    def path(self) -> str:
        """The folder or file that it lies in, which may hold other modes as well."""
        return str(self._reopen[0]) if self._reopen else self.address

    @property
    def manifest(self) -> Manifest:
        """What the dump says about itself, as far as its layout has a place for it."""
        return self._manifest

    @property
    def replaced(self) -> int:
        """How many tensors have the same point and moment as a later one."""
        return self._ask(lambda index: len(self._items) - len(index))

    def _index(self) -> Index:
        if self._table is None:
            self._table = Index()
            self._table.add(self._row(n) for n in range(len(self._items)))
        return self._table

    def _forget_index(self) -> None:
        self._table = None

    def _row(self, number: int) -> Row:
        item = self._items[number]
        m = item.moment
        where = (str(item.point), m.epoch, m.step, m.batch, m.call, m.rank)
        return Row(Record(number, *where, item.dtype, item.shape, None), 0)

    def _tensor(self, row: Row, rows: range | None) -> torch.Tensor:
        load = self._items[row.facts.record].load
        assert load is not None
        tensor = load()
        return tensor if rows is None else tensor[rows.start : rows.stop : rows.step]

    def _pieces(self, row: Row, items: int) -> Iterator[torch.Tensor]:
        item = self._items[row.facts.record]
        return super()._pieces(row, items) if item.pieces is None else item.pieces(items)

    def _nbytes(self, row: Row) -> int:
        return self._items[row.facts.record].nbytes

    def _rest(self, row: Row) -> tuple[Summary | None, dict[str, Any]]:
        item = self._items[row.facts.record]
        return item.summary, dict(item.note)


def _opened(address: str, mode: str | None = None) -> Reader:
    from layerscope.store.run import open_run

    return open_run(address, mode=mode)
