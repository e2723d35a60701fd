"""What can be asked of recorded tensors, wherever they are kept.

    run.points; run.moments
    run.tensor("model.layers.3", step=0, call=1)
    for record in run.records("model.layers.3"): ...

A name is an alias, a module's name (its output), `name:side`, `name[leaf]`, `name:side[leaf]` or `op:NAME`. What is
left out must be unique: otherwise the error lists what there is to choose from.
"""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from difflib import get_close_matches
from functools import lru_cache
from importlib import import_module
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np

from layerscope.errors import Ambiguous, BadText, NoSuchPoint
from layerscope.points import Moment, Point, unwrapped
from layerscope.report import html
from layerscope.store.address import folder
from layerscope.store.columns import Array
from layerscope.store.floors import Floors, read_floors
from layerscope.store.manifest import Dropped, Manifest, Missing
from layerscope.store.records import WHEN, Records
from layerscope.store.source import Source
from layerscope.store.table import RecordTable, table_of

if TYPE_CHECKING:
    import torch

    from layerscope.stats import Summary
    from layerscope.store.recovery import Damage

T = TypeVar("T")

_LISTED = 10


@lru_cache(maxsize=1 << 16)
def parsed(point: str) -> Point:
    """Read a point's text form; a run has few points and many records."""
    return Point.parse(point)


_moment = lru_cache(maxsize=1 << 12)(Moment)  # many records share one


@dataclass(frozen=True, eq=False, slots=True)
class Entry:
    """One record: where and when it was taken, and what was kept of it.

    `dtype` and `shape` are None, `nbytes` 0, when only a summary was kept. `summary` and `note` are read when they
    are first asked for, and a note again: of a hundred thousand records most memory is these objects.
    """

    point: Point
    moment: Moment
    dtype: str | None
    shape: tuple[int, ...] | None
    nbytes: int
    _run: Run = field(repr=False)
    _at: int = field(repr=False)
    _summary: Summary | None = field(init=False, repr=False, default_factory=lambda: None)

    def tensor(self) -> torch.Tensor:
        """Return the tensor, as `Run.tensor` does."""
        return self._run._tensor(self._at)

    def pieces(self, items: int) -> Iterator[torch.Tensor]:
        """Go through the tensor's values in row-major order, as flat tensors of at most `items` elements.

        However large the tensor, the memory taken is that of a few pieces. Damaged bytes raise, at the latest after
        the last piece.
        """
        return self._run._source.pieces(self._at, items)

    @property
    def summary(self) -> Summary | None:
        """The statistics stored with the record, None when there are none."""
        if self._summary is None:
            object.__setattr__(self, "_summary", self._run._source.summary(self._at))
        return self._summary

    @property
    def note(self) -> dict[str, Any]:
        """What the recorder noted beside it."""
        return self._run._source.note(self._at)


class Run:
    """What one execution left: a table of records, and where their tensors are read from.

    `layout` names the layout of the files: `layerscope`, or whose they are. `notes` says in sentences what was odd.
    A run that is being written shows what was acknowledged when it was opened, or last refreshed.
    """

    def __init__(self, source: Source) -> None:
        self._source = source
        self._pid = os.getpid()
        self._lock = threading.RLock()
        self._floors: Floors | None = None
        self._by_place: tuple[Any, dict[tuple[str, str], list[str]]] = (None, {})

    def __repr__(self) -> str:
        layout = "" if self.layout == "layerscope" else f"{self.layout}, "
        return f"Run({self.address!r}, {layout}{len(self)} records, {self.state})"

    def __reduce__(self) -> tuple[Any, ...]:
        return _reopened, self._source.reopened()  # a run travels by its address

    @property
    def address(self) -> str:
        """Where it lies, with the mode where its place holds several."""
        return self._source.address

    @property
    def path(self) -> str:
        """The folder or file that it lies in, which may hold other modes as well."""
        return self._source.path

    @property
    def layout(self) -> str:
        """The layout of its files."""
        return self._source.layout

    @property
    def notes(self) -> list[str]:
        """What was odd, in sentences."""
        return self._source.notes

    # What there is ------------------------------------------------------------------------------

    @property
    def manifest(self) -> Manifest:
        """What the run says about itself; the completeness is that of all ranks together."""
        return self._source.manifest

    @property
    def points(self) -> list[Point]:
        """Every point that has records, in the order they were first recorded."""
        return [parsed(text) for text in self._ask(lambda records: records.points)]

    @property
    def moments(self) -> list[Moment]:
        """Every moment that has records, in order."""
        return list(self._ask(lambda records: records.moments))

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
        """How the recording ended: `recording`, `complete`, `interrupted`, `recovered` or `unknown`.

        `damaged` when it ended in order and something of it cannot be read.
        """
        ended = self.manifest.completeness.state
        return "damaged" if ended == "complete" and self.damaged else ended

    @property
    def complete(self) -> bool:
        """Whether the recording ended in order, holds everything that was asked for, and reads.

        A forward that raised has left records out, so a run with such forwards is not complete.
        """
        done = self.manifest.completeness
        return done.state == "complete" and not (self.missing or self.dropped or done.failed or self.damaged)

    @property
    def replaced(self) -> int:
        """How many records gave way to a later one of the same point and moment."""
        return self._ask(lambda records: records.replaced)

    @property
    def damaged(self) -> list[Damage]:
        """What was written and cannot be read, as far as that shows without reading every tensor.

        `recover` checks every byte.
        """
        with self._held():
            return self._source.damaged

    def __len__(self) -> int:
        return self._ask(len)

    def refresh(self) -> None:
        """See what has been written since the run was opened."""
        with self._held():
            self._source.refresh()

    @property
    def floors(self) -> Floors:
        """What the reference measured for others to be judged by; empty where nothing was. Raises Damaged."""
        if self._floors is None:
            has_a_folder = self.layout == "layerscope" and self.address != "memory"
            found = read_floors(folder(self.path), self.manifest.started) if has_a_folder else None
            self._floors = found or Floors()
        return self._floors

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
        return self._entries(self._ask(lambda records: records.find(texts, when)))

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
        return self._tensor(self._one(name, _when(epoch, step, batch, call, rank)), rows)

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

    def summaries(
        self,
        name: str | Point | None = None,
        *,
        epoch: int | None = None,
        step: int | None = None,
        batch: int | None = None,
        call: int | None = None,
        rank: int | None = None,
    ) -> RecordTable:
        """Return the statistics of records as rows, of all or of those that are chosen as in `records`.

        They are computed from the tensor where none were stored. A record that cannot be read has no statistics, and
        the reason in a column `damaged`, which is there only when there is such a record.
        """
        texts = None if name is None else self._named(name)
        when = _when(epoch, step, batch, call, rank)
        with self._held():
            records = self._source.records()
            return table_of(self._source, records, records.find(texts, when), self._summary)

    # To look at: the page of a run is built above the store, on first use -----

    def to_html(self, path: str | os.PathLike[str]) -> None:
        """Write the report to look at: one file, which needs nothing else."""
        html.save(_pages().page(self, self.address), path)

    def _repr_html_(self) -> str:
        return html.fragment(_pages().summary(self))

    def plot(self, statistic: str = "rms", *patterns: str, **when: int) -> Any:
        """Draw a statistic over depth, at the latest moment or the one named, as a matplotlib figure.

        Raises MissingExtra without matplotlib.
        """
        from layerscope.report.plots import figure

        return figure(*_pages().pictures(self, statistic, patterns=patterns, given=when))

    # How it is asked ----------------------------------------------------------------------------

    def _ask(self, question: Callable[[Records], T]) -> T:
        with self._held():
            return question(self._source.records())

    @contextlib.contextmanager
    def _held(self) -> Iterator[None]:
        if os.getpid() != self._pid:  # a lock may have been held when the process forked
            self._pid, self._lock = os.getpid(), threading.RLock()
        with self._lock:
            yield

    # Finding ------------------------------------------------------------------------------------

    def _one(self, name: str | Point, when: dict[str, int]) -> int:
        records, exact = self._ask(lambda records: records), self._exact(name)
        texts = [] if exact is None else [exact]
        places = records.find(texts, when)
        if not len(places):
            texts = self._named(name)
            places = records.find(texts, when)
        if not len(places):
            there = _few(_moments(records, records.find(texts)))
            raise NoSuchPoint(
                f"{_told(name)} was not recorded at {_told_when(when)}; it was at {there}{self._lost(texts)}"
            )
        found = list(dict.fromkeys(records.text(at) for at in places))
        if len(found) > 1:
            raise Ambiguous(
                f"{_told(name)} is {len(found)} tensors in {self.address}: {_few([_short(t) for t in found])}; name one"
            )
        if len(places) > 1:
            moments = [records.moment(int(at)) for at in places[: _LISTED + 1]]
            every = [records.moment(int(at)) for at in places] if len(places) < 10_000 else moments
            differ = [n for n in WHEN if len({getattr(moment, n) for moment in every}) > 1]
            raise Ambiguous(
                f"{_told(name)} was recorded at {len(places)} moments: {_few(_moments(records, places))}; "
                f"choose one with {', '.join(f'{n}=' for n in differ)}"
            )
        return int(places[0])

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
        texts = self._places.get((point.place, point.side), [])
        if str(point) in texts:
            return [str(point)]
        return [text for text in texts if parsed(text).leaf[: len(point.leaf)] == point.leaf]

    @property
    def _places(self) -> dict[tuple[str, str], list[str]]:
        """The recorded points by where they are, without their leaves."""
        texts = self._ask(lambda records: records.points)
        if self._by_place[0] is not texts:
            found: dict[tuple[str, str], list[str]] = {}
            for text in texts:
                point = parsed(text)
                found.setdefault((point.place, point.side), []).append(text)
            self._by_place = texts, found
        return self._by_place[1]

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
        texts = self._ask(lambda records: records.points)
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

    def _tensor(self, at: int, rows: slice | None = None) -> torch.Tensor:
        records = self._ask(lambda records: records)
        dtype, shape, _ = next(self._source.kept(np.array([at])))
        if dtype is None:
            raise NoSuchPoint(
                f"{records.text(at)!r} at {records.moment(at)} has a summary and no tensor in {self.address}; "
                "record with keep='tensor' or keep='both' to have it"
            )
        return self._source.tensor(at, _range(records.text(at), shape or (), rows))

    def _entries(self, places: Array) -> Iterator[Entry]:
        records = self._source.records()
        points, there = records.point[places].tolist(), records.has_epoch[places].tolist()
        when = zip(*(records.when[name][places].tolist() for name in WHEN), strict=True)
        rows = zip(places.tolist(), points, there, when, self._source.kept(places), strict=True)
        for at, point, has_epoch, (epoch, *others), kept in rows:
            moment = _moment(epoch if has_epoch else None, *others)
            yield Entry(parsed(records.names[point]), moment, *kept, self, at)

    def _summary(self, at: int) -> Summary:
        stored = self._source.summary(at)
        if stored is not None:
            return stored
        if next(self._source.kept(np.array([at])))[0] is None:
            records = self._ask(lambda records: records)
            raise NoSuchPoint(
                f"{records.text(at)} at {records.moment(at)} has neither summary nor tensor in {self.address}"
            )
        from layerscope.stats import summarize

        return summarize(self._source.tensor(at, None))


def _reopened(address: str, mode: str | None = None) -> Run:
    from layerscope.store.opening import open_run

    return open_run(address, mode=mode)


def _pages() -> Any:
    return import_module("layerscope.pages.run")


def _when(epoch: int | None, step: int | None, batch: int | None, call: int | None, rank: int | None) -> dict[str, int]:
    values = zip(WHEN, (epoch, step, batch, call, rank), strict=True)
    return {name: int(value) for name, value in values if value is not None}


def _range(text: str, shape: Sequence[int], rows: slice | None) -> range | None:
    if rows is None:
        return None
    if not shape:
        raise ValueError(f"{text} is a single number and has no rows")
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


def _moments(records: Records, places: Array) -> list[str]:
    return list(dict.fromkeys(str(records.moment(int(at))) for at in places))


def _few(texts: Sequence[str]) -> str:
    more = len(texts) - _LISTED
    return ", ".join(texts[:_LISTED]) + (f" and {more} more" if more > 0 else "")
