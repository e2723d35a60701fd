"""The journal: one line of JSON per record, each with its own checksum. A line is an acknowledgement.

    {"record":12,"point":"blocks.3:output","epoch":null,"step":3,"batch":3,"call":0,"rank":0,
     "dtype":"bfloat16","shape":[2,768],"segment":0,"offset":65536,"length":3072,"crc32c":"9a1b2c3d",
     "summary":{...},"note":{...},"check":"0f1e2d3c"}

It is written after the tensor's bytes, so what has a line is there. `check` is the crc32c of the line up to the
comma before it; a line that fails it is dropped and named, and costs no other.
"""

from __future__ import annotations

import contextlib
import errno
import json
import os
import re
from collections.abc import Iterator, Mapping
from functools import lru_cache
from pathlib import Path
from typing import Any, NamedTuple, final

from layerscope.errors import Damaged, RunBusy
from layerscope.points import Moment, Point
from layerscope.store import strictjson
from layerscope.store.address import Folder, write_all
from layerscope.store.checksum import crc32c, text
from layerscope.store.manifest import FORMAT, VERSION, check_version
from layerscope.store.segment import Placed

__all__ = [
    "Journal",
    "Line",
    "Record",
    "lines",
    "opening_line",
    "parsed",
    "record_line",
    "rest_of",
    "rest_text",
    "walk",
]

_CHECK = len(',"check":"00000000"}')
_INT64 = 1 << 63

_PLAIN = re.compile(r"[\w./-]{1,64}", re.ASCII)
_EIGHT_DIGITS = re.compile(r"[0-9a-f]{8}")

_PIECE = 4 << 20
# Far more than a line ever takes; a journal without newlines is damage, not a reason to fill the memory.
_LONGEST = 64 << 20


# Writing ----------------------------------------------------------------------------------------


def opening_line(*, rank: int, run: str) -> bytes:
    """Return a journal's first line; `run` is a random name that tells this journal from a later one at its place."""
    return _checked(f'{{"format":"{FORMAT}","version":{VERSION},"rank":{rank},"run":"{run}"')


def record_line(
    record: int,
    point: str,
    moment: Moment,
    *,
    dtype: str | None = None,
    shape: tuple[int, ...] = (),
    placed: Placed | None = None,
    rest: str = "",
) -> bytes:
    """Return the line of one record; `point` is the text form, `rest` what `rest_text` gives."""
    epoch, step, batch, call, rank = _moment_values(moment)
    body = (
        f'{{"record":{record},"point":{_quoted(point)},"epoch":{"null" if epoch is None else epoch}'
        f',"step":{step},"batch":{batch},"call":{call},"rank":{rank}'
    )
    if placed is not None:
        sides = ",".join(map(str, map(int, shape)))
        body += (
            f',"dtype":"{dtype}","shape":[{sides}],"segment":{placed.segment},"offset":{placed.offset}'
            f',"length":{placed.length},"crc32c":"{placed.crc32c:08x}"'
        )
    return _checked(body + rest)


def rest_text(summary: Mapping[str, Any] | None = None, note: Mapping[str, strictjson.JSON] | None = None) -> str:
    """Return the part of a line that holds summary (what `Summary.to_json` gives) and note.

    It comes last, so that a reader that wants only the facts stops parsing there.
    """
    text = "" if summary is None else ',"summary":' + json.dumps(summary, allow_nan=False, separators=(",", ":"))
    return text + (',"note":' + strictjson.dumps(note) if note else "")


def _moment_values(moment: Moment) -> tuple[int | None, int, int, int, int]:
    epoch = None if moment.epoch is None else int(moment.epoch)
    values = (int(moment.step), int(moment.batch), int(moment.call), int(moment.rank))
    for value in (epoch or 0, *values):
        if not -_INT64 <= value < _INT64:
            raise ValueError(f"{moment} holds a number that 64 bits do not")
    return (epoch, *values)


@lru_cache(maxsize=1 << 14)
def _quoted(point: str) -> str:
    return json.dumps(point)


def _checked(body: str) -> bytes:
    raw = body.encode("ascii")
    return raw + b',"check":"%08x"}\n' % crc32c(raw)


@final
class Journal:
    """A journal being written, locked against a second writer of the same rank for as long as it is open."""

    def __init__(self, path: Path) -> None:
        """Open and lock, creating the file where there is none; raises RunBusy when another writer has it."""
        self.path = path
        self.fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o666)
        try:
            _lock(self.fd, path)
            self._linked = os.fstat(self.fd).st_nlink > 0  # some file systems never tell
            size = self.size
            # A last line without its newline was torn by a kill: the next one must not be glued to it.
            self.torn = size > 0 and os.pread(self.fd, 1, size - 1) != b"\n"
        except BaseException:
            os.close(self.fd)
            raise

    @property
    def size(self) -> int:
        """How many bytes the file has."""
        return os.fstat(self.fd).st_size

    def append(self, line: bytes) -> None:
        """Write one line; when that fails, what was written of it is taken back."""
        state = os.fstat(self.fd)
        if self._linked and state.st_nlink == 0:
            raise FileNotFoundError(errno.ENOENT, "the run's folder was removed", str(self.path))
        if self.torn:
            # The mark spoils a torn line that lacked only its newline, and whose bytes have been taken back.
            line = b"#\n" + line
        try:
            write_all(self.fd, line)
        except OSError:
            self.torn = not _is_cut(self.fd, state.st_size)
            raise
        self.torn = False

    def cut(self, end: int) -> None:
        """Cut off a torn tail."""
        os.ftruncate(self.fd, end)
        self.torn = False

    def complete(self) -> None:
        """Give the last line the newline that a kill kept from it."""
        write_all(self.fd, b"\n")
        self.torn = False

    def sync(self) -> None:
        """Make the lines outlast a power cut."""
        os.fsync(self.fd)

    def close(self) -> None:
        """Unlock and close: a child that was forked meanwhile may still have the file open, and the lock with it."""
        if self.fd >= 0:
            _unlock(self.fd)
            self.disown()

    def disown(self) -> None:
        """Close without unlocking, in a forked child: the lock is the parent's."""
        if self.fd >= 0:
            with contextlib.suppress(OSError):
                os.close(self.fd)
            self.fd = -1


def _is_cut(fd: int, size: int) -> bool:
    try:
        os.ftruncate(fd, size)
    except OSError:
        return False
    return True


def _lock(fd: int, path: Path) -> None:
    try:
        import fcntl
    except ImportError:  # no such locks on this system
        return
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        raise RunBusy(
            f"another process is writing {path.parent}; wait until it has ended, or record into another folder"
        ) from None
    except OSError:  # a file system without locks; the lock guards against a mistake, not against an attack
        return


def _unlock(fd: int) -> None:
    with contextlib.suppress(ImportError, OSError):
        import fcntl

        fcntl.flock(fd, fcntl.LOCK_UN)


# Reading ----------------------------------------------------------------------------------------


class Record(NamedTuple):
    """The facts of one journal line."""

    record: int
    point: str
    epoch: int | None
    step: int
    batch: int
    call: int
    rank: int
    dtype: str | None
    shape: tuple[int, ...] | None
    placed: Placed | None

    @property
    def moment(self) -> Moment:
        """When it was recorded."""
        return Moment(self.epoch, self.step, self.batch, self.call, self.rank)


class Line(NamedTuple):
    """One line of a journal: where it begins, how long it is with its newline, and what it says.

    `record` is None for an opening line and for a damaged one; `damage` says what is wrong with the latter.
    """

    at: int
    size: int
    record: Record | None
    damage: str | None = None


def walk(files: Folder, name: str, *, at: int = 0, whole: bool = False) -> Iterator[Line]:
    """Walk through the complete lines of a journal from byte `at` on, without holding it all in memory.

    What follows the last newline is being written, or was torn; with `whole=True`, when nobody is writing, it is
    a line as well. Nothing is yielded for empty lines.
    """
    held = b""
    while True:
        piece = files.read(name, offset=at + len(held), length=_PIECE)
        held += piece
        stop = held.rfind(b"\n") + 1
        if not piece and whole:
            stop = len(held)
        if not stop and len(held) > _LONGEST:
            yield Line(at, len(held), None, f"{len(held)} bytes without a line's end")
            stop = len(held)
        else:
            yield from lines(held[:stop], at=at)
        at += stop
        held = held[stop:]
        if not piece:
            return


def lines(data: bytes | bytearray, *, at: int = 0) -> Iterator[Line]:
    """Walk through the lines of `data`, a stretch of a journal that begins at byte `at`."""
    start = 0
    while start < len(data):
        end = data.find(b"\n", start)
        stop, after = (len(data), len(data)) if end < 0 else (end, end + 1)
        if stop > start:
            yield _line(data[start:stop], at + start, after - start)
        start = after


def rest_of(raw: bytes | bytearray) -> tuple[dict[str, Any] | None, dict[str, Any]]:
    """Return summary (as JSON) and note of one line; raises Damaged when the line is not what was written."""
    fields = _parsed(raw.rstrip(b"\n"))
    summary, note = fields.get("summary"), fields.get("note", {})
    if not (summary is None or isinstance(summary, dict)) or not isinstance(note, dict):
        raise Damaged("the line's summary or note is not an object")
    return summary, strictjson.decoded(note)


def _line(raw: bytes | bytearray, at: int, size: int) -> Line:
    try:
        _check(raw)
        # Quotes inside JSON strings are escaped, so these bytes are keys, and the first of them is the line's own.
        cuts = [cut for cut in (raw.find(b',"summary":'), raw.find(b',"note":')) if cut > 0]
        facts = _object(raw[: min(cuts)] + b"}" if cuts else raw)
        if "format" in facts:
            check_version(facts.get("version"))
            return Line(at, size, None)
        return Line(at, size, _record(facts))
    except Damaged as error:
        return Line(at, size, None, str(error))


def _parsed(raw: bytes | bytearray) -> dict[str, Any]:
    _check(raw)
    return _object(raw)


def _check(raw: bytes | bytearray) -> None:
    body, mark, check = raw[:-_CHECK], raw[-_CHECK : 10 - _CHECK], raw[10 - _CHECK : -2]
    if mark != b',"check":"' or raw[-2:] != b'"}':
        raise Damaged("a line without its checksum: it was torn, or is not a record")
    if check != text(crc32c(body)).encode():
        raise Damaged("a line that is not what was written: its checksum differs")


def _object(raw: bytes | bytearray) -> dict[str, Any]:
    try:
        value = json.loads(raw)
    except (ValueError, RecursionError) as error:
        raise Damaged(f"a line that is not JSON ({error})") from None
    if not isinstance(value, dict):
        raise Damaged("a line that is not a JSON object")
    return value


def _record(facts: dict[str, Any]) -> Record:
    try:
        point = facts["point"]
        if not isinstance(point, str):
            raise TypeError("the point is not text")
        point = str(parsed(point))
        dtype, shape, placed = facts.get("dtype"), None, None
        if dtype is not None:
            if not isinstance(dtype, str) or not _PLAIN.fullmatch(dtype):
                raise TypeError("the dtype is not a name")
            shape = tuple(_count(n) for n in facts["shape"])
            number, offset, length = (_count(facts[name]) for name in ("segment", "offset", "length"))
            if not _EIGHT_DIGITS.fullmatch(facts["crc32c"]):
                raise ValueError("the checksum has not eight digits")
            placed = Placed(number, offset, length, int(facts["crc32c"], 16))
        epoch = None if facts["epoch"] is None else _int64(facts["epoch"])
        step, batch, call, rank = (_int64(facts[name]) for name in ("step", "batch", "call", "rank"))
        return Record(_count(facts["record"]), point, epoch, step, batch, call, rank, dtype, shape, placed)
    except (KeyError, TypeError, ValueError) as error:
        raise Damaged(f"a line that does not say what a record must ({type(error).__name__}: {error})") from None


@lru_cache(maxsize=1 << 16)
def parsed(point: str) -> Point:
    """Read a point's text form; a run has few points and many records."""
    return Point.parse(point)


def _int64(value: Any) -> int:
    if type(value) is not int or not -_INT64 <= value < _INT64:
        raise ValueError(f"{str(value)[:40]!r} is not a 64-bit integer")
    return value


def _count(value: Any) -> int:
    if _int64(value) < 0:
        raise ValueError(f"{value} is negative")
    return int(value)
