"""A run elsewhere is a run on this machine with an uploader: recorded into a spool, put segment by segment.

    destination = RemoteDestination(RemoteFolder("s3://bucket/runs/fp32"), rank=0)
    appender = destination.begin(append=False, ...)
    destination.flush(appender)     # seals, and returns when the object is there

While the other side cannot be reached recording goes on; what is not there in the end is kept in the spool, and
`layerscope recover SPOOL --to s3://bucket/runs/fp32` puts it.
"""

from __future__ import annotations

import contextlib
import shutil
import tempfile
import threading
from collections import deque
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import final

from layerscope.errors import Damaged, RunExists
from layerscope.store.address import LocalFolder, RemoteFolder, claim_name, segment
from layerscope.store.appender import Appender, Failed, Limits
from layerscope.store.columns import TableRow
from layerscope.store.destination import Destination, check_is_run, exists, holds_records
from layerscope.store.disk import opened, said_of
from layerscope.store.manifest import Completeness, Manifest
from layerscope.store.rank_lock import RankLock
from layerscope.store.uploader import CLAIM, TOGETHER, Uploader, put_claim


@final
class RemoteDestination(Destination):
    """One rank's folder in a run elsewhere, and its spool."""

    patience = 120.0  # an upload shows no progress until it is done

    def __init__(self, files: RemoteFolder, *, rank: int) -> None:
        super().__init__(LocalFolder(Path(tempfile.mkdtemp(prefix="layerscope-spool-"))), rank=rank)
        self.address = files.address
        self._remote = files
        self._changed = threading.Condition()
        self._waiting: deque[tuple[int, int, int]] = deque()  # sealed, and not there
        self._unsealed: set[int] = set()
        self._asked = self._tried = 0
        self._error: Exception | None = None
        self._is_over = self._is_there = False
        self._claim: int | None = None
        self._uploader: Uploader | None = None
        self._thread: threading.Thread | None = None

    @property
    def kept(self) -> str:
        """Say where to find what is not there."""
        spool = self._files.address
        return f"; it is kept in {spool}: `layerscope recover {spool} --to {self.address}` puts it"

    def begin(self, *, append: bool, limits: Limits, failed: Failed) -> Appender:
        """Claim the folder, and go on behind what is there; leaves nothing behind when it raises."""

        def unsealed(number: int, error: Exception, gone: Sequence[TableRow]) -> None:
            self._unsealed.add(number)
            failed(number, error, gone)

        try:
            self._remote.forget()
            check_is_run(self._remote, append=append)
            record = number = 0
            if holds_records(self._remote, self._under):
                if not append:
                    raise RunExists(exists(self.address))
                record, number = self._go_on()
            self._claim, says = put_claim(self._remote, self._rank, append=append)
            path = self._files.path / self._under
            path.mkdir()
            self._lock = RankLock(path)
            self._files.put(f"{self._under}/{CLAIM}", says)
            self._uploader = Uploader(self._remote, self._files, rank=self._rank, claim=self._claim)
            self._uploader.segments = self.segments
            appender = Appender(
                path, rank=self._rank, record=record, number=number, limits=limits, sealed=self.sealed, failed=unsealed
            )
        except BaseException:
            self._take_back()
            raise
        self._thread = threading.Thread(target=self._upload, name="layerscope-uploader", daemon=True)
        self._thread.start()
        return appender

    def _go_on(self) -> tuple[int, int]:
        """Return the next record and the next segment's number, and take over what was said of the run."""
        there, _ = opened(self._remote, [self._rank])
        tables = [each.table for each in there if each.table.rows]
        self.segments = said_of(there)
        self.next_step = max((int(table.array("step").max()) for table in tables), default=-1) + 1
        known = Manifest(started="", completeness=Completeness(state="unknown"))
        with contextlib.suppress(FileNotFoundError, Damaged):
            known = Manifest.loads(self._remote.read(self.manifest_name))
        records = sum(table.rows for table in tables)
        self.before = replace(known, completeness=replace(known.completeness, records=records))
        record = max((int(table.array("record").max()) for table in tables), default=-1) + 1
        return record, max((each.name.last for each in there), default=-1) + 1

    def sealed(self, number: int, records: int, size: int) -> None:
        """Hear of a segment that was sealed, and have it put."""
        self._unsealed.discard(number)
        with self._changed:
            self._waiting.append((number, records, size))
            self._asked += 1
            self._changed.notify_all()

    def flush(self, appender: Appender) -> None:
        """Seal, and return when everything is there; raises OSError that says what is not. Does nothing twice."""
        appender.seal()
        if self._waiting or self._unsealed:
            self._wait()

    def put(self, manifest: Manifest) -> None:
        """Put `run.json` when all that it speaks of is there; at the end the small segments are merged before."""
        self._files.put(self.manifest_name, replace(manifest, segments={}).dumps().encode())
        self._wait()
        assert self._uploader is not None
        try:
            is_over = manifest.completeness.state != "recording"
            if is_over:
                with contextlib.suppress(OSError):  # the small ones are there
                    self._uploader.merge()
            self._uploader.put_manifest(manifest)
        except Exception as error:
            raise OSError(f"{error}{self.kept}") from error
        self._is_there = is_over

    def undo(self, appender: Appender) -> None:
        """Take back the claim and the spool, because `run.json` could not be put."""
        appender.close()
        self._take_back()

    def finish(self) -> None:
        """Stop uploading, unlock, and remove the spool when everything in it is there."""
        with self._changed:
            self._is_over = True
            self._changed.notify_all()
        super().finish()
        if self._is_there:
            shutil.rmtree(self._files.path, ignore_errors=True)

    def _take_back(self) -> None:
        if self._claim is not None:
            with contextlib.suppress(OSError):
                self._remote.remove([f"{self._under}/{claim_name(self._claim)}"])
        self._is_there = True
        self.finish()

    # The uploader's thread ----------------------------------------------------------------------

    def _wait(self) -> None:
        """Wait until everything that was sealed was tried once more; raises OSError for what is not there then."""
        with self._changed:
            self._asked += 1
            asked = self._asked
            self._changed.notify_all()
            self._changed.wait_for(lambda: self._tried >= asked)
            error, waiting = self._error, [number for number, _, _ in self._waiting]
        missing = sorted([*waiting, *self._unsealed])
        if missing:
            why = "it could not be sealed" if error is None else str(error)
            raise OSError(f"{segment(missing[0])} and what follows is not there ({why}){self.kept}") from error

    def _upload(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._tried < self._asked or self._is_over)
                if self._is_over:
                    return
                asked = self._asked
            error = self._put_waiting()
            with self._changed:
                self._error, self._tried = error, asked
                self._changed.notify_all()

    def _put_waiting(self) -> Exception | None:
        """Put what waits, the oldest first; return why that stopped."""
        assert self._uploader is not None
        try:
            while self._waiting:
                self._uploader.put(*self._waiting[0])
                self._waiting.popleft()
                if len(self._uploader.small) >= TOGETHER:
                    with contextlib.suppress(OSError):  # tried again with the next one
                        self._uploader.merge()
        except Exception as error:
            return error
        return None
