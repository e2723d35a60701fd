"""Zip archives in a folder, wherever the folder is: `.npz`, and what torch saves.

    for member in members(files, "first_layer_io_all_modes.npz"): ...

Names inside an archive are keys and nothing more; nothing is ever unpacked to disk. Sizes are believed only as far as
the file's own size allows.
"""

from __future__ import annotations

import io
import os
import struct
import zipfile
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from layerscope.errors import Damaged, Unsupported
from layerscope.store.address import Folder

__all__ = ["Member", "is_zip", "members"]

MAGIC = b"PK\x03\x04"
EMPTY = b"PK\x05\x06"
_LOCAL = struct.Struct("<4s22xHH")
# Deflate makes 258 bytes of 2 bits at most.
_RATIO = 1032
_AT_A_TIME = 1 << 20


@dataclass(frozen=True, slots=True)
class Member:
    """One member of an archive: `offset` is where its bytes lie in the file, None when they are compressed."""

    files: Folder
    archive: str
    name: str
    size: int
    crc32: int
    offset: int | None

    @property
    def place(self) -> str:
        """Say which member of which archive it is."""
        return f"{self.files.address}/{self.archive} ({self.name})"

    def start(self, length: int) -> bytes:
        """Read its first bytes, fewer where it ends."""
        length = min(length, self.size)
        if self.offset is not None:
            return bytes(self.files.read(self.archive, offset=self.offset, length=length))
        with _unpacking(self) as stream:
            return bytes(stream.read(length))

    def parts(self, length: int) -> Iterator[bytes]:
        """Go through its bytes, decompressed, at most `length` at a time."""
        with _unpacking(self) as stream:
            while part := stream.read(length):
                yield bytes(part)

    @contextmanager
    def opened(self) -> Iterator[Callable[[int, int], bytearray]]:
        """Read stretches of its bytes, decompressed: `read(start, length)`, best in order; raises Damaged at the end.

        What lies before a stretch is decompressed and let go, from the beginning again where `start` is behind.
        """
        with _unpacking(self) as stream:

            def read(start: int, length: int) -> bytearray:
                stream.seek(start)
                data = bytearray(length)
                view, done = memoryview(data), 0
                while done < length:
                    got = stream.readinto(view[done : done + _AT_A_TIME])
                    if not got:
                        raise Damaged(f"{self.place} ends before its values do: it is truncated")
                    done += got
                view.release()
                return data

            yield read
            while stream.read(_AT_A_TIME):  # to the end, where zipfile compares the checksum
                pass


def is_zip(files: Folder, name: str) -> bool:
    """Whether a file begins as a zip archive does, an empty one included."""
    return files.read(name, length=len(MAGIC)) in (MAGIC, EMPTY)


def members(files: Folder, name: str) -> list[Member]:
    """List what is in an archive; raises Damaged for what is none, or not whole."""
    place, size = f"{files.address}/{name}", files.size(name)
    with _opened(files, name) as archive:
        listed = archive.infolist()
    found = []
    for info in listed:
        if info.filename.endswith("/"):
            continue
        if info.flag_bits & 0x1:
            raise Unsupported(f"{place}: {info.filename!r} is encrypted; layerscope reads plain archives")
        most = info.compress_size * (1 if info.compress_type == zipfile.ZIP_STORED else _RATIO) + 64
        if info.header_offset < 0 or info.header_offset + info.compress_size > size or info.file_size > most:
            raise Damaged(
                f"{place}: {info.filename!r} states {info.file_size} bytes, more than {info.compress_size} "
                f"bytes in a file of {size} can hold"
            )
        offset = None
        if info.compress_type == zipfile.ZIP_STORED:
            offset = _begins(files, name, info.header_offset)
            if offset + info.file_size > size:
                raise Damaged(f"{place}: {info.filename!r} does not end before the file does: it is truncated")
        elif info.compress_type != zipfile.ZIP_DEFLATED:
            method = info.compress_type
            raise Unsupported(f"{place}: {info.filename!r} is compressed by method {method}; only deflate is read")
        found.append(Member(files, name, info.filename, info.file_size, info.CRC, offset))
    return found


def _begins(files: Folder, name: str, header: int) -> int:
    """Return where a member's bytes begin: its local header has lengths of its own."""
    data = files.read(name, offset=header, length=_LOCAL.size)
    if len(data) < _LOCAL.size or data[:4] != MAGIC:
        raise Damaged(f"{files.address}/{name}: there is no member at byte {header}, where its directory says one is")
    _, names, extra = _LOCAL.unpack(data)
    return header + _LOCAL.size + int(names) + int(extra)


@contextmanager
def _opened(files: Folder, name: str) -> Iterator[zipfile.ZipFile]:
    try:
        with zipfile.ZipFile(io.BufferedReader(_File(files, name))) as archive:
            yield archive
    except (zipfile.BadZipFile, zlib.error, EOFError, NotImplementedError, struct.error, ValueError) as error:
        if isinstance(error, (Damaged, Unsupported)):
            raise
        raise Damaged(f"{files.address}/{name} is truncated or not a zip archive ({error})") from error


@contextmanager
def _unpacking(member: Member) -> Iterator[Any]:
    with _opened(member.files, member.archive) as archive:
        try:
            with archive.open(member.name) as stream:
                yield stream
        except (zipfile.BadZipFile, zlib.error, EOFError) as error:
            why = str(error) or "its bytes end too early"
            raise Damaged(f"{member.place} is truncated, or not what was written ({why})") from error


class _File(io.RawIOBase):
    """One file of a folder, as the standard library wants it."""

    def __init__(self, files: Folder, name: str) -> None:
        self._files, self._name, self._at = files, name, 0
        self._size = files.size(name)

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._at

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        base = {os.SEEK_SET: 0, os.SEEK_CUR: self._at, os.SEEK_END: self._size}[whence]
        if base + offset < 0:
            raise OSError("before the beginning")
        self._at = base + offset
        return self._at

    def readinto(self, buffer: Any) -> int:
        data = self._files.read(self._name, offset=self._at, length=len(buffer))
        buffer[: len(data)] = data
        self._at += len(data)
        return len(data)
