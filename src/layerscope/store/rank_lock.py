"""The lock that a rank's one writer holds: against a second writer, `append` and `recover` beside it.

    with RankLock(folder): ...

    being_written(run)              # whether any rank has a writer, alive

The file is never deleted: a lock on a deleted file locks nothing.
"""

from __future__ import annotations

import contextlib
import os
import time
from pathlib import Path
from typing import final

from layerscope.errors import RunBusy
from layerscope.store.address import WRITING, open_regular

LOCK = "lock"
PATIENCE = (0.01, 0.05, 0.2, 0.0)  # seconds between tries: who asks whether there is a writer holds it for a moment


@final
class RankLock:
    """Held from its making until `release`; raises RunBusy when another process has it."""

    def __init__(self, folder: Path) -> None:
        self.path = folder / LOCK
        self._fd = open_regular(self.path, WRITING | os.O_CREAT)
        for wait in PATIENCE:
            try:
                import fcntl

                fcntl.flock(self._fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
                return
            except BlockingIOError:
                time.sleep(wait)
            except (ImportError, OSError):
                return  # a system without such locks; they guard against a mistake, not against an attack
        self.disown()
        raise RunBusy(f"another process is writing {folder}; wait until it has ended, or record into another folder")

    def __enter__(self) -> RankLock:
        return self

    def __exit__(self, *_: object) -> None:
        self.release()

    def release(self) -> None:
        """Unlock and close: a child that was forked meanwhile may still have the file open, and the lock with it."""
        if self._fd >= 0:
            with contextlib.suppress(ImportError, OSError):
                import fcntl

                fcntl.flock(self._fd, fcntl.LOCK_UN)
            self.disown()

    def disown(self) -> None:
        """Close without unlocking, in a forked child: the lock is the parent's."""
        if self._fd >= 0:
            with contextlib.suppress(OSError):
                os.close(self._fd)
            self._fd = -1


def being_written(run: Path) -> bool:
    """Tell whether a process holds the lock of one of the run's ranks, as a writer does for as long as it lives."""
    for file in run.glob(f"rank-*/{LOCK}"):
        with contextlib.suppress(ImportError, OSError):
            import fcntl

            with file.open("rb") as lock:
                try:
                    fcntl.flock(lock, fcntl.LOCK_SH | fcntl.LOCK_NB)
                except BlockingIOError:
                    return True
    return False
