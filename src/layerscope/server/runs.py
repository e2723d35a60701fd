"""Which runs there are below a folder, under ids that tell nothing of paths.

runs = Runs("runs")
runs.found()                 # newest first
runs.path(id)                # None for an id that is not ours
"""

from __future__ import annotations

import hashlib
import os
import secrets
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import final

from layerscope.errors import LayerscopeError
from layerscope.store import Manifest
from layerscope.store.manifest import NAME
from layerscope.store.rank_lock import being_written

DEEP = 6  # folders below the one that is served
MOST = 20_000  # folders that are looked into
LARGEST = 256 << 20  # bytes of a manifest

_Stamp = tuple[tuple[str, int, int], ...]


@dataclass(frozen=True, slots=True)
class Found:
    """A run: its id, where it is, what it is called, and what it says of itself; None where that does not read."""

    id: str
    path: Path
    name: str
    manifest: Manifest | None
    changed: float


@final
class Runs:
    """The runs below a folder; looked for anew each time, read again when their manifests change."""

    def __init__(self, folder: str | os.PathLike[str]) -> None:
        self.folder = Path(folder).resolve()
        self._key = secrets.token_bytes(16)
        self._known: dict[str, Path] = {}
        self._manifests: dict[Path, tuple[tuple[int, int], Manifest | None]] = {}
        self._lock = threading.Lock()

    def found(self) -> list[Found]:
        """Return the runs, those that changed last first."""
        with self._lock:
            runs = [self._one(path) for path in self._paths()]
            self._known = {run.id: run.path for run in runs}
            self._manifests = {run.path: self._manifests[run.path] for run in runs}
        return sorted(runs, key=lambda run: (-run.changed, run.name))

    def path(self, id: str) -> Path | None:
        """Return where a run is; None for what is not one of ours."""
        with self._lock:
            known = self._known.get(id)
        if known is None and id:
            self.found()
            with self._lock:
                known = self._known.get(id)
        return known

    def name(self, path: Path) -> str:
        """Return what a run is called: its path below the folder."""
        return str(path.relative_to(self.folder)) if path != self.folder else path.name

    def stamp(self) -> str:
        """Return a text that changes when a run comes, goes, or says something else of itself."""
        return _digest(tuple((run.id, int(run.changed * 1000), 0) for run in self.found()))

    def _paths(self) -> Iterator[Path]:
        """Go through the folders; no link is followed, so that nothing outside is served."""
        waiting, looked = [(self.folder, 0)], 0
        while waiting and looked < MOST:
            path, depth = waiting.pop()
            looked += 1
            try:
                entries = list(os.scandir(path))
            except OSError:
                continue
            names = {entry.name for entry in entries}
            if NAME in names or any(name.startswith("rank-") for name in names):
                yield path
            elif depth < DEEP:
                folders = [e for e in entries if e.is_dir(follow_symlinks=False) and not e.name.startswith(".")]
                waiting += [(Path(entry.path), depth + 1) for entry in folders]

    def _one(self, path: Path) -> Found:
        file = path / NAME
        try:
            state = file.stat()
            mark = (state.st_size, state.st_mtime_ns)
        except OSError:
            mark = (0, 0)
        known = self._manifests.get(path)
        if known is None or known[0] != mark:
            self._manifests[path] = (mark, _manifest(file) if 0 < mark[0] <= LARGEST else None)
        id = hashlib.blake2b(os.fsencode(path), digest_size=12, key=self._key).hexdigest()
        changed = max((mtime for _, _, mtime in _files(path)), default=mark[1])
        return Found(id, path, self.name(path), self._manifests[path][1], changed / 1e9)


def _manifest(file: Path) -> Manifest | None:
    try:
        return Manifest.loads(file.read_bytes())
    except (LayerscopeError, OSError):
        return None


def _files(path: Path) -> _Stamp:
    """Return name, size and time of what grows while a run is written: manifests, segments and journals, alarms."""
    found = []
    try:
        for entry in os.scandir(path):
            if entry.is_file(follow_symlinks=False):
                found.append(entry)
            elif entry.name.startswith("rank-") and entry.is_dir(follow_symlinks=False):
                found += list(os.scandir(entry.path))
        stats = [(entry.path, entry.stat(follow_symlinks=False)) for entry in found]
    except OSError:
        return ()
    return tuple(sorted((name, state.st_size, state.st_mtime_ns) for name, state in stats))


def state_of(path: Path) -> str:
    """Return a text that changes when a run has grown, ended, lost its writer, or was sealed."""
    return _digest((*_files(path), (str(being_written(path)), 0, 0)))


def _digest(value: _Stamp) -> str:
    return hashlib.blake2b(repr(value).encode("utf-8", "surrogateescape"), digest_size=12).hexdigest()
