"""What can be asked of recorded tensors, wherever they are kept.

    run.points; run.moments
    run.tensor("model.layers.3", step=0, call=1)
    for entry in run.records("model.layers.3"): ...

A name is an alias, a module's name (its output), `name:side`, `name[leaf]`, `name:side[leaf]` or `op:NAME`. What is
left out must be unique: otherwise the error lists what there is to choose from.
"""

from __future__ import annotations

import contextlib
import os
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from difflib import get_close_matches
from functools import cached_property, lru_cache
from typing import TYPE_CHECKING, Any, TypeVar

from layerscope.errors import Ambiguous, BadText, LayerscopeError, NoSuchPoint
from layerscope.points import Moment, Point, unwrapped
from layerscope.store.index import WHEN, Index, Row
from layerscope.store.journal import parsed
from layerscope.store.manifest import Dropped, Manifest, Missing
from layerscope.store.table import Table

if TYPE_CHECKING:
    import torch

    from layerscope.stats import Summary
    from layerscope.store.recovery import Damage

__all__ = ["Entry", "Reader"]

T = TypeVar("T")

_LISTED = 10


@dataclass(frozen=True, eq=False)
class Entry:
    """One record: where and when it was taken, and what was kept of it.

    `dtype` and `shape` are None, `nbytes` 0, when only a summary was kept. `summary` and `note` are read when they
    are first asked for.
    """

    point: Point
    moment: Moment
    dtype: str | None
    shape: tuple[int, ...] | None
    nbytes: int
    _reader: Reader = field(repr=False)
    _row: Row = field(repr=False)

    def tensor(self) -> torch.Tensor:
        """Return the tensor, as `Reader.tensor` does."""
        return self._reader._stored(self._row)

    def pieces(self, items: int) -> Iterator[torch.Tensor]:
        """Go through the tensor's values in row-major order, as flat tensors of at most `items` elements.

        However large the tensor, the memory taken is that of a few pieces. Damaged bytes raise, at the latest after
        the last piece.
        """
        return self._reader._pieces(self._row, items)

    @cached_property
    def _rest(self) -> tuple[Summary | None, dict[str, Any]]:
        return self._reader._rest(self._row)

    @property
    def summary(self) -> Summary | None:
        """The statistics stored with the record, None when there are none."""
        return self._rest[0]

    @property
    def note(self) -> dict[str, Any]:
        """What the recorder noted beside it."""
        return self._rest[1]


class Reader(ABC):
    """The reading verbs, over an index of records; where the bytes are is the subclass's affair.

    `layout` names the layout of the files: `layerscope`, or whose they are. `notes` says in sentences what was odd.
    """

    address: str
    layout: str = "layerscope"

    def __init__(self) -> None:
        self.notes: list[str] = []
        self._pid = os.getpid()
        self._lock = threading.RLock()

    @property
    def path(self) -> str:
        """The folder or file that it lies in, which may hold other modes as well."""
        return self.address

    # What there is ------------------------------------------------------------------------------

    @property
    @abstractmethod
    def manifest(self) -> Manifest:
        """What the run says about itself."""

    @property
    def points(self) -> list[Point]:
        """Every point that has records, in the order they were first recorded."""
        return [parsed(text) for text in self._ask(lambda index: index.points)]

    @property
    def moments(self) -> list[Moment]:
        """Every moment that has records, in order."""
        return self._ask(lambda index: index.moments)

    @property
    def missing(self) -> list[Missing]:
        """The points that were asked for and are not there, or not always, each with the reason."""
        return list(self.manifest.completeness.missing)

    @property
    def dropped(self) -> list[Dropped]:
        """The records that were lost while recording, counted by point and reason."""
        return list(self.manifest.completeness.dropped)

    @property
    def state(self) -> str:
        """`recording`, `complete`, `interrupted`, `recovered` or `unknown`: how the recording ended."""
        return self.manifest.completeness.state

    @property
    def complete(self) -> bool:
        """Whether the recording ended in order and holds everything that was asked for.

        A forward that raised has left records out, so a run with such forwards is not complete.
        """
        failed = self.manifest.completeness.failed
        return self.state == "complete" and not self.missing and not self.dropped and not failed

    @property
    @abstractmethod
    def replaced(self) -> int:
        """How many records gave way to a later one of the same point and moment."""

    @property
    def damaged(self) -> list[Damage]:
        """What was written and cannot be read, as far as that shows without reading every tensor."""
        return []

    def __len__(self) -> int:
        return self._ask(len)

    # Reading ------------------------------------------------------------------------------------

    def records(
        self,
        name: str | Point | None = None,
        *,
        epoch: int | None = None,
        step: int | None = None,
        batch: int | None = None,
        call: int | None = None,
        rank: int | None = None,
    ) -> Iterator[Entry]:
        """Go through the records in the order they were made, of one name or of all.

        Raises NoSuchPoint for a name nothing was recorded under; moments that nothing was recorded at give nothing.
        """
        texts = None if name is None else self._named(name)
        when = _when(epoch, step, batch, call, rank)
        return map(self._entry, self._ask(lambda index: index.find(texts, when)))

    def tensor(
        self,
        name: str | Point,
        *,
        epoch: int | None = None,
        step: int | None = None,
        batch: int | None = None,
        call: int | None = None,
        rank: int | None = None,
        rows: slice | None = None,
    ) -> torch.Tensor:
        """Return one recorded tensor, on the CPU and in its recorded dtype; with `rows`, only those of its first axis.

        Raises NoSuchPoint when there is none, Ambiguous when there are several, Damaged when its bytes are not what
        was written.
        """
        row = self._one(name, _when(epoch, step, batch, call, rank))
        return self._stored(row, rows)

    def summary(
        self,
        name: str | Point,
        *,
        epoch: int | None = None,
        step: int | None = None,
        batch: int | None = None,
        call: int | None = None,
        rank: int | None = None,
    ) -> Summary:
        """Return the statistics of one record; computed from the tensor when none were stored."""
        return self._summary(self._one(name, _when(epoch, step, batch, call, rank)))

    def summaries(self) -> Table:
        """Return the statistics of every record as rows; computed from the tensor where none were stored.

        A record that cannot be read has no statistics, and the reason in a column `damaged`, which is there only
        when there is such a record.
        """
        return Table(map(self._table_row, self._ask(lambda index: index.find())))

    # What the subclass knows --------------------------------------------------------------------

    @abstractmethod
    def _index(self) -> Index:
        """Return the index, filled with what there is; called with the lock held."""

    @abstractmethod
    def _tensor(self, row: Row, rows: range | None) -> torch.Tensor: ...

    def _pieces(self, row: Row, items: int) -> Iterator[torch.Tensor]:
        """Cut the whole tensor; a subclass that can read a stretch of a file does better."""
        flat = self._tensor(row, None).reshape(-1)
        for start in range(0, flat.numel(), items):
            yield flat[start : start + items]

    @abstractmethod
    def _nbytes(self, row: Row) -> int: ...

    @abstractmethod
    def _rest(self, row: Row) -> tuple[Summary | None, dict[str, Any]]: ...

    @abstractmethod
    def _forget_index(self) -> None:
        """Drop the index, to be made anew when next it is asked."""

    def _ask(self, question: Callable[[Index], T]) -> T:
        self._mind_forks()
        with self._lock:
            return question(self._index())

    def _mind_forks(self) -> None:
        """Begin anew in a forked child: a lock may have been held, and SQLite's connections do not survive a fork."""
        if os.getpid() != self._pid:
            self._pid, self._lock = os.getpid(), threading.RLock()
            self._forget_index()

    # Finding ------------------------------------------------------------------------------------

    def _one(self, name: str | Point, when: dict[str, int]) -> Row:
        exact = self._exact(name)
        rows = self._ask(lambda index: index.find([exact], when)) if exact else []
        texts = [] if rows else self._named(name)
        rows = rows or self._ask(lambda index: index.find(texts, when))
        if not rows:
            there = self._ask(lambda index: index.find(texts))
            raise NoSuchPoint(
                f"{_told(name)} was not recorded at {_told_when(when)}; it was at {_few(_moments(there))}"
                f"{self._lost(texts)}"
            )
        found = list(dict.fromkeys(row.facts.point for row in rows))
        if len(found) > 1:
            raise Ambiguous(
                f"{_told(name)} is {len(found)} tensors in {self.address}: {_few([_short(t) for t in found])}; name one"
            )
        if len(rows) > 1:
            moments = _moments(rows)
            differ = [n for n in WHEN if len({getattr(row.facts, n) for row in rows}) > 1]
            raise Ambiguous(
                f"{_told(name)} was recorded at {len(rows)} moments: {_few(moments)}; "
                f"choose one with {', '.join(f'{n}=' for n in differ)}"
            )
        return rows[0]

    def _exact(self, name: str | Point) -> str | None:
        """Return the text form a name most likely has: most names are asked for as they were recorded."""
        if isinstance(name, Point):
            return str(name)
        return None if name in self.manifest.aliases or not _reads(name) else _text(name)

    def _named(self, name: str | Point) -> list[str]:
        """Return the recorded points a name stands for, as text; raises NoSuchPoint when there are none."""
        for point in self._readings(name):
            found = self._leaves(point)
            if found:
                return found
        if isinstance(name, str):
            aliased = [t for text in self.manifest.aliases.get(name, ()) for t in self._aliased(text)]
            if aliased:
                return list(dict.fromkeys(aliased))
        raise NoSuchPoint(self._nothing(name))

    def _aliased(self, text: str) -> list[str]:
        return self._leaves(parsed(text)) if _reads(text) else []

    def _leaves(self, point: Point) -> list[str]:
        """Return the point itself where it was recorded, else what was recorded inside it."""
        texts = self._ask(lambda index: index.at_place(point.place, point.side))
        if str(point) in texts:
            return [str(point)]
        return [text for text in texts if parsed(text).leaf[: len(point.leaf)] == point.leaf]

    def _readings(self, name: str | Point) -> Iterator[Point]:
        """Yield what a name may mean, the likeliest first."""
        if isinstance(name, Point):
            yield name
            return
        if name in self.manifest.aliases:
            return
        read = []
        with contextlib.suppress(BadText):
            read.append(parsed(name))
        read.append(Point(name))  # a module may be called `a:b` or `a[0]`
        yield from read
        for point in read:
            for other in (_first_name(point.name, self.manifest.shared), unwrapped(point.name)):
                if other != point.name:
                    yield Point(other, point.side, point.leaf, point.op)

    def _nothing(self, name: str | Point) -> str:
        texts = self._ask(lambda index: index.points)
        text = str(name)
        candidates = dict.fromkeys([*self.manifest.aliases, *map(_short, texts)])
        near = get_close_matches(text, candidates, n=3, cutoff=0.0) if len(candidates) < 20_000 else []
        nearest = f"; nearest: {', '.join(near)}" if near else ""
        return f"no point {_told(name)} among the {len(texts)} of {self.address}{nearest}{self._lost([text])}"

    def _lost(self, texts: Sequence[str]) -> str:
        """Say what is known of records that are not there."""
        names = {*texts, *(str(parsed(t)) for t in texts if _reads(t))}
        said = [f"{m.point} is missing: {m.reason}" for m in self.missing if m.point in names]
        said += [f"{d.count} of {d.point} dropped: {d.reason}" for d in self.dropped if d.point in names]
        return f" ({'; '.join(said[:3])})" if said else ""

    # Records ------------------------------------------------------------------------------------

    def _stored(self, row: Row, rows: slice | None = None) -> torch.Tensor:
        if row.facts.dtype is None:
            raise NoSuchPoint(
                f"{row.facts.point!r} at {row.facts.moment} has a summary and no tensor in {self.address}; "
                "record with keep='tensor' or keep='both' to have it"
            )
        return self._tensor(row, _range(row, rows))

    def _entry(self, row: Row) -> Entry:
        facts = row.facts
        point, size = parsed(facts.point), self._nbytes(row)
        return Entry(point, facts.moment, facts.dtype, facts.shape, size, self, row)

    def _summary(self, row: Row) -> Summary:
        stored = self._rest(row)[0]
        if stored is not None:
            return stored
        if row.facts.dtype is None:
            raise NoSuchPoint(
                f"{row.facts.point} at {row.facts.moment} has neither summary nor tensor in {self.address}"
            )
        from layerscope.stats import summarize

        return summarize(self._tensor(row, None))

    def _table_row(self, row: Row) -> dict[str, Any]:
        point, moment = parsed(row.facts.point), row.facts.moment
        where = {"point": row.facts.point, "name": point.name, "side": point.side}
        where["leaf"] = row.facts.point[len(f"{point.place}:{point.side}") :]
        when = {name: getattr(moment, name) for name in WHEN}
        try:
            statistics = self._summary(row).row()
        except NoSuchPoint:
            statistics = {}
        except LayerscopeError as error:  # one bad record does not hide the others
            statistics = {"damaged": str(error)}
        return {**where, **when, **statistics}


def _when(epoch: int | None, step: int | None, batch: int | None, call: int | None, rank: int | None) -> dict[str, int]:
    values = zip(WHEN, (epoch, step, batch, call, rank), strict=True)
    return {name: int(value) for name, value in values if value is not None}


def _range(row: Row, rows: slice | None) -> range | None:
    if rows is None:
        return None
    shape = row.facts.shape or ()
    if not shape:
        raise ValueError(f"{row.facts.point} is a single number and has no rows")
    chosen = range(*rows.indices(shape[0]))
    if chosen.step < 0:
        raise ValueError(f"rows are read forwards; {rows} goes backwards")
    return chosen


def _first_name(name: str, shared: dict[str, str]) -> str:
    """Return the first name of a shared module, or of the module it is part of."""
    parts = name.split(".")
    for n in range(len(parts), 0, -1):
        first = shared.get(".".join(parts[:n]))
        if first is not None:
            return ".".join([first, *parts[n:]])
    return name


@lru_cache(maxsize=1 << 14)
def _text(name: str) -> str:
    return str(parsed(name))


def _reads(text: str) -> bool:
    try:
        parsed(text)
    except BadText:
        return False
    return True


def _short(text: str) -> str:
    """Write a point as one would ask for it: without the side when that is the output."""
    point = parsed(text)
    return point.place + text[len(f"{point.place}:output") :] if point.side == "output" else text


def _told(name: str | Point) -> str:
    return repr(str(name))


def _told_when(when: dict[str, int]) -> str:
    return " ".join(f"{name}={value}" for name, value in when.items()) or "any moment"


def _moments(rows: Sequence[Row]) -> list[str]:
    return list(dict.fromkeys(str(row.facts.moment) for row in rows))


def _few(texts: Sequence[str]) -> str:
    more = len(texts) - _LISTED
    return ", ".join(texts[:_LISTED]) + (f" and {more} more" if more > 0 else "")
