"""Where a dump's file lies on this machine: the libraries that own the formats read paths.

    path_of(files, "layer_3_output.pt")     # the file itself, or what was fetched of s3://..., whole

The last eight files that were fetched stay, in temporary files, until they give way to others or the process ends.
"""

from __future__ import annotations

import os
import shutil
import tempfile
from functools import lru_cache
from pathlib import Path
from weakref import finalize

from layerscope.errors import Damaged, Unsupported
from layerscope.store.address import Folder, LocalFolder

_AT_A_TIME = 16 << 20


def path_of(files: Folder, name: str, *, most: int | None = None) -> Path:
    """Return the path of a file, fetched first where it is elsewhere; there, more than `most` bytes are not fetched.

    Raises FileNotFoundError when it is not there, Damaged for what is no file (a pipe would be waited for).
    """
    if not isinstance(files, LocalFolder):
        if most is not None and files.size(name) > most:
            raise Unsupported(f"{files.address}/{name} has over {most} bytes, and is not fetched to be looked into")
        return _fetched(files, name).path
    path = files.path / name
    path.stat()
    if not path.is_file():
        raise Damaged(f"{path} is no regular file, and nothing else is read")
    return path


class _Copy:
    """A temporary file, deleted with this object."""

    def __init__(self) -> None:
        handle, name = tempfile.mkstemp(prefix="layerscope-")
        os.close(handle)
        self.path = Path(name)
        finalize(self, _remove, self.path, os.getpid())


def _remove(path: Path, owner: int) -> None:
    if os.getpid() == owner:  # a forked child ends before its parent does
        path.unlink(missing_ok=True)


@lru_cache(maxsize=8)
def _fetched(files: Folder, name: str) -> _Copy:
    size, place = files.size(name), f"{files.address}/{name}"
    if size > (free := shutil.disk_usage(tempfile.gettempdir()).free):
        there = tempfile.gettempdir()
        raise Unsupported(f"{place} is fetched whole: {size} bytes, and {there} has {free} free; set TMPDIR to another")
    copy = _Copy()
    with copy.path.open("wb") as out:
        for start in range(0, size, _AT_A_TIME):
            part = files.read(name, offset=start, length=min(_AT_A_TIME, size - start))
            if len(part) != min(_AT_A_TIME, size - start):
                raise Damaged(f"{place} is truncated: it ends before its {size} bytes do")
            out.write(part)
    return copy
