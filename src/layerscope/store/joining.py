"""A run whose samples went through the model a few at a time, read as if all had gone at once.

    whole = joined(run)
    whole.tensor("backbone.layers.0")       # (samples, tokens, width), of all its steps
    are_samples(run.records("backbone.layers.0"), run.manifest)     # and not, say, steps of a training

Nothing is copied until it is asked for, and `Entry.pieces` never holds more than a piece.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from functools import reduce
from operator import add
from typing import TYPE_CHECKING, Any, final

from layerscope.errors import Unsupported
from layerscope.points import Moment, Point
from layerscope.store.index import Index, Row
from layerscope.store.journal import Record
from layerscope.store.manifest import Manifest
from layerscope.store.reader import Entry, Reader

if TYPE_CHECKING:
    import torch

    from layerscope.stats import Summary

__all__ = ["SAMPLES", "are_samples", "joined"]

SAMPLES = "calib_data_num"  # the setting of a run that says how many samples it was recorded on


def joined(run: Reader, entries: Iterable[Entry] | None = None) -> Reader:
    """Return a view of `run` in which the records of a point are one, joined along their first axis in order.

    `entries` are the records to join, all of the run's where they are left out. Raises Unsupported for records that
    differ in dtype or in another axis. A run of one moment is returned as it is.
    """
    if entries is None:
        return run if len(run.moments) < 2 else _Joined(run, run.records())
    return _Joined(run, entries)


def are_samples(entries: Sequence[Entry], manifest: Manifest) -> bool:
    """Tell whether the records of a point, together, are the samples that the run was recorded on, each once."""
    wanted = manifest.settings.get(SAMPLES)
    others = {(entry.moment.epoch, entry.moment.call, entry.moment.rank) for entry in entries}
    if type(wanted) is not int or len(others) != 1:
        return False
    return all(entry.shape for entry in entries) and sum((entry.shape or (0,))[0] for entry in entries) == wanted


@final
class _Joined(Reader):
    """One record for each point; its number is its place in `_parts`."""

    def __init__(self, run: Reader, entries: Iterable[Entry]) -> None:
        super().__init__()
        self.address = run.address
        self.layout = run.layout
        self.notes = list(run.notes)
        self._run = run
        of: dict[Point, list[Entry]] = {}
        for entry in entries:
            of.setdefault(entry.point, []).append(entry)
        self._parts = list(of.values())
        self._table: Index | None = None

    @property
    def manifest(self) -> Manifest:
        """What the run says about itself."""
        return self._run.manifest

    @property
    def replaced(self) -> int:
        """How many records gave way to a later one of the same point and moment."""
        return self._run.replaced

    def _index(self) -> Index:
        if self._table is None:
            self._table = Index()
            self._table.add(Row(_facts(number, parts), 0) for number, parts in enumerate(self._parts))
        return self._table

    def _forget_index(self) -> None:
        self._table = None

    def _tensor(self, row: Row, rows: range | None) -> torch.Tensor:
        import torch

        whole = torch.cat([part.tensor() for part in self._parts[row.facts.record]])
        return whole if rows is None else whole[rows.start : rows.stop : rows.step]

    def _pieces(self, row: Row, items: int) -> Iterator[torch.Tensor]:
        for part in self._parts[row.facts.record]:
            yield from part.pieces(items)

    def _nbytes(self, row: Row) -> int:
        return sum(part.nbytes for part in self._parts[row.facts.record])

    def _rest(self, row: Row) -> tuple[Summary | None, dict[str, Any]]:
        """Add summaries up where nothing else was kept; those of a tensor are taken from all of it when asked for."""
        known = [part.summary for part in self._parts[row.facts.record] if part.summary is not None]
        return reduce(add, known) if row.facts.dtype is None and known else None, {}


def _facts(number: int, parts: list[Entry]) -> Record:
    """Return what the index is to know of a record made of several."""
    first = parts[0]
    for part in parts[1:]:
        if part.dtype != first.dtype or _rest_of(part) != _rest_of(first):
            raise Unsupported(
                f"{first.point} cannot be read as one tensor: it is {first.dtype}{list(first.shape or ())} at "
                f"{first.moment} and {part.dtype}{list(part.shape or ())} at {part.moment}; choose a moment"
            )
    shape = None if first.shape is None else (sum((part.shape or (0,))[0] for part in parts), *first.shape[1:])
    when = Moment(step=first.moment.step, rank=first.moment.rank)
    where = (when.epoch, when.step, when.batch, when.call, when.rank)
    return Record(number, str(first.point), *where, first.dtype, shape, None)


def _rest_of(entry: Entry) -> tuple[int, ...] | None:
    """Return every axis but the first, along which records are joined; a scalar has none to join along."""
    if entry.shape == ():
        raise Unsupported(f"{entry.point} at {entry.moment} is a scalar, and scalars are not joined; choose a moment")
    return None if entry.shape is None else entry.shape[1:]
