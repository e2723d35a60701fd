"""Zip archives, `.npz` and what torch saves: looked over before the library that owns the format reads them.

    with archive(files, "first_layer_io_all_modes.npz") as (zipped, members): ...

Names inside an archive are keys and nothing more; nothing is ever unpacked to disk under them. What two readers of one
archive may see differently (a name twice) is refused, and sizes are believed only as far as the file's own size allows.
"""

from __future__ import annotations

import struct
import zipfile
import zlib
from collections.abc import Iterator
from contextlib import contextmanager

from layerscope.errors import Damaged, LayerscopeError, Unsupported
from layerscope.store.address import Folder
from layerscope.store.layouts.copies import path_of

Member = zipfile.ZipInfo
_METHODS = (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED)
# Deflate makes 258 bytes of 2 bits at most.
_RATIO = 1032


def is_zip(files: Folder, name: str) -> bool:
    """Whether a file begins as a zip archive does, an empty one included."""
    return bytes(files.read(name, length=4)) in (b"PK\x03\x04", b"PK\x05\x06")


@contextmanager
def archive(files: Folder, name: str, member: str = "") -> Iterator[tuple[zipfile.ZipFile, list[Member]]]:
    """Open an archive and list what is in it; what does not read inside the block is Damaged, by its name."""
    place = f"{files.address}/{name}" + (f" ({member})" if member else "")
    try:
        path = path_of(files, name)
        with zipfile.ZipFile(path) as zipped:
            yield zipped, list(_members(zipped, path.stat().st_size, place))
    except LayerscopeError:
        raise
    except (zipfile.BadZipFile, zlib.error, EOFError, NotImplementedError, struct.error, ValueError) as error:
        why = str(error) or "its bytes end too early"
        raise Damaged(f"{place} is truncated, or not what was written ({why})") from error


def _members(zipped: zipfile.ZipFile, size: int, place: str) -> Iterator[Member]:
    seen: set[str] = set()
    for info in zipped.infolist():
        if info.filename.endswith("/"):
            continue
        # Torch's reader finds members whatever the case of their names.
        if info.filename.lower() in seen:
            raise Damaged(f"{place}: {info.filename!r} is in it twice, and readers differ in which they take")
        seen.add(info.filename.lower())
        if info.flag_bits & 0x1:
            raise Unsupported(f"{place}: {info.filename!r} is encrypted; layerscope reads plain archives")
        if info.compress_type not in _METHODS:
            method = info.compress_type
            raise Unsupported(f"{place}: {info.filename!r} is compressed by method {method}; only deflate is read")
        stored = info.compress_type == zipfile.ZIP_STORED
        most = info.compress_size * (1 if stored else _RATIO) + (0 if stored else 64)
        if info.header_offset < 0 or info.header_offset + info.compress_size > size or info.file_size > most:
            raise Damaged(
                f"{place}: {info.filename!r} states {info.file_size} bytes, more than {info.compress_size} "
                f"bytes in a file of {size} can hold"
            )
        yield info
