"""One rank's folder while records are added to it: the segment being filled, and the journal.

    appender = Appender(Journal(folder / "journal"), rank=0)
    appender.append("blocks.3:output", Moment(step=3), dtype="float32", shape=(2, 3), data=data)
    appender.close()

Everything happens in the caller's thread, and errors are raised; `Writer` is what keeps them from a user's run.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple, final

from layerscope.points import Moment
from layerscope.store.address import SEALED
from layerscope.store.checksum import Bytes
from layerscope.store.dtypes import nbytes
from layerscope.store.journal import Journal, opening_line, record_line
from layerscope.store.segment import Placed, Segment

__all__ = ["JOURNAL", "Appender", "Failure", "Limits"]

JOURNAL = "journal"

# Told of a segment that could not be sealed: its path, what it held, whether that is lost, and why.
Failure = Callable[[Path, list[tuple[str, Moment]], bool, OSError], None]


class Limits(NamedTuple):
    """When a segment is sealed: at so many bytes, tensors, or records of any kind."""

    nbytes: int = 256 << 20
    tensors: int = 512
    records: int = 4096


@final
class Appender:
    """Append records to a rank's folder, sealing segments as they fill."""

    def __init__(
        self,
        journal: Journal,
        *,
        rank: int,
        record: int = 0,
        segment: int = 0,
        limits: Limits = Limits(),  # noqa: B008  (a frozen value)
        lined: Callable[[bytes], None] = lambda line: None,
        sealed: Callable[[Path | None], None] = lambda path: None,
        failed: Failure = lambda path, kept, lost, error: None,
    ) -> None:
        """Go on with record and segment numbers `record` and `segment`.

        `lined` hears of each journal line; `sealed` of each seal, with the segment if there was one, and `failed` of
        each that cannot be made, both after the lines of the records in it.
        """
        self.record = record
        self._journal = journal
        self._folder = journal.path.parent
        self._rank = rank
        self._number = segment
        self._segment: Segment | None = None
        self._since_seal = 0
        self._limits = limits
        self._lined = lined
        self._sealed = sealed
        self._failed = failed
        line = opening_line(rank=rank, run=os.urandom(8).hex())
        journal.append(line)
        lined(line)

    def append(
        self,
        point: str,
        moment: Moment,
        *,
        dtype: str | None = None,
        shape: tuple[int, ...] = (),
        data: Bytes | None = None,
        rest: str = "",
        tick: Callable[[], None] = lambda: None,
    ) -> None:
        """Write one record, bytes first, then its journal line.

        When the disk refuses, what was written of the record is taken back, the segment is sealed with what it
        holds, and the OSError is raised: the next record tries a new segment, so recording goes on as soon as
        there is room again.
        """
        placed: Placed | None = None
        try:
            if dtype is not None and data is not None:
                segment = self._with_room(dtype, shape)
                placed = segment.write(data, tick=tick)
            line = record_line(self.record, point, moment, dtype=dtype, shape=shape, placed=placed, rest=rest)
            self._journal.append(line)
        except OSError:
            if self._segment is not None:
                self.seal()  # which cuts off what was written of this record
            raise
        except BaseException:
            if self._segment is not None:
                self._segment.forget()
            raise
        if dtype is not None and placed is not None:
            segment.keep(self.record, point, moment, dtype=dtype, shape=shape, placed=placed)
        self.record += 1
        self._since_seal += 1
        self._lined(line)
        if self._is_full():
            self.seal()

    def seal(self) -> None:
        """Seal the segment being filled.

        One that cannot be sealed stays behind as `.partial`: the journal still reads it, and `recover` seals it.
        """
        segment, self._segment, self._since_seal = self._segment, None, 0
        if segment is None:
            self._sealed(None)
            return
        try:
            self._journal.sync()
            path = segment.seal()
        except OSError as error:
            there = segment.path.exists() or segment.path.with_suffix(SEALED).exists()
            self._failed(segment.path, segment.kept, not there, error)
        else:
            self._sealed(path)
        finally:
            segment.close()

    def _is_full(self) -> bool:
        if self._since_seal >= self._limits.records:
            return True
        segment = self._segment
        return segment is not None and (len(segment) >= self._limits.tensors or segment.nbytes >= self._limits.nbytes)

    def close(self) -> None:
        """Seal, close and unlock."""
        try:
            self.seal()
        finally:
            self._journal.close()

    def disown(self) -> None:
        """Close the files as they are, in a forked child: the parent goes on writing them, and keeps the lock."""
        if self._segment is not None:
            self._segment.close()
        self._journal.disown()

    def _with_room(self, dtype: str, shape: tuple[int, ...]) -> Segment:
        segment = self._segment
        if segment is not None and segment.has_room(dtype, shape, nbytes(dtype, shape)):
            return segment
        if segment is not None:
            self.seal()
        try:
            self._segment = Segment.create(self._folder, number=self._number, rank=self._rank)
        finally:
            self._number += 1  # a number is tried once: what a failure left behind must not be in the way
        return self._segment
