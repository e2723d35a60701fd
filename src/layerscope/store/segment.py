"""A safetensors file written as a stream: bytes first, header last, then renamed.

    segment = Segment.create(folder, number=0, rank=0)
    placed = segment.write(data)      # on disk; part of the segment once its journal line is there too
    segment.keep(12, "blocks.3:output", Moment(step=3), dtype="bfloat16", shape=(2, 768), placed=placed)
    segment.seal()                    # segment-00000.partial -> segment-00000.safetensors

The header's room is written, not just seeked over, when the file is made: a disk that is full later still
has the blocks to seal in. Nothing is written through mmap, where a full disk is a SIGBUS.
"""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple, final

from layerscope.points import Moment
from layerscope.store.address import PARTIAL, SEALED, sync_directory
from layerscope.store.address import segment as segment_name
from layerscope.store.checksum import Bytes, crc32c
from layerscope.store.dtypes import stored
from layerscope.store.manifest import FORMAT, VERSION

__all__ = ["ROOM", "Placed", "Segment", "entry", "gap", "header", "seal"]

# The 8-byte length and the JSON header together; the tensors' bytes begin here. 512 tensors take about 44 KiB.
ROOM = 64 << 10

# What a recovered segment may need beyond its entries: a word for the bytes behind the last of them.
_SPARE = 256

# What is handed to the system at a time, so that a slow disk shows progress.
_PIECE = 4 << 20


class Placed(NamedTuple):
    """Where in its segment's file a tensor's bytes lie, and their checksum."""

    segment: int
    offset: int
    length: int
    crc32c: int


def entry(record: int, dtype: str, shape: Sequence[int], *, offset: int, length: int) -> str:
    """Return one tensor's part of the header; its key is the record's number, never a name."""
    how = stored(dtype)
    sides = ",".join(map(str, how.header_shape(shape)))
    begin = offset - ROOM
    return f'"{record:08d}":{{"dtype":"{how.code}","shape":[{sides}],"data_offsets":[{begin},{begin + length}]}}'


def gap(offset: int, length: int) -> str:
    """Return the header's part for bytes that no journal line vouches for; the format allows no holes."""
    begin = offset - ROOM
    return f'"gap-{offset}":{{"dtype":"U8","shape":[{length}],"data_offsets":[{begin},{begin + length}]}}'


def header(entries: Sequence[str], *, rank: int) -> bytes:
    """Return the whole room: the length, the JSON, and the spaces that the format allows behind it."""
    about = json.dumps({"format": FORMAT, "version": str(VERSION), "rank": str(rank)}, separators=(",", ":"))
    text = "{" + ",".join([f'"__metadata__":{about}', *entries]) + "}"
    if len(text) > ROOM - 8:
        raise ValueError(f"a header of {len(text)} bytes does not fit the {ROOM - 8} reserved for it")
    return (ROOM - 8).to_bytes(8, "little") + text.encode("ascii").ljust(ROOM - 8)


def seal(fd: int, partial: Path, entries: Sequence[str], *, rank: int) -> Path:
    """Write the header into its room and give the file its final name; a kill in between changes nothing."""
    _pwrite(fd, header(entries, rank=rank), 0)
    os.fsync(fd)
    sealed = partial.with_suffix(SEALED)
    partial.replace(sealed)
    sync_directory(sealed.parent)
    return sealed


@final
class Segment:
    """A segment being written. What `write` put there counts once `keep` is called, and `forget` takes it back."""

    def __init__(self, fd: int, path: Path, *, number: int, rank: int) -> None:
        self.fd = fd
        self.path = path
        self.number = number
        self.end = ROOM
        self.kept: list[tuple[str, Moment]] = []
        self._rank = rank
        self._entries: list[str] = []
        self._room = ROOM - 8 - _SPARE - len(header((), rank=rank)[8:].rstrip())

    @classmethod
    def create(cls, folder: Path, *, number: int, rank: int) -> Segment:
        """Make `segment-N.partial` with its header's room; leaves nothing behind when the disk has no room for it."""
        path = folder / (segment_name(number) + PARTIAL)
        fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o666)
        try:
            # Zeros: a stock reader that opens an unsealed segment finds a header of length 0 and refuses it.
            _pwrite(fd, bytes(ROOM), 0)
        except BaseException:
            os.close(fd)
            path.unlink()
            raise
        return cls(fd, path, number=number, rank=rank)

    def __len__(self) -> int:
        return len(self._entries)

    @property
    def nbytes(self) -> int:
        """How many bytes of tensors it holds."""
        return self.end - ROOM

    def has_room(self, dtype: str, shape: Sequence[int], length: int) -> bool:
        """Whether the header's room takes one more entry of this kind."""
        if self._room > 2048 and len(shape) < 64:
            return True
        text = entry(10**9, dtype, shape, offset=self.end, length=length)
        return len(text) + 1 <= self._room

    def write(self, data: Bytes, *, tick: Callable[[], None] = lambda: None) -> Placed:
        """Write a tensor's bytes behind the last, summing each piece; `tick` is called as the disk takes them."""
        at, value = self.end, 0
        for start in range(0, data.size, _PIECE):
            piece = data[start : start + _PIECE]
            value = crc32c(piece, value)
            _pwrite(self.fd, piece.data, at)
            at += piece.size
            tick()
        return Placed(self.number, self.end, data.size, value)

    def keep(
        self, record: int, point: str, moment: Moment, *, dtype: str, shape: Sequence[int], placed: Placed
    ) -> None:
        """Make what was written part of the segment."""
        text = entry(record, dtype, shape, offset=placed.offset, length=placed.length)
        self._entries.append(text)
        self._room -= len(text) + 1
        self.kept.append((point, moment))
        self.end = placed.offset + placed.length

    def forget(self) -> None:
        """Cut off what was written after the last `keep`."""
        os.ftruncate(self.fd, self.end)

    def seal(self) -> Path | None:
        """Write the header and rename; an empty segment is removed instead. The file is closed in any case."""
        try:
            if not self._entries:
                self.path.unlink()
                return None
            self.forget()
            return seal(self.fd, self.path, self._entries, rank=self._rank)
        finally:
            self.close()

    def close(self) -> None:
        """Close the file as it is."""
        if self.fd >= 0:
            with contextlib.suppress(OSError):
                os.close(self.fd)
            self.fd = -1


def _pwrite(fd: int, data: bytes | memoryview, offset: int) -> None:
    view = memoryview(data)
    while view.nbytes:
        written = os.pwrite(fd, view, offset)
        view = view[written:]
        offset += written
