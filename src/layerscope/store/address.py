"""Where a run lies: a folder on this machine, or anything fsspec can reach.

    folder("runs/fp32")             # LocalFolder; so are a Path and file:///runs/fp32
    folder("s3://bucket/fp32")      # RemoteFolder; fsspec is imported here and nowhere else

Names inside a run are fixed or numbered, and joined with `/`; nothing a model is called becomes a path.
"""

from __future__ import annotations

import contextlib
import os
import re
from abc import ABC, abstractmethod
from pathlib import Path
from typing import Any, final

from layerscope.errors import MissingExtra, NotARun

__all__ = [
    "PARTIAL",
    "SEALED",
    "Address",
    "Folder",
    "LocalFolder",
    "RemoteFolder",
    "folder",
    "is_journal",
    "journal_order",
    "rank_folder",
    "rank_of",
    "segment",
    "segment_of",
    "sync_directory",
    "write_all",
]

Address = str | os.PathLike[str]

SEALED = ".safetensors"
PARTIAL = ".partial"

_RANK = re.compile(r"rank-(\d{5,9})")
_SEGMENT = re.compile(r"segment-(\d{5,9})(\.safetensors|\.partial)")
_JOURNAL = re.compile(r"journal(?:-(\d{5,9}))?")


def rank_folder(rank: int) -> str:
    """Return the name of a rank's folder."""
    return f"rank-{rank:05d}"


def rank_of(name: str) -> int | None:
    """Return the rank whose folder `name` is, None for any other name."""
    match = _RANK.fullmatch(name)
    return int(match[1]) if match else None


def segment(number: int) -> str:
    """Return the name of a segment, without the suffix that tells a sealed one from a partial one."""
    return f"segment-{number:05d}"


def segment_of(name: str) -> tuple[int, str] | None:
    """Return number and suffix of the segment that `name` is, None for any other name."""
    match = _SEGMENT.fullmatch(name)
    return (int(match[1]), match[2]) if match else None


def is_journal(name: str) -> bool:
    """Whether `name` is a journal, or one of the parts that a remote run's journal is put in."""
    return _JOURNAL.fullmatch(name) is not None


def journal_order(name: str) -> int:
    """Sort journals as they were written: `journal`, then its numbered parts."""
    match = _JOURNAL.fullmatch(name)
    return -1 if match is None or match[1] is None else int(match[1])


class Folder(ABC):
    """A run's files, wherever they are: list, measure, read, put."""

    address: str

    @abstractmethod
    def names(self, under: str = "") -> list[str]:
        """Return what lies in the folder or in one below it, sorted; nothing when there is no such folder."""

    @abstractmethod
    def size(self, name: str) -> int:
        """Return a file's size; raises FileNotFoundError when it is not there."""

    @abstractmethod
    def read(self, name: str, *, offset: int = 0, length: int | None = None) -> bytearray:
        """Return a stretch of a file, shorter where the file ends."""

    @abstractmethod
    def put(self, name: str, data: bytes) -> None:
        """Write a whole file, so that a reader sees the old one or the new one."""

    @abstractmethod
    def found(self) -> str:
        """Say in a few words what lies at the address, for the error that refuses it."""


@final
class LocalFolder(Folder):
    """A run on this machine's file systems."""

    def __init__(self, path: Path) -> None:
        self.path = Path(os.path.abspath(path))  # noqa: PTH100  (resolve() would follow the user's links)
        self.address = str(self.path)

    def names(self, under: str = "") -> list[str]:
        """Return what lies there, sorted."""
        try:
            return sorted(path.name for path in (self.path / under).iterdir())
        except (FileNotFoundError, NotADirectoryError):
            return []

    def size(self, name: str) -> int:
        """Return a file's size."""
        return (self.path / name).stat().st_size

    def read(self, name: str, *, offset: int = 0, length: int | None = None) -> bytearray:
        """Return a stretch of a file."""
        fd = os.open(self.path / name, os.O_RDONLY)
        try:
            left = max(0, os.fstat(fd).st_size - offset)
            data = bytearray(left if length is None else min(length, left))
            view, done = memoryview(data), 0
            while done < len(data):  # the system gives at most 2 GiB at a time
                got = os.preadv(fd, [view[done:]], offset + done)
                if not got:
                    break
                done += got
        finally:
            os.close(fd)
        view.release()
        del data[done:]
        return data

    def put(self, name: str, data: bytes) -> None:
        """Write beside the file, then rename over it: a kill leaves the old file or the new one."""
        path = self.path / name
        beside = path.with_name(path.name + PARTIAL)
        try:
            fd = os.open(beside, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o666)
            try:
                write_all(fd, data)
                os.fsync(fd)
            finally:
                os.close(fd)
            beside.replace(path)
        except BaseException:
            with contextlib.suppress(OSError):
                beside.unlink()
            raise
        sync_directory(path.parent)

    def put_new(self, name: str, *, like: str) -> None:
        """Give a file a second name where that name is free; another process may have been first."""
        path, source = self.path / name, self.path / like
        try:
            path.hardlink_to(source)  # whole from the first moment on; files are replaced, never changed
        except OSError:  # the name is taken, or this file system has no hard links
            with contextlib.suppress(FileExistsError), path.open("xb") as file:
                file.write(source.read_bytes())

    def found(self) -> str:
        """Say what lies there."""
        if not self.path.exists():
            return "there is nothing there"
        if not self.path.is_dir():
            return "that is a file"
        return _few(self.names())


@final
class RemoteFolder(Folder):
    """A run in an object store or any other place fsspec reaches; files are put whole and never appended to."""

    def __init__(self, address: str) -> None:
        try:
            import fsspec
        except ImportError as error:
            raise MissingExtra(
                f"{address!r} is not a local path, and reading other places takes fsspec: pip install fsspec"
            ) from error
        self.address = address.rstrip("/")
        self._files: Any
        self._sizes: dict[str, int | None] = {}
        try:
            self._files, self._root = fsspec.core.url_to_fs(self.address)
        except (ImportError, ValueError) as error:
            raise NotARun(f"fsspec cannot reach {address!r}: {error}") from error

    def names(self, under: str = "") -> list[str]:
        """Return what lies there, sorted."""
        try:
            self._files.invalidate_cache()
            listing = self._files.ls(self._at(under), detail=True)
        except (FileNotFoundError, NotADirectoryError):
            return []
        found = {str(each["name"]).rstrip("/").rsplit("/", 1)[-1]: each.get("size") for each in listing}
        self._sizes.update({f"{under}/{name}".lstrip("/"): size for name, size in found.items()})
        return sorted(found)

    def size(self, name: str) -> int:
        """Return a file's size, as the last listing had it where there was one: files are put once."""
        size = self._sizes.get(name)
        return int(self._files.size(self._at(name)) if size is None else size)

    def read(self, name: str, *, offset: int = 0, length: int | None = None) -> bytearray:
        """Fetch a stretch of a file, and only that."""
        if length == 0 or offset >= self.size(name):
            return bytearray()
        end = None if length is None else offset + length
        return bytearray(self._files.cat_file(self._at(name), start=offset, end=end))

    def put(self, name: str, data: bytes) -> None:
        """Put a file whole."""
        with contextlib.suppress(FileExistsError, NotImplementedError):
            self._files.makedirs(self._at(name).rsplit("/", 1)[0], exist_ok=True)
        self._files.pipe_file(self._at(name), data)

    def put_file(self, name: str, source: Path) -> None:
        """Put a file whole, read from this machine."""
        with contextlib.suppress(FileExistsError, NotImplementedError):
            self._files.makedirs(self._at(name).rsplit("/", 1)[0], exist_ok=True)
        self._files.put_file(str(source), self._at(name))

    def found(self) -> str:
        """Say what lies there."""
        return _few(self.names())

    def _at(self, name: str) -> str:
        return f"{self._root}/{name}" if name else str(self._root)


def folder(address: Address) -> Folder:
    """Return the folder at a path, a `file://` address or any address fsspec knows."""
    text = os.fspath(address)
    if not isinstance(address, str) or "://" not in text:
        return LocalFolder(Path(text).expanduser())
    if text.startswith("file://"):
        return LocalFolder(Path(text.removeprefix("file://")))
    return RemoteFolder(text)


def write_all(fd: int, data: bytes | memoryview) -> None:
    """Write every byte; the system may take fewer at a time than it is offered."""
    view = memoryview(data)
    while view.nbytes:
        view = view[os.write(fd, view) :]


def sync_directory(path: Path) -> None:
    """Make a rename outlast a power cut, where the file system has a way to."""
    with contextlib.suppress(OSError):
        fd = os.open(path, os.O_RDONLY)
        try:
            os.fsync(fd)
        finally:
            os.close(fd)


def _few(names: list[str]) -> str:
    if not names:
        return "that is an empty folder"
    return f"found {', '.join(map(repr, names[:5]))}" + (f" and {len(names) - 5} more" if len(names) > 5 else "")
