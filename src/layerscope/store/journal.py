"""The journal of a segment that is still open: one frame per record, each with its own checksum.

    marker (8)  length (4)  kind (1)  payload  check (4)

A frame is written after the tensor's bytes, and is the acknowledgement. The marker is the run's own name, so that a
reader finds the next frame after damaged bytes, and never one that another run left on the same disk blocks.
"""

from __future__ import annotations

import contextlib
import errno
import os
import re
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple, final

from layerscope.errors import Damaged
from layerscope.store import strictjson
from layerscope.store.address import WRITING, open_regular
from layerscope.store.checksum import crc32c
from layerscope.store.columns import TableRow, decoded, encoded, pack, unpack
from layerscope.store.manifest import FORMAT, VERSION, Dropped, check_version

_HEAD = struct.Struct("<8sIB")
_CHECK = struct.Struct("<I")
_LOSS = struct.Struct("<QI")
_SCHEMA, _ROW, _LOST = 1, 2, 3

# Blocks that are kept back behind the last row, so that a full disk still takes the account of what it refused: a frame
# for each of some four hundred points, and one, for which a little of it is left, that counts the others.
_KEPT_BACK = 64 << 10
_OTHERS = ("?", "the disk had no room to say what it was")
_ROOM_FOR_OTHERS = 256

GONE = "the run's folder was removed"
_STEP = 256 << 10
_LONGEST = 64 << 20


@final
class Journal:
    """A journal being written. Errors are raised; what a failed write left behind is cut off."""

    def __init__(self, path: Path, *, run: bytes, rank: int) -> None:
        """Create the file with its first frame; leaves nothing behind when the disk has no room for it."""
        self.path, self.run, self.end = path, run, 0
        self.fd = open_regular(path, WRITING | os.O_CREAT | os.O_EXCL)
        self._linked = os.fstat(self.fd).st_nlink > 0  # some file systems count no names
        self._allocated = 0
        self._losses: dict[tuple[str, str], int] = {}
        self._others: dict[tuple[str, str], int] = {}
        about: strictjson.JSON = {"format": FORMAT, "version": VERSION, "rank": rank, "run": run.hex()}
        try:
            self.append(frame(run, _SCHEMA, strictjson.dumps(about).encode()))
        except BaseException:
            self.close()
            path.unlink(missing_ok=True)
            raise

    @property
    def is_gone(self) -> bool:
        """Whether the file was removed, and with it what it says."""
        return self._linked and os.fstat(self.fd).st_nlink == 0

    def append(self, frames: bytes) -> None:
        """Write frames behind the last one."""
        if self.is_gone:
            raise FileNotFoundError(errno.ENOENT, GONE, str(self.path))
        self._make_room(len(frames) + _KEPT_BACK)
        try:
            _pwrite(self.fd, frames, self.end)
        except OSError:
            try:
                os.ftruncate(self.fd, self.end)
            except OSError:
                with contextlib.suppress(OSError):  # zeros are no frames
                    _pwrite(self.fd, bytes(len(frames)), self.end)
            self._allocated = self.end
            raise
        self.end += len(frames)

    def lose(self, point: str, reason: str, count: int, first: str) -> None:
        """Write down how many records of a point were lost for a reason; the same frame again when it grows.

        When not even the blocks that were kept back have room, those of all other points are counted together.
        """
        key = (point, reason)
        data = _loss_frame(self.run, point, reason, count, first)
        if key not in self._losses:
            try:
                if key in self._others:
                    raise OSError(errno.ENOSPC, "it is counted with the others")
                self._make_room(len(data) + (0 if key == _OTHERS else _ROOM_FOR_OTHERS))
            except OSError:
                if key == _OTHERS:
                    raise
                self._others[key] = count
                self.lose(*_OTHERS, sum(self._others.values()), "")
                return
        at = self._losses.get(key, self.end)
        _pwrite(self.fd, data, at)
        if key not in self._losses:
            self._losses[key] = at
            self.end += len(data)

    def close(self) -> None:
        """Close the file as it is."""
        if self.fd >= 0:
            with contextlib.suppress(OSError):
                os.close(self.fd)
            self.fd = -1

    def _make_room(self, size: int) -> None:
        """Have the blocks before they are needed; a file system that cannot promise any is written to all the same."""
        if self.end + size <= self._allocated or not hasattr(os, "posix_fallocate"):
            return
        for ahead in (max(size, _STEP), size):
            try:
                os.posix_fallocate(self.fd, self.end, ahead)
            except OSError as error:
                if ahead == size and error.errno in _FULL:
                    raise
                continue
            self._allocated = self.end + ahead
            return


_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


def row_frame(run: bytes, row: TableRow) -> tuple[bytes, int]:
    """Return the frame of a record, and the crc32c of its row as bytes."""
    payload = pack(row)
    check = crc32c(payload)
    return _framed(run, _ROW, payload, check), check


def _loss_frame(run: bytes, point: str, reason: str, count: int, first: str) -> bytes:
    parts = [encoded(text) for text in (point, reason, first)]
    return frame(run, _LOST, _LOSS.pack(count, len(parts)) + b"".join(_CHECK.pack(len(text)) + text for text in parts))


def frame(run: bytes, kind: int, payload: bytes) -> bytes:
    """Return one frame."""
    return _framed(run, kind, payload, crc32c(payload))


def _framed(run: bytes, kind: int, payload: bytes, check: int) -> bytes:
    head = _HEAD.pack(run, len(payload), kind)
    return b"".join((head, payload, _CHECK.pack(_masked(crc32c(head, check)))))


def _masked(check: int) -> int:
    """Return a checksum that zeros do not have: crc32c of nothing is 0, and so is a block that was never written."""
    return ((check >> 15 | check << 17) + 0xA282EAD8) & 0xFFFFFFFF


def _pwrite(fd: int, data: bytes | memoryview, offset: int) -> None:
    view = memoryview(data)
    while view.nbytes:
        written = os.pwrite(fd, view, offset)
        view, offset = view[written:], offset + written


# Reading ----------------------------------------------------------------------------------------


class Entries(NamedTuple):
    """What a journal holds: rows with the crc32c of each, what was lost, and what could not be read.

    `damage` has a byte offset and a reason each. `torn` bytes at the end were being written, or were damaged: nothing
    that follows them tells which. `end` is where the last whole frame ends.
    """

    rows: list[TableRow]
    checks: list[int]
    losses: list[Dropped]
    damage: list[tuple[int, str]]
    torn: int
    end: int
    run: bytes


def read(data: bytes | bytearray, *, run: bytes = b"") -> Entries:
    """Read a journal, or with its `run` what came behind a frame of it.

    Raises NewerFormat for a format of the future, NotARun for one of the past.
    """
    rows: list[TableRow] = []
    checks: list[int] = []
    losses: dict[tuple[str, str], Dropped] = {}
    damage: list[tuple[int, str]] = []
    marker = run or _marker(data)
    end = 0
    for at, kind, payload, check, skipped in _frames(data, marker):
        if skipped:
            damage.append((at - skipped, f"{skipped} bytes that are not what was written"))
        try:
            if kind == _ROW:
                rows.append(unpack(payload))
                checks.append(check)
            elif kind == _LOST:
                lost = _dropped(payload)
                losses[lost.point, lost.reason] = lost
            elif kind == _SCHEMA:
                check_version(_schema(payload))
            else:
                raise Damaged(f"a frame of kind {kind}, which this version does not know")
        except Damaged as error:
            damage.append((at, str(error)))
        end = at + _HEAD.size + len(payload) + _CHECK.size
    torn = max(0, len(data.rstrip(b"\0")) - end)
    return Entries(rows, checks, list(losses.values()), damage, torn, end, marker)


def _marker(data: bytes | bytearray) -> bytes:
    """Return the run's name: the first eight bytes, or what the first frame says where those are damaged."""
    first = bytes(data[:8])
    said = _NAMED.search(data, 0, 4096)
    if said is None or _frame_at(memoryview(data), 0, first) is not None:
        return first
    return max(first, bytes.fromhex(said[1].decode()), key=data.count)


_NAMED = re.compile(rb'"run":"([0-9a-f]{16})"')


def _schema(payload: memoryview) -> object:
    """Return the version that the first frame states."""
    try:
        return strictjson.loads(bytes(payload)).get("version")
    except (ValueError, AttributeError, RecursionError) as error:
        raise Damaged(f"a first frame that does not say what it must ({error})") from None


def _frames(data: bytes | bytearray, marker: bytes) -> Iterator[tuple[int, int, memoryview, int, int]]:
    """Yield the frames that are whole, and how many damaged bytes came before each."""
    view, at, last = memoryview(data), 0, 0
    # A hostile file of nothing but markers costs no more than a few times its size.
    patience = 8 * len(data) + (1 << 20)
    while at >= 0 and patience > 0 and any(marker):
        found = _frame_at(view, at, marker)
        if found is None:
            if at + _HEAD.size <= len(data) and bytes(view[at : at + 8]) == marker:
                patience -= 64 + min(_HEAD.unpack_from(view, at)[1], len(data) - at)
            at = data.find(marker, at + 1)
            continue
        kind, payload, check = found
        yield at, kind, payload, check, at - last
        at = last = at + _HEAD.size + len(payload) + _CHECK.size
        if at >= len(data):
            return


def _frame_at(view: memoryview, at: int, marker: bytes) -> tuple[int, memoryview, int] | None:
    if at + _HEAD.size + _CHECK.size > len(view) or bytes(view[at : at + 8]) != marker:
        return None
    _, size, kind = _HEAD.unpack_from(view, at)
    begins = at + _HEAD.size
    if size > _LONGEST or begins + size + _CHECK.size > len(view):
        return None
    payload = view[begins : begins + size]
    check = crc32c(payload)
    whole = _masked(crc32c(bytes(view[at:begins]), check))
    return (kind, payload, check) if _CHECK.unpack_from(view, begins + size)[0] == whole else None


def _dropped(payload: memoryview) -> Dropped:
    try:
        count, number = _LOSS.unpack_from(payload)
        at, texts = _LOSS.size, []
        for _ in range(number):
            (size,) = _CHECK.unpack_from(payload, at)
            texts.append(decoded(payload[at + _CHECK.size : at + _CHECK.size + size]))
            at += _CHECK.size + size
        point, reason, first = texts
    except (struct.error, ValueError) as error:
        raise Damaged(f"a loss that does not say what was lost ({error})") from None
    return Dropped(point, count, reason, first)
