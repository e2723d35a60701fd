"""The place in a run that one rank writes to: found, locked and continued, or made.

destination = Destination(LocalFolder("runs/fp32"), rank=0)
appender = destination.begin(append=False)     # RunExists, RunBusy or NotARun rather than touch what is not ours
destination.put(manifest)                      # run.json
destination.finish()                           # unlocks
"""

from __future__ import annotations

import contextlib
from dataclasses import replace
from pathlib import Path

from layerscope.errors import Damaged, NotARun, RunExists, Unsupported
from layerscope.store.address import Folder, LocalFolder, claim_of, rank_folder, rank_of, segment, segment_of
from layerscope.store.appender import Appender, Failed, Limits
from layerscope.store.manifest import NAME, Completeness, Manifest
from layerscope.store.rank_lock import LOCK, RankLock
from layerscope.store.recovery import seal_leftovers, together


class Destination:
    """One rank's folder in a run on this machine.

    After `begin`, `next_step` is one more than the largest step this rank recorded there before, and `before` what the
    earlier recordings said of themselves (None when there were none).
    """

    # Seconds without progress after which waiting ends.
    patience = 60.0

    def __init__(self, files: LocalFolder, *, rank: int) -> None:
        self.address = files.address
        self.next_step = 0
        self.before: Manifest | None = None
        self.segments: dict[str, list[int]] = {}
        self._files, self._rank, self._under = files, rank, rank_folder(rank)
        self._made: list[Path] = []
        self._lock: RankLock | None = None

    def begin(self, *, append: bool, limits: Limits, failed: Failed) -> Appender:
        """Lock the folder; seal what a kill left there before going on. Leaves nothing behind when it raises."""
        if self._files.path.exists() and not self._files.path.is_dir():
            raise NotARun(f"{self.address} is a file; a run is a folder: record into a new one")
        check_is_run(self._files, append=append)
        path = self._files.path / self._under
        if path.is_symlink():
            raise Damaged(f"{path} is a link; the files of a run lie in its own folders")
        self._made = _make_folders(path)
        try:
            there = (path / LOCK).exists()
            self._lock = RankLock(path)
            if not there:
                self._made.append(path / LOCK)
            record = number = 0
            if holds_records(self._files, self._under):
                if not append:
                    raise RunExists(exists(self.address))
                self._check_unclaimed()
                known = self._read_manifest()
                left = seal_leftovers(path, rank=self._rank, known=known)
                record, number, self.next_step = left.next_record, left.next_segment, left.next_step
                was = known or Manifest(started="", completeness=Completeness(state="unknown"))
                done = was.completeness
                dropped = together(done.dropped, left.losses.values())
                self.before = replace(was, completeness=replace(done, records=left.records, dropped=dropped))
                self.segments = was.segments | left.segments
            return Appender(
                path, rank=self._rank, record=record, number=number, limits=limits, sealed=self.sealed, failed=failed
            )
        except BaseException:
            self._remove_made()
            if self._lock is not None:
                self._lock.release()
            raise

    @property
    def manifest_name(self) -> str:
        """Where this rank's own manifest is: rank 0's is the run's."""
        return NAME if self._rank == 0 else f"{self._under}/{NAME}"

    @property
    def kept(self) -> str:
        """Say where to find what could not be written; nothing where that is in the run itself."""
        return ""

    def sealed(self, number: int, records: int, size: int) -> None:
        """Hear of a segment that was sealed."""
        self.segments[segment(number)] = [records, size]

    def undo(self, appender: Appender) -> None:
        """Take back what `begin` made, because `run.json` could not be written."""
        appender.close()
        self._remove_made()
        self.finish()

    def put(self, manifest: Manifest) -> None:
        """Replace `run.json` whole; a rank other than 0 creates the run's where there is none yet."""
        ranks = manifest.ranks or self._ranks_there()
        data = replace(manifest, segments=self.segments, ranks=ranks).dumps().encode()
        self._files.put(self.manifest_name, data)
        if self._rank != 0:
            self._files.put_new(NAME, like=self.manifest_name)

    def _ranks_there(self) -> int | None:
        """Return how many ranks have begun, where they are the first so many: a job may record on some of its ranks."""
        there = sorted(rank for name in self._files.names() if (rank := rank_of(name)) is not None)
        return len(there) if there == list(range(len(there))) else None

    def flush(self, appender: Appender) -> None:
        """Do nothing: what is written is acknowledged."""

    def finish(self) -> None:
        """Unlock."""
        if self._lock is not None:
            self._lock.release()

    def disown(self) -> None:
        """Close the lock without unlocking, in a forked child."""
        if self._lock is not None:
            self._lock.disown()

    def _check_unclaimed(self) -> None:
        if any(found.claim for name in self._files.names(self._under) if (found := segment_of(name)) is not None):
            raise Unsupported(
                f"{self.address} is a copy of a run that was recorded elsewhere, more than once; append to it there"
            )

    def _read_manifest(self) -> Manifest | None:
        try:
            return Manifest.loads(self._files.read(self.manifest_name))
        except (FileNotFoundError, Damaged):
            return None

    def _remove_made(self) -> None:
        for path in reversed(self._made):
            with contextlib.suppress(OSError):
                path.unlink() if path.name == LOCK else path.rmdir()


def exists(address: str) -> str:
    """Return the sentence for a run that is there already."""
    return f"{address} already holds a run; record into another folder, add to it with append=True, or remove it first"


def holds_records(files: Folder, under: str) -> bool:
    """Whether a rank's folder has anything of a recording in it."""
    return any(segment_of(name) is not None or claim_of(name) is not None for name in files.names(under))


def check_is_run(files: Folder, *, append: bool) -> None:
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
        raise RunExists(exists(files.address))


def _make_folders(path: Path) -> list[Path]:
    """Make a folder and those above it; return the ones that were not there, the outermost first."""
    missing = [path]
    while not missing[-1].parent.exists():
        missing.append(missing[-1].parent)
    made = [folder for folder in reversed(missing) if not folder.exists()]
    path.mkdir(parents=True, exist_ok=True)
    return made
