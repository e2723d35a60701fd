"""Where a run lies: a folder on this machine, or anything fsspec can reach.

    folder("runs/fp32")             # LocalFolder; so are a Path and file:///runs/fp32
    folder("s3://bucket/fp32")      # RemoteFolder; fsspec is imported here and nowhere else

Names inside a run are fixed or numbered, and joined with `/`; nothing a model is called becomes a path.
"""

from __future__ import annotations

import contextlib
import errno
import os
import re
import stat
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple, final

from layerscope.errors import Damaged, LayerscopeError, MissingExtra, NotARun
from layerscope.store.checksum import Bytes, bytes_of

Address = str | os.PathLike[str]

SEALED = ".safetensors"
PARTIAL = ".partial"
JOURNAL = ".journal"

READING = os.O_RDONLY
WRITING = os.O_RDWR
_SAFELY = getattr(os, "O_CLOEXEC", 0) | getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_NONBLOCK", 0)

# How the system calls file systems that several machines have.
_SHARED = ("nfs", "cifs", "smb", "fuse", "9p", "afs", "ceph", "lustre", "gpfs", "beegfs", "glusterfs", "virtiofs")

_RANK = re.compile(r"rank-(\d{5,9})")
_SEGMENT = re.compile(r"segment-(\d{5,9})(?:-(\d{5,9}))?(?:\.claim-(\d{5,9}))?(\.safetensors|\.partial|\.journal)")
_CLAIM = re.compile(r"claim-(\d{5,9})")
_OURS = re.compile(r"(rank-\d{5,9}/.*|run\.json)")


def rank_folder(rank: int) -> str:
    """Return the name of a rank's folder."""
    return f"rank-{rank:05d}"


def rank_of(name: str) -> int | None:
    """Return the rank whose folder `name` is, None for any other name."""
    match = _RANK.fullmatch(name)
    return int(match[1]) if match else None


class SegmentName(NamedTuple):
    """What a segment's file name says: its number, the last one merged into it, its writer's claim, and the suffix."""

    number: int
    last: int
    claim: int
    kind: str
    stem: str


def segment(number: int, *, last: int | None = None, claim: int = 0) -> str:
    """Return the name of a segment, without the suffix that tells a sealed one from a partial one."""
    merged = "" if last in (None, number) else f"-{last:05d}"
    return f"segment-{number:05d}{merged}" + (f".claim-{claim:05d}" if claim else "")


def segment_of(name: str) -> SegmentName | None:
    """Read the name of a segment's file; None for any other name."""
    match = _SEGMENT.fullmatch(name)
    if match is None:
        return None
    number, suffix = int(match[1]), match[4]
    return SegmentName(number, int(match[2] or number), int(match[3] or 0), suffix, name.removesuffix(suffix))


def claim_name(claim: int) -> str:
    """Return the name of the object by which a writer elsewhere claims a rank's folder."""
    return f"claim-{claim:05d}"


def claim_of(name: str) -> int | None:
    """Return the number of a claim, None for any other name."""
    match = _CLAIM.fullmatch(name)
    return int(match[1]) if match else None


def open_regular(path: Path | str, flags: int) -> int:
    """Open a file of a run: a regular one, reached by no link; for writing, one that has no second name.

    A stranger's run may hold links to any file of ours, and a pipe without a writer.
    """
    folder = os.path.dirname(path)  # noqa: PTH120  (a column is read in less time than a Path takes)
    if _RANK.fullmatch(os.path.basename(folder)) and stat.S_ISLNK(os.lstat(folder).st_mode):  # noqa: PTH119
        raise Damaged(f"{folder} is a link; the files of a run lie in its own folders")
    try:
        fd = os.open(path, flags | _SAFELY, 0o666)
    except OSError as error:
        if error.errno == errno.ELOOP:
            raise Damaged(f"{path} is a link; the files of a run are opened as they are") from None
        if error.errno == errno.ENXIO:
            raise Damaged(f"{path} is not a regular file") from None
        raise
    try:
        found = os.fstat(fd)
        if not stat.S_ISREG(found.st_mode):
            raise Damaged(f"{path} is not a regular file")
        if flags & os.O_RDWR and found.st_nlink > 1:
            raise Damaged(f"{path} has a second name somewhere; it is not written to")
    except BaseException:
        os.close(fd)
        raise
    return fd


def others_may_cut(found: os.stat_result) -> bool:
    """Tell whether a file can get shorter by another user, or another machine."""
    theirs = hasattr(os, "geteuid") and found.st_uid not in (0, os.geteuid())
    return theirs or bool(found.st_mode & stat.S_IWOTH) or _is_shared(found.st_dev)


@cache
def _is_shared(device: int) -> bool:
    """Tell whether other machines have the file system too; where nothing says so, they have not."""
    number = f"{os.major(device)}:{os.minor(device)}"
    with contextlib.suppress(OSError), Path("/proc/self/mountinfo").open(encoding="utf-8", errors="replace") as mounts:
        return any(
            words[2] == number and words[words.index("-") + 1].startswith(_SHARED) for words in map(str.split, mounts)
        )
    return False


class OpenFile(NamedTuple):
    """A file that is open: its size, and what fills a buffer from an offset and says how far."""

    size: int
    fill: Callable[[Bytes, int], int]


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
    def reading(self, name: str) -> AbstractContextManager[OpenFile]:
        """Open a file, to read stretches of it into memory that is there."""

    @abstractmethod
    def put(self, name: str, data: bytes) -> None:
        """Write a whole file, so that a reader sees the old one or the new one."""

    @abstractmethod
    def forget(self) -> None:
        """List anew when next asked."""

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
        with self.opened(name) as fd:
            return pread(fd, offset, length)

    @contextlib.contextmanager
    def opened(self, name: str) -> Iterator[int]:
        """Open a file for reading; those of a run of our own are opened without following links."""
        fd = self._open(name)
        try:
            yield fd
        finally:
            os.close(fd)

    @contextlib.contextmanager
    def reading(self, name: str) -> Iterator[OpenFile]:
        """Open a file; what fills a buffer makes no copy."""
        with self.opened(name) as fd:

            def fill(buffer: Bytes, offset: int) -> int:
                done = 0
                while done < buffer.size and (got := os.preadv(fd, [buffer[done:].data], offset + done)):
                    done += got  # the system gives at most 2 GiB at a time
                return done

            yield OpenFile(os.fstat(fd).st_size, fill)

    def _open(self, name: str) -> int:
        path = f"{self.address}/{name}"
        if _OURS.fullmatch(name):
            return open_regular(path, READING)
        fd = os.open(path, READING | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_CLOEXEC", 0))
        if not stat.S_ISREG(os.fstat(fd).st_mode):
            os.close(fd)
            raise IsADirectoryError(errno.EISDIR, "that is not a regular file", path)
        return fd

    def put(self, name: str, data: bytes) -> None:
        """Write beside the file, then rename over it: a kill leaves the old file or the new one."""
        path = self.path / name
        beside = path.with_name(path.name + PARTIAL)
        try:
            with contextlib.suppress(FileNotFoundError):  # what a kill left, or a link that was put there
                beside.unlink()
            fd = open_regular(beside, WRITING | os.O_CREAT | os.O_EXCL)
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

    def forget(self) -> None:
        """Do nothing: a folder is listed whenever it is asked for."""

    def found(self) -> str:
        """Say what lies there."""
        if not self.path.exists():
            return "there is nothing there"
        if not self.path.is_dir():
            return "that is a file"
        return _few(self.names())


@final
class RemoteFolder(Folder):
    """A run in an object store or any other place fsspec reaches; files are put whole and never appended to.

    What was listed is remembered until `forget`: a run is listed once, however many ranks it has. What the file
    system raises that is no OSError, and each has its own kind, becomes one.
    """

    def __init__(self, address: str) -> None:
        try:
            import fsspec
        except ImportError as error:
            raise MissingExtra(
                f"{address!r} is not a local path, and reading other places takes fsspec: pip install fsspec"
            ) from error
        self.address = address.rstrip("/")
        self.sends_whole = False  # a server without Range
        self._listed: dict[str, dict[str, int | None]] = {}
        self._url_to_fs = fsspec.core.url_to_fs
        self._connected: tuple[int, Any] = (-1, None)
        try:
            _, self._root = self._url_to_fs(self.address)
        except OSError:
            raise
        except Exception as error:
            raise NotARun(f"fsspec cannot reach {address!r}: {error}") from error

    @property
    def _files(self) -> Any:
        """The file system; a forked child has its own, as connections and their thread are the parent's."""
        if self._connected[0] != os.getpid():
            self._connected = os.getpid(), self._url_to_fs(self.address)[0]
        return self._connected[1]

    def forget(self) -> None:
        """List anew when next asked."""
        self._listed = {}

    def names(self, under: str = "") -> list[str]:
        """Return what lies there, sorted."""
        if under not in self._listed:
            with self._reaching(under):
                self._files.invalidate_cache()
                self._list(under)
        return sorted(self._listed[under])

    def _list(self, under: str) -> None:
        try:
            listing = self._files.ls(self._at(under), detail=True)
        except (FileNotFoundError, NotADirectoryError):
            listing = []
        found = {_last(each["name"]): each.get("size") for each in listing}
        self._listed[under] = found
        if under or not any(rank_of(name) is not None for name in found) or "http" in self._files.protocol:
            return  # through pages of links, only to where one is known to be
        self._listed |= {name: {} for name in found if rank_of(name) is not None}
        root = f"{self._root}/".lstrip("/")
        for path, each in self._files.find(self._at(""), detail=True).items():
            rank, _, name = str(path).lstrip("/").removeprefix(root).rpartition("/")
            if rank in self._listed:
                self._listed[rank][name] = each.get("size")

    def size(self, name: str) -> int:
        """Return a file's size, as the last listing had it where there was one."""
        size = self._listed_size(name)
        if size is None:
            with self._reaching(name):
                size = self._files.size(self._at(name))
        if size is None:
            raise OSError(f"{self.address}/{name}: the server does not say how long it is")
        return int(size)

    def read(self, name: str, *, offset: int = 0, length: int | None = None) -> bytearray:
        """Fetch a stretch of a file, and only that; a server without Range sends the whole, which is remembered."""
        if offset == 0 and length is None and self._listed_size(name) != 0:
            with self._reaching(name):
                return bytearray(self._files.cat_file(self._at(name), start=0))  # its size is not asked for first
        size = self.size(name)
        end = size if length is None else min(offset + length, size)
        if offset >= end:
            return bytearray()
        with self._reaching(name):
            data = self._files.cat_file(self._at(name), start=offset, end=end)
        if len(data) == size != end - offset:
            self.sends_whole = True
            data = memoryview(data)[offset:end]
        return bytearray(data)

    @contextlib.contextmanager
    def reading(self, name: str) -> Iterator[OpenFile]:
        """Return what fetches stretches of a file."""

        def fill(buffer: Bytes, offset: int) -> int:
            data = self.read(name, offset=offset, length=buffer.size)
            buffer[: len(data)] = bytes_of(data)
            return len(data)

        yield OpenFile(self.size(name), fill)

    def _listed_size(self, name: str) -> int | None:
        under, _, last = name.rpartition("/")
        listed = self._listed.get(under)
        if listed is not None and last not in listed:
            raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), f"{self.address}/{name}")
        return None if listed is None else listed[last]

    def put(self, name: str, data: bytes) -> None:
        """Put a file whole."""
        self._put(name, lambda path: self._files.pipe_file(path, data))

    def put_new(self, name: str, data: bytes) -> bool:
        """Put a file whole where its name is free; return whether it was."""
        try:
            self._put(name, lambda path: self._files.pipe_file(path, data, mode="create"))
        except FileExistsError:
            return False
        return True

    def put_file_new(self, name: str, source: Path) -> bool:
        """Put a file of this machine whole where its name is free; return whether it was."""
        try:
            self._put(name, lambda path: self._files.put_file(str(source), path, mode="create"))
        except FileExistsError:
            return False
        return True

    def _put(self, name: str, put: Callable[[str], object]) -> None:
        path = self._at(name)
        with self._reaching(name):
            try:
                put(path)
            except FileNotFoundError:  # a place with folders; an object store has none to make
                self._files.makedirs(path.rsplit("/", 1)[0], exist_ok=True)
                put(path)
        self.forget()

    def remove(self, names: Sequence[str]) -> None:
        """Delete files; those that are gone already do not matter."""
        paths = [self._at(name) for name in names]
        with self._reaching(""):
            try:
                self._files.rm(paths)
            except FileNotFoundError:
                for path in paths:
                    with contextlib.suppress(FileNotFoundError):
                        self._files.rm(path)
        self.forget()

    def found(self) -> str:
        """Say what lies there."""
        return _few(self.names())

    def _at(self, name: str) -> str:
        return f"{self._root}/{name}" if name else str(self._root)

    @contextlib.contextmanager
    def _reaching(self, name: str) -> Iterator[None]:
        try:
            yield
        except FileNotFoundError as error:
            under, _, last = name.rpartition("/")
            if last not in self._listed.get(under, ()):
                raise
            why = "it was there when it was listed, and was merged since, or removed: refresh() looks again"
            raise FileNotFoundError(errno.ENOENT, why, f"{self.address}/{name}") from error
        except (OSError, LayerscopeError):
            raise
        except Exception as error:
            where = f"{self.address}/{name}".rstrip("/")
            raise OSError(f"{where} cannot be reached: {type(error).__name__}: {error}") from error


def _last(path: object) -> str:
    return str(path).rstrip("/").rsplit("/", 1)[-1]


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


def pread(fd: int, offset: int, length: int | None) -> bytearray:
    """Return a stretch of an open file, shorter where the file ends."""
    left = max(0, os.fstat(fd).st_size - offset)
    data = bytearray(left if length is None else min(length, left))
    with memoryview(data) as view:
        done = 0
        while done < len(data) and (got := os.preadv(fd, [view[done:]], offset + done)):
            done += got  # the system gives at most 2 GiB at a time
    del data[done:]
    return data


def sync_directory(path: Path) -> bool:
    """Make a rename outlast a power cut; False where that failed. A file system that has no such way counts as done."""
    try:
        fd = os.open(path, os.O_RDONLY)
        try:
            os.fsync(fd)
        finally:
            os.close(fd)
    except OSError as error:
        return error.errno in (errno.EINVAL, errno.ENOTSUP)
    return True


def _few(names: list[str]) -> str:
    if not names:
        return "that is an empty folder"
    return f"found {', '.join(map(repr, names[:5]))}" + (f" and {len(names) - 5} more" if len(names) > 5 else "")
