"""What an interrupted comparison had measured already.

    with Memory(place(folder, stamp(runs))) as memory:
        memory.known("layers.3 ...")        # Metrics, or None
        memory.keep("layers.3 ...", metrics)

One line of JSON per pair, each with a checksum, in a file named after the state of the runs, and removed once the
comparison is whole.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import time
from collections.abc import Iterable
from pathlib import Path
from types import TracebackType
from typing import IO, Any, final

from layerscope.compare.metrics import Metrics
from layerscope.store import MemoryRun, Run, strictjson
from layerscope.store.checksum import crc32c, text

__all__ = ["Memory", "place", "stamp"]

_EVERY = 1.0  # seconds between two writes
_VERSION = 1


def stamp(runs: Iterable[Run]) -> str | None:
    """Return a text that changes when any file of these runs does; None when one has no file on this machine."""
    digest = hashlib.sha256(f"{_VERSION}".encode())
    for run in runs:
        path = Path(run.path)
        found = [path] if path.is_file() else sorted(path.rglob("*")) if path.is_dir() else []
        if not found or isinstance(run, MemoryRun):
            return None
        for file in found:
            with contextlib.suppress(OSError):
                state = file.stat()
                digest.update(f"{file}\0{state.st_size}\0{state.st_mtime_ns}\n".encode(errors="surrogateescape"))
    return digest.hexdigest()


def place(folder: Path, stamped: str) -> Path:
    """Return where a comparison of these runs is remembered."""
    return folder / f"{stamped[:32]}.compare"


@final
class Memory:
    """Metrics by the pair's text; written at most once a second, and when the block ends before the work does."""

    def __init__(self, path: Path | None) -> None:
        self._path = path
        self._known: dict[str, Metrics] = {}
        self._unsaved: list[bytes] = []
        self._file: IO[bytes] | None = None
        self._saved = time.monotonic()
        self.resumed = 0

    def __enter__(self) -> Memory:
        if self._path is not None:
            with contextlib.suppress(OSError):
                self._known = dict(filter(None, map(_read, self._path.read_bytes().split(b"\n"))))
        return self

    def known(self, pair: str) -> Metrics | None:
        """Return what was measured of a pair before the interruption."""
        found = self._known.get(pair)
        self.resumed += found is not None
        return found

    def keep(self, pair: str, metrics: Metrics) -> None:
        """Remember what was measured."""
        if self._path is None:
            return
        self._unsaved.append(_line(pair, metrics))
        if time.monotonic() - self._saved > _EVERY:
            self._save()

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        if kind is not None and self._path is not None:
            self._save()
        with contextlib.suppress(OSError):  # a full disk is full once more
            if self._file is not None:
                self._file.close()
            if kind is None and self._path is not None:
                self._path.unlink(missing_ok=True)

    def _save(self) -> None:
        """Append the lines; a place that cannot be written to costs the resuming, not the comparison."""
        assert self._path is not None
        try:
            if self._file is None:
                fd = os.open(self._path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
                self._file = os.fdopen(fd, "ab")
            # A kill may have torn the last line: ours begins on one of its own.
            self._file.write(b"\n" + b"\n".join(self._unsaved) + b"\n")
            self._file.flush()
        except OSError:
            self._path = None
        self._unsaved, self._saved = [], time.monotonic()


def _line(pair: str, metrics: Metrics) -> bytes:
    value: Any = {"pair": pair, "metrics": metrics.to_json()}
    data = strictjson.dumps(value).encode()
    return text(crc32c(data)).encode() + b" " + data


def _read(line: bytes) -> tuple[str, Metrics] | None:
    check, _, data = line.partition(b" ")
    if not data or check != text(crc32c(data)).encode():
        return None
    try:
        value = strictjson.loads(data)
        return value["pair"], Metrics.from_json(value["metrics"])
    except (KeyError, TypeError, ValueError):  # whole, and of another version
        return None
