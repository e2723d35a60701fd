"""Which records a run has, as a table that answers quickly: a cache in SQLite, never the only copy.

    index = Index(cached(folder))          # a file in the cache folder, or None: in memory
    index.catch_up(folder)                 # reads what the journals have gained since last time
    index.find(["blocks.3:output"], {"step": 3})

It lives outside the run, because readers never write there, and is thrown away when it does not fit the journals. Each
row carries a checksum of its own, so that a rotten cache is noticed and made anew, and never believed.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import sqlite3
import tempfile
import time
import zlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, final

from layerscope.points import Moment
from layerscope.store.address import Folder, is_journal, journal_order, rank_of
from layerscope.store.checksum import crc32c, text
from layerscope.store.journal import Record, parsed, walk
from layerscope.store.segment import Placed

__all__ = ["WHEN", "Index", "Row", "cache_folder", "cached", "journals"]

WHEN = ("epoch", "step", "batch", "call", "rank")

_SCHEMA = 1
_TABLES = """
CREATE TABLE journals (name TEXT PRIMARY KEY, consumed INTEGER, ends TEXT, records INTEGER);
CREATE TABLE points (
    id INTEGER PRIMARY KEY, text TEXT UNIQUE, place TEXT, side TEXT, folder INTEGER, first INTEGER
);
CREATE TABLE records (
    point INTEGER, epoch INTEGER, step INTEGER, batch INTEGER, call INTEGER, rank INTEGER,
    folder INTEGER, record INTEGER, dtype TEXT, shape TEXT,
    segment INTEGER, offset INTEGER, length INTEGER, crc32c INTEGER,
    journal TEXT, at INTEGER, size INTEGER, sum INTEGER
);
CREATE UNIQUE INDEX once ON records (point, ifnull(epoch, 'none'), step, batch, call, rank);
CREATE INDEX places ON points (place, side);
CREATE TABLE damage (journal TEXT, at INTEGER, size INTEGER, reason TEXT);
"""

# A journal is recognised by its first and last bytes; the first hold the random name of its run.
_ENDS = 4096

# Below this many bytes of journal, reading them again is quicker than opening a file.
_WORTH_KEEPING = 1 << 20

_FORGOTTEN = 30 * 24 * 3600.0


class Row(NamedTuple):
    """One record as the index has it: its facts, the number of its rank's folder, and where its line is."""

    facts: Record
    folder: int
    journal: str = ""
    at: int = 0
    size: int = 0


def journals(files: Folder) -> list[str]:
    """Return the journals of every rank, each with its folder, in the order they were written."""
    return [
        f"{rank}/{name}"
        for rank in files.names()
        if rank_of(rank) is not None
        for name in sorted(filter(is_journal, files.names(rank)), key=journal_order)
    ]


@final
class Index:
    """A table of records, in a file or (path=None) in memory. Not for two threads at once."""

    def __init__(self, path: Path | None = None) -> None:
        """Open or make the file; raises sqlite3.Error when it is no index, or there is no room for one."""
        self.path = path
        self._db = sqlite3.connect(path or ":memory:", timeout=5.0, isolation_level=None, check_same_thread=False)
        try:
            self._db.execute("PRAGMA synchronous=OFF")  # a cache: a power cut may cost it
            if self._value("PRAGMA user_version") != _SCHEMA:
                self._empty()
        except sqlite3.Error:
            self.close()
            raise

    def close(self) -> None:
        """Close the file."""
        self._db.close()

    # Filling ------------------------------------------------------------------------------------

    def catch_up(self, files: Folder) -> None:
        """Read what the journals have gained; everything anew when they are not the ones that were read before."""
        names = journals(files)
        with self._transaction():
            known = {row[0]: row[1:] for row in self._db.execute("SELECT name, consumed, ends FROM journals")}
            fits = all(name in names and _ends(files, name, seen) == ends for name, (seen, ends) in known.items())
            if not fits:
                self._clear()
                known = {}
            for name in names:
                consumed = known.get(name, (0, ""))[0]
                if files.size(name) > consumed:
                    self._consume(files, name, consumed)

    def add(self, rows: Iterable[Row]) -> None:
        """Add records; a later one of the same point and moment takes the place of the earlier."""
        with self._transaction():
            self._insert(rows)

    def _consume(self, files: Folder, name: str, at: int) -> None:
        folder = rank_of(name.split("/")[0]) or 0
        count, end = 0, at
        damage: list[tuple[Any, ...]] = []

        def rows() -> Iterator[Row]:
            nonlocal count, end
            for line in walk(files, name, at=at):
                end = line.at + line.size
                if line.record is not None:
                    count += 1
                    yield Row(line.record, folder, name, line.at, line.size)
                elif line.damage is not None:
                    damage.append((name, line.at, line.size, line.damage))

        self._insert(rows())
        self._db.executemany("INSERT INTO damage VALUES (?, ?, ?, ?)", damage)
        before = self._value("SELECT ifnull(sum(records), 0) FROM journals WHERE name = ?", name)
        self._db.execute(
            "INSERT OR REPLACE INTO journals VALUES (?, ?, ?, ?)", (name, end, _ends(files, name, end), before + count)
        )

    def _insert(self, rows: Iterable[Row]) -> None:
        ids: dict[str, int] = dict(self._db.execute("SELECT text, id FROM points"))
        firsts: dict[str, tuple[int, int]] = {}

        def values() -> Iterator[tuple[Any, ...]]:
            for row in rows:
                facts = row.facts
                point = ids.get(facts.point)
                if point is None:
                    point = ids[facts.point] = len(ids)
                firsts.setdefault(facts.point, (row.folder, facts.record))
                placed = facts.placed or (None, None, None, None)
                shape = None if facts.shape is None else ",".join(map(str, facts.shape))
                when = (facts.epoch, facts.step, facts.batch, facts.call, facts.rank)
                where = (row.journal, row.at, row.size)
                told = (facts.record, facts.point, *when, facts.dtype, shape, *placed, row.folder, *where)
                yield (point, *when, row.folder, facts.record, facts.dtype, shape, *placed, *where, _sum(told))

        self._db.executemany(f"INSERT OR REPLACE INTO records VALUES ({','.join('?' * 18)})", values())
        seen = [(ids[name], name, parsed(name).place, parsed(name).side, *first) for name, first in firsts.items()]
        self._db.executemany(
            "INSERT INTO points VALUES (?, ?, ?, ?, ?, ?) ON CONFLICT (text) DO UPDATE"
            " SET folder = excluded.folder, first = excluded.first"
            " WHERE (excluded.folder, excluded.first) < (points.folder, points.first)",
            seen,
        )

    # Asking -------------------------------------------------------------------------------------

    @property
    def points(self) -> list[str]:
        """The points that have records, as text, in the order they were first recorded."""
        return [row[0] for row in self._db.execute("SELECT text FROM points ORDER BY folder, first, id")]

    @property
    def moments(self) -> list[Moment]:
        """The moments that have records, in order."""
        columns = ", ".join(WHEN)
        return [Moment(*row) for row in self._db.execute(f"SELECT DISTINCT {columns} FROM records ORDER BY {columns}")]

    @property
    def damage(self) -> list[tuple[str, int, str]]:
        """The journal lines that could not be read: journal, byte, reason."""
        return list(self._db.execute("SELECT journal, at, reason FROM damage ORDER BY journal, at"))

    @property
    def written(self) -> int:
        """How many records the journals hold, those that gave way to later ones among them."""
        return int(self._value("SELECT ifnull(sum(records), 0) FROM journals"))

    @property
    def dtypes(self) -> list[str]:
        """The dtypes of the tensors that were kept."""
        return [row[0] for row in self._db.execute("SELECT DISTINCT dtype FROM records WHERE dtype IS NOT NULL")]

    @property
    def segments(self) -> list[tuple[int, int, int]]:
        """The segments that hold tensors: the number of the rank's folder, of the segment, and its least size."""
        query = (
            "SELECT folder, segment, max(offset + length) FROM records WHERE segment IS NOT NULL"
            " GROUP BY folder, segment ORDER BY folder, segment"
        )
        return [(folder, segment, int(end)) for folder, segment, end in self._db.execute(query)]

    @property
    def consumed(self) -> dict[str, int]:
        """How far each journal has been read."""
        return dict(self._db.execute("SELECT name, consumed FROM journals"))

    @property
    def replaced(self) -> int:
        """How many records gave way to a later one of the same point and moment."""
        return max(0, self.written - len(self))

    def __len__(self) -> int:
        return int(self._value("SELECT count(*) FROM records"))

    def at_place(self, place: str, side: str) -> list[str]:
        """Return the points of one place (text form) and side, whatever their leaf."""
        query = "SELECT text FROM points WHERE place = ? AND side = ? ORDER BY folder, first, id"
        return [row[0] for row in self._db.execute(query, (place, side))]

    def find(self, points: Sequence[str] | None = None, when: Mapping[str, int] | None = None) -> list[Row]:
        """Return the records of some points (all: None) at the moments that agree with `when`, in recorded order."""
        conditions, values = ["1"], []
        for name, value in (when or {}).items():
            if not -(1 << 63) <= value < 1 << 63:
                return []
            conditions.append(f"{WHEN[WHEN.index(name)]} = ?")
            values.append(value)
        query = (
            "SELECT record, text, epoch, step, batch, call, rank, dtype, shape, segment, offset, length, crc32c,"
            " records.folder, journal, at, size, sum FROM records JOIN points ON points.id = records.point"
            f" WHERE {' AND '.join(conditions)}"
        )
        if points is None:
            return list(map(_row, self._db.execute(query + " ORDER BY records.folder, record", values)))
        rows = [_row(row) for name in points for row in self._db.execute(query + " AND text = ?", [*values, name])]
        return sorted(rows, key=lambda row: (row.folder, row.facts.record))

    # The file -----------------------------------------------------------------------------------

    @contextlib.contextmanager
    def _transaction(self) -> Iterator[None]:
        self._db.execute("BEGIN IMMEDIATE")
        try:
            yield
        except BaseException:
            self._db.execute("ROLLBACK")
            raise
        self._db.execute("COMMIT")

    def _empty(self) -> None:
        """Make the tables, in place of whatever another version kept here."""
        with self._transaction():
            old = "SELECT name FROM sqlite_master WHERE type = 'table' AND name NOT LIKE 'sqlite%'"
            for (table,) in self._db.execute(old).fetchall():
                self._db.execute('DROP TABLE "{}"'.format(table.replace('"', '""')))
            for statement in filter(str.strip, _TABLES.split(";")):
                self._db.execute(statement)
            self._db.execute(f"PRAGMA user_version = {_SCHEMA}")

    def _clear(self) -> None:
        for table in ("journals", "points", "records", "damage"):
            self._db.execute(f"DELETE FROM {table}")

    def _value(self, query: str, *values: object) -> Any:
        return self._db.execute(query, values).fetchone()[0]


def _sum(told: tuple[Any, ...]) -> int:
    return zlib.crc32(repr(told).encode("ascii", "backslashreplace"))


def _row(values: tuple[Any, ...]) -> Row:
    *told, checksum = values
    if _sum(tuple(told)) != checksum:
        raise sqlite3.DatabaseError("a row of the index is not what was put there")
    record, point, epoch, step, batch, call, rank, dtype, shape, *placed, folder, journal, at, size = told
    facts = Record(
        record,
        point,
        epoch,
        step,
        batch,
        call,
        rank,
        dtype,
        None if shape is None else tuple(map(int, filter(None, shape.split(",")))),
        None if placed[0] is None else Placed(*placed),
    )
    return Row(facts, folder, journal, at, size)


def _ends(files: Folder, name: str, consumed: int) -> str:
    """Return what recognises the first `consumed` bytes of a journal, without reading them all.

    The later parts of a remote journal go with the first: they are put once and never changed.
    """
    if journal_order(name.split("/")[1]) > 0:
        return f"{consumed}"
    head = files.read(name, length=min(_ENDS, consumed))
    tail = files.read(name, offset=max(0, consumed - _ENDS), length=min(_ENDS, consumed))
    return f"{consumed}-{text(crc32c(head))}-{text(crc32c(tail))}"


# Where the file is ------------------------------------------------------------------------------


def cached(files: Folder) -> Path | None:
    """Return where the index of a run is kept, None when it is not worth a file or there is no place for one."""
    if sum(files.size(name) for name in journals(files)) < _WORTH_KEEPING:
        return None
    place = cache_folder()
    if place is None:
        return None
    return place / (hashlib.sha256(os.fsencode(files.address)).hexdigest()[:32] + ".sqlite")


def cache_folder() -> Path | None:
    """Return a folder of this user's for what can be made anew, None when there is no place for one."""
    for place in _places():
        try:
            place.mkdir(mode=0o700, parents=True, exist_ok=True)
            # In a shared temporary folder somebody else could have put files of his own making there.
            if os.access(place, os.W_OK) and place.stat().st_uid == os.getuid():
                _forget_old(place)
                return place
        except OSError:
            continue
    return None


def _places() -> Iterator[Path]:
    own = os.environ.get("LAYERSCOPE_CACHE")
    if own:
        yield Path(own)
        return
    with contextlib.suppress(RuntimeError):
        yield Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "layerscope"
    yield Path(tempfile.gettempdir()) / f"layerscope-{os.getuid()}"


def _forget_old(place: Path) -> None:
    limit = time.time() - _FORGOTTEN
    for path in (*place.glob("*.sqlite"), *place.glob("*.compare")):
        with contextlib.suppress(OSError):
            if path.stat().st_mtime < limit:
                path.unlink()
