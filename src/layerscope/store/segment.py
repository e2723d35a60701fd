"""A segment: one safetensors file with a run's tensors and, column by column, the table of its records.

    partial = Partial.create(folder, 0)                  # segment-00000.partial
    offset = partial.write([data])                       # bytes first; a frame in the journal vouches for them
    seal(folder, 0, Sealing(...))                        # -> segment-00000.safetensors, and the journal goes
    sealed = Sealed(files, "rank-00000/segment-00000.safetensors")
    sealed.array("mean"); sealed.columns().row(3)

    header (64 KiB, or what it takes where there are no tensors)  tensors  padding  columns  footer

The footer repeats what the header says, with a crc32c for each column and one for the header; constants and lists stand
in it as well, so that no byte of the file is one that every record depends on. Nothing is written through mmap: there
a full disk is a SIGBUS.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import struct
import sys
import zlib
from collections.abc import Callable, Iterator, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple, final

import numpy as np

from layerscope.errors import Damaged, LayerscopeError
from layerscope.store import strictjson
from layerscope.store.address import (
    JOURNAL,
    PARTIAL,
    SEALED,
    WRITING,
    Folder,
    LocalFolder,
    open_regular,
    pread,
    segment,
    sync_directory,
)
from layerscope.store.checksum import Bytes, crc32c
from layerscope.store.columns import LISTS, RAGGED, Array, Columns, TableRow, check_point, pack
from layerscope.store.dtypes import nbytes, stored
from layerscope.store.manifest import FORMAT, VERSION, Dropped, check_version

# The header's length, the header, and spaces; the tensors' bytes begin here. 512 tensors take about 45 KiB of it.
ROOM = 64 << 10
# What is kept of that for the columns.
TABLE_ROOM = 8 << 10
HEADER_ROOM = ROOM - 8 - TABLE_ROOM
_ALIGNED = 64
# What is handed to the system at a time, so that a slow disk shows progress.
_PIECE = 4 << 20
_MOST_VECTORS = 1024

_TRAILER = struct.Struct("<QII8s")
_MAGIC = b"LSCOPE2\n"
_TAIL = 64 << 10
# Elsewhere a request costs more than what it brings: a longer tail, and columns together with what lies between them.
_TAIL_ELSEWHERE = 256 << 10
_GAP = 256 << 10
_LARGEST_FOOTER = 256 << 20
# The footer's `needs` names what a reader must know to read a segment rightly; of that there is nothing yet.
_KNOWN_NEEDS: frozenset[str] = frozenset()

_CODES = {"u1": "U8", "u2": "U16", "u4": "U32", "u8": "U64", "i1": "I8", "i2": "I16", "i4": "I32", "i8": "I64"}
_CODES |= {"f4": "F32", "f8": "F64"}
_KINDS = {code: kind for kind, code in _CODES.items()}


# Writing ----------------------------------------------------------------------------------------


@final
class Partial:
    """The tensors of a segment that is being written."""

    def __init__(self, fd: int, path: Path) -> None:
        self.fd, self.path, self.end = fd, path, ROOM
        self.room = HEADER_ROOM

    @classmethod
    def create(cls, folder: Path, number: int) -> Partial:
        """Make `segment-N.partial` with its header's room; leaves nothing behind when the disk has no room for it."""
        path = folder / (segment(number) + PARTIAL)
        fd = open_regular(path, WRITING | os.O_CREAT | os.O_EXCL)
        try:
            # Zeros: a stock reader that opens an unsealed segment finds a header of length 0 and refuses it.
            _pwrite(fd, bytes(ROOM), 0)
        except BaseException:
            os.close(fd)
            path.unlink()
            raise
        return cls(fd, path)

    def write(self, buffers: Sequence[Bytes], tick: Callable[[], None] = lambda: None) -> int:
        """Write buffers behind what is there, and return where they begin; when that fails nothing of them is kept."""
        begins = at = self.end
        try:
            if len(buffers) == 1:
                for start in range(0, buffers[0].size, _PIECE):
                    _pwrite(self.fd, buffers[0][start : start + _PIECE].data, at + start)
                    tick()
            else:
                for first in range(0, len(buffers), _MOST_VECTORS):
                    some = buffers[first : first + _MOST_VECTORS]
                    size = sum(each.size for each in some)
                    if os.pwritev(self.fd, [each.data for each in some], at) != size:
                        _pwrite(self.fd, b"".join(each.data for each in some), at)
                    at += size
                    tick()
        except BaseException:
            with contextlib.suppress(OSError):
                os.ftruncate(self.fd, begins)
            raise
        self.end = begins + sum(each.size for each in buffers)
        return begins

    def is_at(self, offset: int, data: Bytes) -> bool:
        """Whether the bytes at an offset are these."""
        return pread(self.fd, offset, data.size) == data.data

    def close(self) -> None:
        """Close the file as it is."""
        if self.fd >= 0:
            with contextlib.suppress(OSError):
                os.close(self.fd)
            self.fd = -1


class Sealing(NamedTuple):
    """What a segment is sealed with: its rows, what was lost while it was written, the segments it was merged of."""

    run: bytes
    rank: int
    rows: list[TableRow]
    checks: list[int] | None = None
    losses: Sequence[Dropped] = ()
    needs: Sequence[str] = ()
    # Records whose bytes are known to be damaged: no key of the header leads to those.
    unkeyed: frozenset[int] = frozenset()
    # Where the bytes end that are kept, also those that no row vouches for.
    end: int = 0
    # The segments that this one is merged of.
    merged: Sequence[str] = ()


class Unsynced(OSError):
    """What the disk has of a file is not known: fsync failed, and a second one would say that all is well."""


def entry(record: int, dtype: str, shape: Sequence[int], begin: int, end: int) -> str:
    """Return one tensor's part of the header; its key is the record's number, never a name."""
    how = stored(dtype)
    sides = ",".join(map(str, how.header_shape(shape)))
    return f'"{record:08d}":{{"dtype":"{how.code}","shape":[{sides}],"data_offsets":[{begin},{end}]}}'


def seal(folder: Path, number: int, what: Sealing, fd: int | None = None, *, following: Callable[[], None]) -> int:
    """Seal segment `number` and return its size; raises OSError, and leaves journal and partial as they were.

    `fd` is the open partial, None where no tensor was written. `following` is called before the segment gets its name:
    it makes the next journal, so that there is always one to write losses to. The order is what makes a kill between
    any two steps harmless: the table, the header, fsync, the next journal, the name, fsync of the folder, and only then
    the journal goes.
    """
    stem = segment(number)
    partial, journal = folder / (stem + PARTIAL), folder / (stem + JOURNAL)
    whole = max((row.offset + row.length for row in what.rows if row.has_tensor), default=0)
    whole = max(whole, what.end)
    own = open_regular(partial, WRITING | os.O_CREAT) if fd is None else fd
    try:
        size = _write_table(own, what, end=whole)
        try:
            os.fsync(own)
        except OSError as error:
            raise Unsynced(*error.args) from error
        following()
    except BaseException:
        with contextlib.suppress(OSError):
            _pwrite(own, bytes(8), 0)
            os.ftruncate(own, whole or ROOM)
        if fd is None:
            with contextlib.suppress(OSError):
                partial.unlink()
        raise
    finally:
        if fd is None:
            os.close(own)
    partial.replace(folder / (stem + SEALED))
    if sync_directory(folder):
        with contextlib.suppress(OSError):  # it is sealed; a journal beside it does no harm
            journal.unlink(missing_ok=True)
    return size


def _write_table(fd: int, what: Sealing, *, end: int) -> int:
    """Write padding, columns and footer behind the tensors, then the header; return the file's size."""
    columns = Columns.of(what.rows, what.checks)
    return write_columns(fd, what, columns, tensor_entries(what.rows, what.unkeyed, end=end), end=end)


def write_columns(fd: int, what: Sealing, columns: Columns, entries: list[str], *, end: int, room: int = ROOM) -> int:
    """Write padding, columns and footer behind tensors that end at `end`, 0 for none; return the file's size."""
    arrays = {name: _constant(name, array, columns.rows) for name, array in columns.arrays.items()}
    lists = {name: getattr(columns, name) for name in LISTS} | {"losses": [_listed(loss) for loss in what.losses]}
    arrays |= {name: np.frombuffer(_deflated(values), np.uint8) for name, values in lists.items()}
    start = room if end else 0  # of what data_offsets count from; without tensors that is known only at the end
    at = end - start
    padding = -at % _ALIGNED
    if padding:
        entries.append(_bytes_entry("padding", at, at + padding))
    at += padding
    directory: dict[str, list[Any]] = {}
    parts = [bytes(padding)]
    for name, array in sorted(arrays.items(), key=lambda item: -item[1].itemsize):
        raw = np.ascontiguousarray(array).tobytes()
        directory[name] = [_CODES[array.dtype.str[1:]], list(array.shape), at, at + len(raw), crc32c(raw)]
        entries.append(f'"table.{name}":{{"dtype":"{directory[name][0]}","shape":{_json(list(array.shape))},'
                       f'"data_offsets":[{at},{at + len(raw)}]}}')  # fmt: skip
        parts.append(raw)
        at += len(raw)
    footer = _footer(what, columns, lists, arrays, directory, tensors=end)
    entries.append(_bytes_entry("table.footer", at, at + len(footer) + _TRAILER.size))
    header = _header(entries, what.rank, room=room if end else None)
    footer += _TRAILER.pack(len(footer), crc32c(footer), crc32c(header), _MAGIC)
    if end:
        _pwrite(fd, b"".join([*parts, footer]), end)
        _pwrite(fd, header, 0)
    else:
        _pwrite(fd, b"".join([header, *parts, footer]), 0)
    size = len(header) + at + len(footer)
    os.ftruncate(fd, size)
    return size


def tensor_entries(
    rows: Sequence[TableRow], unkeyed: frozenset[int] = frozenset(), *, end: int, begins: int = ROOM
) -> list[str]:
    """Return the header's entries for the tensors, and for bytes that no row vouches for: the format has no holes."""
    entries: list[str] = []
    at = begins
    owners = {row.offset: row for row in reversed(rows) if row.has_tensor and row.bytes_of == row.record and row.length}
    empty = [row for row in rows if row.has_tensor and row.bytes_of == row.record and not row.length]
    for offset, row in sorted(owners.items()):
        if offset < at:
            raise ValueError(f"the bytes of {row.point} at {row.moment} overlap those of another record")
        if row.record in unkeyed:
            continue
        if offset > at:
            entries.append(_bytes_entry(f"gap-{at}", at - begins, offset - begins))
        at = offset + row.length
        entries.append(entry(row.record, row.dtype, row.shape, offset - begins, at - begins))
    if end > at:
        entries.append(_bytes_entry(f"gap-{at}", at - begins, end - begins))
        at = end
    return entries + [entry(row.record, row.dtype, row.shape, at - begins, at - begins) for row in empty]


def _footer(
    what: Sealing,
    columns: Columns,
    lists: dict[str, Any],
    arrays: dict[str, Array],
    directory: dict[str, list[Any]],
    *,
    tensors: int,
) -> bytes:
    steps, ranks = columns.arrays["step"], columns.arrays["rank"]
    about = {
        "format": FORMAT,
        "version": VERSION,
        "run": what.run.hex(),
        "rank": what.rank,
        "needs": list(what.needs),
        "records": columns.rows,
        "unique": _is_unique(columns),
        "steps": [int(steps.min()), int(steps.max())] if columns.rows else None,
        "ranks": np.unique(ranks).tolist(),
        "tensors": tensors,
        "columns": directory,
        "constants": strictjson.encoded(
            {n: a.tolist()[0] for n, a in arrays.items() if _is_per_row(n) and len(a) == 1 != columns.rows}
        ),
        **lists,
        **({"merged": list(what.merged)} if what.merged else {}),
    }
    return _deflated(about)


def _header(entries: Sequence[str], rank: int, *, room: int | None) -> bytes:
    about = json.dumps({"format": FORMAT, "version": str(VERSION), "rank": str(rank)}, separators=(",", ":"))
    text = "{" + ",".join([f'"__metadata__":{about}', *entries]) + "}"
    if room is None:
        room = 8 + len(text) + -(8 + len(text)) % _ALIGNED
    if len(text) > room - 8:
        raise ValueError(f"a header of {len(text)} bytes does not fit the {room - 8} reserved for it")
    return (room - 8).to_bytes(8, "little") + text.encode("ascii").ljust(room - 8)


def _bytes_entry(name: str, begin: int, end: int) -> str:
    return f'"{name}":{{"dtype":"U8","shape":[{end - begin}],"data_offsets":[{begin},{end}]}}'


def _is_per_row(name: str) -> bool:
    return name not in RAGGED and name not in LISTS and name != "losses"


def _constant(name: str, array: Array, rows: int) -> Array:
    """Return a column with one number where all are the same."""
    if not _is_per_row(name) or rows < 2 or name == "check":
        return array
    raw = np.ascontiguousarray(array).view(np.uint8).reshape(rows, -1)
    return array[:1] if (raw == raw[0]).all() else array


def _is_unique(columns: Columns) -> bool:
    """Whether no two rows have the same point and moment."""
    a = columns.arrays
    names = ("point", "epoch", "step", "batch", "call", "rank")
    keys = np.stack([a[name].astype(np.int64) for name in names] + [a["has"].astype(np.int64) & 1], axis=1)
    return len(np.unique(keys, axis=0)) == columns.rows


def _listed(loss: Dropped) -> list[Any]:
    return [loss.point, loss.reason, loss.count, loss.first]


def _json(value: object) -> str:
    return json.dumps(value, separators=(",", ":"))


def _deflated(value: object) -> bytes:
    return zlib.compress(_json(value).encode(), 1)


def _inflated(data: bytes) -> Any:
    """Read `_deflated` back; raises ValueError or zlib.error for what it never gave."""
    inflate = zlib.decompressobj()
    value = json.loads(inflate.decompress(data, _LARGEST_FOOTER))
    if not inflate.eof:
        raise ValueError("it is longer than any that was written")
    return value


def _pwrite(fd: int, data: bytes | memoryview, offset: int) -> None:
    view = memoryview(data)
    while view.nbytes:
        written = os.pwrite(fd, view[:_PIECE], offset)
        view, offset = view[written:], offset + written


# Reading ----------------------------------------------------------------------------------------


@final
class Sealed(Columns):
    """A sealed segment, opened by its footer; columns are read, and checked, when they are first asked for.

    `damage` grows as it is found: sentences, with the row they cost or None. `bad` are the rows that are not what was
    written; readers leave them out.
    """

    def __init__(self, files: Folder, name: str) -> None:
        """Read the footer, or what the header says where the footer is damaged; raises Damaged where neither reads."""
        self._files, self.name = files, name
        self.size = files.size(name)
        self.damage: list[tuple[str, int | None]] = []
        super().__init__(0, {}, [], [], [])
        self._suspect = self._looked = False
        tail = _TAIL if isinstance(files, LocalFolder) else _TAIL_ELSEWHERE
        self._trailer = b""
        begins = max(0, self.size - tail)
        self._tail = begins, bytes(files.read(name, offset=begins, length=tail))
        about = self._read_footer()
        self._about = about if about is not None else self._without_footer()
        if self._about.get("format") != FORMAT:
            raise Damaged(f"{name} is not a segment of a run")
        check_version(self._about.get("version"))
        try:
            self._take(self._about)
        except (KeyError, TypeError, ValueError) as error:
            raise Damaged(f"{name} has a footer that does not say what it must ({error})") from None
        if about is None:
            self._check_rows()

    def _take(self, about: dict[str, Any]) -> None:
        """Take what the footer says; a number of records that the file cannot hold is refused."""
        unknown = set(map(str, about["needs"])) - _KNOWN_NEEDS
        if unknown:
            needs = ", ".join(sorted(unknown))
            raise Damaged(f"{self.name} needs {needs}, which this layerscope does not know: upgrade it")
        self.rows, self.rank, self.run = int(about["records"]), int(about["rank"]), str(about["run"])
        if about["columns"]["check"][1] != [self.rows] or not 0 <= 4 * self.rows <= self.size:
            raise ValueError(f"{self.rows} records")
        self.points, self.dtypes = [sys.intern(text) for text in about.pop("points")], about["dtypes"]
        self.shapes = [tuple(map(int, shape)) for shape in about["shapes"]]
        self.merged = [str(stem) for stem in about.get("merged", [])]
        self.unique, self.ranks = bool(about["unique"]), [int(rank) for rank in about["ranks"]]
        first_last = about["steps"]
        self.steps = None if first_last is None else (int(first_last[0]), int(first_last[1]))
        self.losses = [Dropped(point, count, reason, first) for point, reason, count, first in about["losses"]]
        for text in self.points:
            check_point(text)
        if not all(isinstance(dtype, str) for dtype in self.dtypes):
            raise TypeError(f"dtypes {self.dtypes}")

    @property
    def _end(self) -> bytes:
        return self._tail[1][-_TRAILER.size :]

    @property
    def tensors(self) -> tuple[int, int]:
        """Where the bytes of its tensors lie."""
        return int(self._begin), int(self._about["tensors"])

    def array(self, name: str) -> Array:
        """Return one column, a number for each row; those of `bad` rows mean nothing."""
        return self.load([name]).arrays[name]

    def load(self, names: Sequence[str]) -> Columns:
        """Read several columns at a time, those that were not read before."""
        wanted = [name for name in names if name not in self.arrays]
        if not wanted:
            return self
        try:
            with self._reading(wanted) as read:
                for name in wanted:
                    self.arrays[name] = self._column(name, read)
            if isinstance(self._files, LocalFolder):  # a run may have a thousand segments
                self._tail = self.size - _TRAILER.size, self._end
        except FileNotFoundError:
            if not isinstance(self._files, LocalFolder):  # it may have been merged
                raise
            raise Damaged(f"{self.name} is not there any more") from None
        if self._suspect:
            self._check_rows()
        return self

    def columns(self) -> Columns:
        """Return these with all columns at hand."""
        return self.load([name for name in self._about["columns"] if name not in (*LISTS, "losses")])

    def look_through(self) -> None:
        """Read every column, and hold the header against the footer, so that `damage` has all there is but tensors.

        Nothing of it is kept that is whole, and nothing is looked at twice.
        """
        if self._looked:
            return
        self._looked = True
        wanted = [name for name in self._about["columns"] if name not in self.arrays]
        try:
            with self._reading(wanted) as read:
                for name in wanted:
                    known = len(self.damage)
                    array = self._column(name, read)
                    if len(self.damage) > known:
                        self.arrays[name] = array
            if self._suspect:
                self._check_rows()
            if self._trailer:
                self._check_header(self._trailer)
        except Damaged as error:
            self.damage.append((str(error), None))

    # The parts ----------------------------------------------------------------------------------

    @contextlib.contextmanager
    def _reading(self, names: Sequence[str] = ()) -> Iterator[Callable[[int, int], bytes | bytearray]]:
        """Yield what reads a stretch; what the tail has is not read again, and a local file is opened once."""

        def from_tail(read: Callable[[int, int], bytes | bytearray]) -> Callable[[int, int], bytes | bytearray]:
            def stretch(offset: int, length: int) -> bytes | bytearray:
                begins, tail = self._tail  # another thread may let it go
                return tail[offset - begins :][:length] if offset >= begins else read(offset, length)

            return stretch

        if isinstance(self._files, LocalFolder):
            with self._files.opened(self.name) as fd:
                yield from_tail(lambda offset, length: pread(fd, offset, length))
        else:
            yield from_tail(self._together(names))

    def _together(self, names: Sequence[str]) -> Callable[[int, int], bytes | bytearray]:
        """Return what fetches columns that lie close to each other with one request."""
        columns = [self._about["columns"].get(name, ()) for name in names]
        places = [tuple(column[2:4]) for column in columns]
        whole = [p for p in places if len(p) == 2 and all(type(n) is int for n in p) and 0 <= p[0] <= p[1]]
        stretches: list[list[int]] = []
        for first, last in sorted((self._begin + first, self._begin + last) for first, last in whole):
            if first >= self._tail[0]:
                break
            if stretches and first - stretches[-1][1] <= _GAP:
                stretches[-1][1] = max(last, stretches[-1][1])
            else:
                stretches.append([first, last])
        fetched: dict[int, bytearray] = {}

        def stretch(offset: int, length: int) -> bytearray:
            for first, last in stretches:
                if first <= offset and offset + length <= last:
                    if first not in fetched:
                        fetched[first] = self._files.read(self.name, offset=first, length=last - first)
                    return fetched[first][offset - first : offset - first + length]
            return self._files.read(self.name, offset=offset, length=length)

        return stretch

    def _read_footer(self) -> dict[str, Any] | None:
        try:
            length, check, _, magic = _TRAILER.unpack(self._end)
            end = self.size - _TRAILER.size
            if magic != _MAGIC or not 0 < length <= min(end, _LARGEST_FOOTER):
                raise ValueError("its end is not one that was written")
            if length + _TRAILER.size > len(self._tail[1]):
                self._tail = end - length, bytes(self._files.read(self.name, offset=end - length))
            begins, tail = self._tail
            raw = tail[end - length - begins :][:length]
            if crc32c(raw) != check:
                raise ValueError("its checksum differs")
            about = _inflated(raw)
            if not isinstance(about, dict):
                raise ValueError("it is not what a footer holds")
            about["constants"] = strictjson.decoded(about["constants"])
            self._trailer = self._end
            return about
        except (ValueError, struct.error, zlib.error, KeyError, RecursionError) as error:
            self.damage.append((f"its footer cannot be read ({error}); each record is checked by itself", None))
            return None

    def _header(self) -> tuple[int, dict[str, Any]]:
        """Return where the data begin, and what the header says."""
        head = self._files.read(self.name, length=ROOM)
        length = int.from_bytes(head[:8], "little")
        if not 2 <= length <= self.size - 8:
            raise Damaged(f"{self.name} has no header")
        if len(head) < 8 + length:
            head += self._files.read(self.name, offset=len(head), length=8 + length - len(head))
        try:
            said = json.loads(head[8 : 8 + length])
        except (ValueError, RecursionError) as error:
            raise Damaged(f"{self.name} has a header that does not read ({error})") from None
        if not isinstance(said, dict):
            raise Damaged(f"{self.name} has a header that is none")
        return 8 + length, said

    @cached_property
    def _begin(self) -> int:
        """Where the data begin: what is left of the file before columns and footer."""
        footer_end = max((column[3] for column in self._about["columns"].values()), default=0)
        length = _TRAILER.unpack(self._end)[0] + _TRAILER.size
        return int(self.size - length - footer_end)

    def _without_footer(self) -> dict[str, Any]:
        """Put together from the header what the footer would have said; nothing of it is checked yet."""
        begin, said = self._header()
        self.__dict__["_begin"] = begin
        columns: dict[str, list[Any]] = {}
        try:
            for name, column in said.items():
                if name.startswith("table.") and name != "table.footer":
                    first, last = column["data_offsets"]
                    if not 0 <= first <= last:
                        raise ValueError(f"bytes {first} to {last}")
                    columns[name.removeprefix("table.")] = [column["dtype"], column["shape"], first, last, None]
            lists = {name: _inflated(self._raw(columns[name], begin)) for name in (*LISTS, "losses")}
            rows = columns["check"][1][0]
            rank = int(said["__metadata__"]["rank"])
        except (KeyError, TypeError, ValueError, IndexError, RecursionError, zlib.error) as error:
            raise Damaged(f"{self.name} has neither a footer nor a header that reads ({error})") from None
        nothing = {"needs": [], "run": "", "unique": False, "steps": None, "ranks": [], "constants": {}}
        return (
            {"format": FORMAT, "version": VERSION, "rank": rank, "records": rows, "columns": columns} | nothing | lists
        )

    def _raw(self, column: Sequence[Any], begin: int) -> bytes:
        return bytes(self._files.read(self.name, offset=begin + column[2], length=column[3] - column[2]))

    def _column(self, name: str, read: Callable[[int, int], bytes | bytearray]) -> Array:
        """Return a column as it was stored, with a number for each row; a wrong one makes every row suspect."""
        try:
            code, shape, first, last, check = self._about["columns"][name]
            kind = np.dtype("<" + _KINDS[code])
            fits = last - first == kind.itemsize * math.prod(map(int, shape)) and min(shape) >= 0
            lies = self._begin >= 8 and 0 <= first <= last <= self.size - self._begin
        except (KeyError, TypeError, ValueError) as error:
            raise Damaged(f"{self.name}: there is no column {name} that reads ({error})") from None
        if not (fits and lies):
            raise Damaged(f"{self.name}: the column {name} does not lie where it is said to")
        raw = read(self._begin + first, last - first)
        if len(raw) != last - first:
            raise Damaged(f"{self.name} ends before its column {name} does")
        array = np.frombuffer(raw, kind).reshape(shape)
        if check is not None and crc32c(raw) != check:
            if name in self._about["constants"]:
                self.damage.append((f"its column {name} is damaged; the footer has the number as well", None))
                array = np.array([self._about["constants"][name]], kind).reshape(shape)
            else:
                self.damage.append((f"its column {name} is damaged", None))
                self._suspect |= name not in (*LISTS, "losses", "check")
        if _is_per_row(name) and len(array) == 1 != self.rows:
            array = np.broadcast_to(array, (self.rows, *array.shape[1:]))
        if _is_per_row(name) and len(array) != self.rows:
            raise Damaged(f"{self.name}: the column {name} has {len(array)} numbers for {self.rows} records")
        return array

    def _check_rows(self) -> None:
        """Find the rows that are not what was written, by the crc32c that each of them has."""
        self._suspect = False
        self.columns()
        self._suspect = False
        checks = self.arrays["check"]
        for at in range(self.rows):
            try:
                row = self.row(at)
                good = crc32c(pack(row)) == int(checks[at])
            except (LayerscopeError, ValueError):
                good = False
            if not good and at not in self.bad:
                self.bad.add(at)
                self.damage.append(("its row is not what was written", at))

    def _check_header(self, trailer: bytes) -> None:
        """Hold the header, and the padding behind the tensors, against what the footer says of them."""
        _, _, check, _ = _TRAILER.unpack(trailer)
        if crc32c(self._files.read(self.name, length=self._begin)) != check:
            self.damage.append(("its header is not what was written; other tools may misread the file", None))
        ends = max(self._begin, self._about["tensors"])
        columns = self._begin + min(column[2] for column in self._about["columns"].values())
        if any(self._files.read(self.name, offset=ends, length=max(0, columns - ends))):
            self.damage.append(("its padding is not what was written", None))


def placed_wrongly(row: TableRow, size: int, *, begins: int = ROOM) -> str | None:
    """Say why a row's bytes cannot be where it says, given the file's size; None where they can."""
    try:
        if nbytes(row.dtype, row.shape) != row.length:
            return f"its {row.length} bytes are not a {row.dtype} tensor of shape {list(row.shape)}"
    except LayerscopeError as error:
        return str(error)
    if row.offset < begins or row.offset + row.length > size:
        return f"bytes {row.offset} to {row.offset + row.length} are not inside a file of {size}"
    return None
