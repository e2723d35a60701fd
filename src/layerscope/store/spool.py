"""Records on their way to an object store: a local folder, put away piece by piece.

    spool = Spool(RemoteFolder("s3://bucket/runs/fp32"), rank=0)
    spool.line(line)             # one record's journal line
    spool.sealed(path)           # a segment is full: put it, then the lines so far as journal-00000, journal-00001, ...

Objects are put whole and never appended to, and a line is put after the bytes it speaks of, so a reader of the
remote run sees an exact prefix as well. What cannot be put now is tried again with the next piece.
"""

from __future__ import annotations

import re
import shutil
import tempfile
from pathlib import Path
from typing import final

from layerscope.store.address import RemoteFolder, rank_folder, segment_of

__all__ = ["Spool"]

_SEGMENT = re.compile(rb'"segment":(\d+),')


@final
class Spool:
    """A temporary local rank folder in front of a remote one."""

    def __init__(self, remote: RemoteFolder, *, rank: int, part: int = 0) -> None:
        self.remote = remote
        self.path = Path(tempfile.mkdtemp(prefix="layerscope-spool-"))
        self.error: Exception | None = None
        self._rank = rank
        self._part = part
        self._lines: list[bytes] = []
        self._waiting: list[tuple[str, Path | bytes]] = []

    def line(self, line: bytes) -> None:
        """Take one record's journal line, to be put with the next piece."""
        self._lines.append(line)

    def sealed(self, path: Path | None) -> None:
        """Put a sealed segment if there is one, and the lines that came until now."""
        if path is not None:
            self._waiting.append((path.name, path))
        self.put_lines()

    def put_lines(self) -> None:
        """Put the lines that came until now as the journal's next part."""
        if self._lines:
            self._waiting.append((f"journal-{self._part:05d}", b"".join(self._lines)))
            self._part += 1
            self._lines = []
        self.put()

    def leave_out(self, segment_path: Path) -> None:
        """Forget the lines of a segment that could not be sealed, so that no line speaks of bytes that are not put."""
        found = segment_of(segment_path.name)
        number = -1 if found is None else found[0]
        self._lines = [line for line in self._lines if _segment_of_line(line) != number]

    def put(self) -> None:
        """Put what waits, oldest first; when the other side refuses, `error` says how, and the rest waits on."""
        while self._waiting:
            name, source = self._waiting[0]
            try:
                if isinstance(source, bytes):
                    self.remote.put(f"{rank_folder(self._rank)}/{name}", source)
                else:
                    self.remote.put_file(f"{rank_folder(self._rank)}/{name}", source)
                    source.unlink()
            except Exception as error:  # every remote file system has its own kind
                self.error = error
                return
            self._waiting.pop(0)
        self.error = None

    def remove(self) -> None:
        """Remove the local folder; what it held is on the other side."""
        shutil.rmtree(self.path, ignore_errors=True)


def _segment_of_line(line: bytes) -> int | None:
    match = _SEGMENT.search(line)
    return int(match[1]) if match else None
