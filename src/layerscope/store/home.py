"""The place in a run that one rank writes to: found, locked and continued, or made.

    home = at("runs/fp32", rank=0)
    appender = home.begin(append=False)      # RunExists, RunBusy or NotARun rather than touch what is not ours
    home.put(manifest)                       # run.json

`LocalHome` is a folder on this machine, `RemoteHome` a spool in front of anything fsspec reaches.
"""

from __future__ import annotations

import contextlib
from abc import ABC, abstractmethod
from dataclasses import replace
from pathlib import Path
from typing import final

from layerscope.errors import Damaged, NotARun, RunExists
from layerscope.store.address import (
    Address,
    Folder,
    LocalFolder,
    RemoteFolder,
    folder,
    is_journal,
    journal_order,
    rank_folder,
    rank_of,
    segment_of,
)
from layerscope.store.appender import JOURNAL, Appender, Failure, Limits
from layerscope.store.journal import Journal, walk
from layerscope.store.manifest import NAME, Manifest
from layerscope.store.recovery import seal_leftovers
from layerscope.store.spool import Spool

__all__ = ["Home", "LocalHome", "RemoteHome", "at"]


class Home(ABC):
    """One rank's place in a run.

    After `begin`, `next_step` is one more than the largest step this rank recorded there before, and `before` what the
    earlier recordings said of themselves (None when there were none).
    """

    # Seconds without progress after which nobody waits any longer; an upload shows none until it is done.
    patience: float
    # Whether a segment that could not be sealed is still there for a reader.
    keeps_partials: bool

    def __init__(self, files: Folder, *, rank: int) -> None:
        self.address = files.address
        self.next_step = 0
        self.before: Manifest | None = None
        self._rank = rank
        self._under = rank_folder(rank)

    @abstractmethod
    def begin(self, *, append: bool, limits: Limits, failed: Failure) -> Appender:
        """Find, lock and go on behind what is there, or make the folder; leaves nothing behind when it raises."""

    @abstractmethod
    def undo(self, appender: Appender) -> None:
        """Take back what `begin` made, because `run.json` could not be written."""

    @abstractmethod
    def put(self, manifest: Manifest) -> None:
        """Write `run.json`, after everything that came before it."""

    @abstractmethod
    def finish(self) -> None:
        """Clean up after the last `put`."""

    @abstractmethod
    def leave_out(self, segment: Path) -> None:
        """Hear of a segment that could not be sealed."""

    @property
    def manifest_name(self) -> str:
        """Where this rank's own manifest is: rank 0's is the run's."""
        return NAME if self._rank == 0 else f"{self._under}/{NAME}"

    def _read_before(self, files: Folder, *, records: int) -> None:
        try:
            before = Manifest.loads(files.read(self.manifest_name))
        except (FileNotFoundError, Damaged):
            before = Manifest()
        self.before = replace(before, completeness=replace(before.completeness, records=records))


@final
class LocalHome(Home):
    """A folder on this machine."""

    patience = 60.0
    keeps_partials = True

    def __init__(self, files: LocalFolder, *, rank: int) -> None:
        super().__init__(files, rank=rank)
        self._files = files
        self._made: list[Path] = []

    def begin(self, *, append: bool, limits: Limits, failed: Failure) -> Appender:
        """Lock the journal; seal what a kill left there before going on."""
        if self._files.path.exists() and not self._files.path.is_dir():
            raise NotARun(f"{self.address} is a file; a run is a folder: record into a new one")
        _check_is_run(self._files, append=append)
        path = self._files.path / self._under
        self._made = _make_folders(path)
        journal = None
        try:
            journal = Journal(path / JOURNAL)
            record = segment = 0
            if journal.size == 0:
                self._made.append(journal.path)  # locked and empty: it is ours to remove
            else:
                if not append:
                    raise RunExists(_exists(self.address))
                left = seal_leftovers(journal, rank=self._rank)
                record, segment, self.next_step = left.next_record, left.next_segment, left.next_step
                self._read_before(self._files, records=left.lines)
            return Appender(journal, rank=self._rank, record=record, segment=segment, limits=limits, failed=failed)
        except BaseException:
            self._remove_made()
            if journal is not None:
                journal.close()
            raise

    def undo(self, appender: Appender) -> None:
        """Remove the folders and the journal that were made, while they are still locked."""
        self._remove_made()
        appender.disown()

    def put(self, manifest: Manifest) -> None:
        """Replace `run.json` whole; a rank other than 0 creates the run's where there is none yet."""
        self._files.put(self.manifest_name, manifest.dumps().encode())
        if self._rank != 0:
            self._files.put_new(NAME, like=self.manifest_name)

    def finish(self) -> None:
        """Leave everything as it is."""

    def leave_out(self, segment: Path) -> None:
        """Leave it in: readers find it by its other name."""

    def _remove_made(self) -> None:
        for path in reversed(self._made):
            with contextlib.suppress(OSError):
                path.unlink() if path.name == JOURNAL else path.rmdir()


@final
class RemoteHome(Home):
    """A spool on this machine, put away piece by piece; what could not be sealed there is never put."""

    patience = 120.0
    keeps_partials = False

    def __init__(self, files: RemoteFolder, *, rank: int) -> None:
        super().__init__(files, rank=rank)
        self._files = files
        self._spool: Spool | None = None

    def begin(self, *, append: bool, limits: Limits, failed: Failure) -> Appender:
        """Read how far the earlier parts go, and spool what comes after."""
        _check_is_run(self._files, append=append)
        names = self._files.names(self._under)
        if names and not append:
            raise RunExists(_exists(self.address))
        journals = sorted(filter(is_journal, names), key=journal_order)
        records = [
            line.record
            for name in journals
            for line in walk(self._files, f"{self._under}/{name}", whole=True)
            if line.record is not None
        ]
        self.next_step = max((r.step for r in records), default=-1) + 1
        if journals:
            self._read_before(self._files, records=len(records))
        part = journal_order(journals[-1]) + 1 if journals else 0
        self._spool = Spool(self._files, rank=self._rank, part=part)
        try:
            (self._spool.path / self._under).mkdir()
            return Appender(
                Journal(self._spool.path / self._under / JOURNAL),
                rank=self._rank,
                record=max((r.record for r in records), default=-1) + 1,
                segment=max((found[0] for name in names if (found := segment_of(name))), default=-1) + 1,
                limits=limits,
                lined=self._spool.line,
                sealed=self._spool.sealed,
                failed=failed,
            )
        except BaseException:
            self._spool.remove()
            raise

    def undo(self, appender: Appender) -> None:
        """Remove the spool."""
        appender.disown()
        if self._spool is not None:
            self._spool.remove()

    def put(self, manifest: Manifest) -> None:
        """Put `run.json` last; raises OSError when something before it cannot be put, and says where that is kept."""
        data = manifest.dumps().encode()
        if self._spool is not None:
            LocalFolder(self._spool.path).put(NAME, data)
            self._spool.put_lines()
            if self._spool.error is not None:
                raise OSError(f"{self._spool.error}; what was not put is kept in {self._spool.path}")
        self._files.put(self.manifest_name, data)
        if self._rank != 0 and NAME not in self._files.names():
            self._files.put(NAME, data)

    def finish(self) -> None:
        """Remove the spool: everything in it is on the other side."""
        if self._spool is not None:
            self._spool.remove()

    def leave_out(self, segment: Path) -> None:
        """Put no line that speaks of this segment."""
        if self._spool is not None:
            self._spool.leave_out(segment)


def at(address: Address, *, rank: int) -> LocalHome | RemoteHome:
    """Return the place of one rank in the run at an address."""
    files = folder(address)
    if isinstance(files, RemoteFolder):
        return RemoteHome(files, rank=rank)
    assert isinstance(files, LocalFolder)
    return LocalHome(files, rank=rank)


def _exists(address: str) -> str:
    return f"{address} already holds a run; record into another folder, add to it with append=True, or remove it first"


def _check_is_run(files: Folder, *, append: bool) -> None:
    """Refuse to write into anything that is neither empty nor a run; nothing of it is touched."""
    names = files.names()
    if not names or any(rank_of(name) is not None for name in names):
        return
    try:
        Manifest.loads(files.read(NAME))
    except (FileNotFoundError, IsADirectoryError, Damaged):
        raise NotARun(
            f"{files.address} is not empty and is not a run: {files.found()}; record into a new folder"
        ) from None
    if not append:
        raise RunExists(_exists(files.address))


def _make_folders(path: Path) -> list[Path]:
    """Make a folder and those above it; return the ones that were not there, the outermost first."""
    missing = [path]
    while not missing[-1].parent.exists():
        missing.append(missing[-1].parent)
    made = [folder for folder in reversed(missing) if not folder.exists()]
    path.mkdir(parents=True, exist_ok=True)
    return made
