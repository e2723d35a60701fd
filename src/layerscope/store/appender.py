"""One rank's folder while records are added to it: the segment being filled, and its journal.

    appender = Appender(folder, rank=0, number=0, record=0)
    appender.append([Record(row, data), ...])
    appender.close()

Everything happens in the caller's thread, and errors are raised; `Writer` is what keeps them from a user's run.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple, final

from layerscope.store.address import JOURNAL, segment
from layerscope.store.checksum import Bytes, crc32c
from layerscope.store.columns import TableRow
from layerscope.store.journal import Journal, row_frame
from layerscope.store.manifest import Dropped
from layerscope.store.segment import HEADER_ROOM, Partial, Sealing, Unsynced, entry, seal

# Hears of a seal that was not made: of which segment, why, and the records that are gone with their files.
Failed = Callable[[int, Exception, Sequence[TableRow]], None]


class Limits(NamedTuple):
    """When a segment is sealed: at so many bytes of tensors, tensors, records, or bytes of rows."""

    nbytes: int = 256 << 20
    tensors: int = 512
    records: int = 16_384
    rows: int = 16 << 20


class Coming(NamedTuple):
    """A record on its way: its row, which knows no place yet, and its bytes where a tensor is kept."""

    row: TableRow
    data: Bytes | None = None


@dataclass(slots=True)
class _Open:
    """The segment being filled."""

    number: int
    journal: Journal
    partial: Partial | None = None
    rows: list[TableRow] = field(default_factory=list)
    checks: list[int] = field(default_factory=list)
    size: int = 0  # of the rows as bytes
    room: int = 0  # left in the header
    tensors: int = 0
    # Bytes that were stored already: a tensor that is seen twice in a step, a mask that comes with every step.
    stored: dict[tuple[int, int, str, tuple[int, ...]], TableRow] = field(default_factory=dict)
    losses: dict[tuple[str, str], Dropped] = field(default_factory=dict)

    @property
    def is_empty(self) -> bool:
        return not self.rows and not self.losses

    def close(self) -> None:
        self.journal.close()
        if self.partial is not None:
            self.partial.close()


@final
class Appender:
    """Append records to a rank's folder, sealing segments as they fill.

    A segment that the disk refuses to seal stays behind as a pair of partial and journal, which readers read and
    `recover` seals; it is tried again when the next one is sealed.
    """

    def __init__(
        self,
        folder: Path,
        *,
        rank: int,
        record: int = 0,
        number: int = 0,
        limits: Limits = Limits(),  # noqa: B008  (a frozen value)
        sealed: Callable[[int, int, int], None] = lambda number, records, size: None,
        failed: Failed = lambda number, error, gone: None,
    ) -> None:
        """Go on with record and segment numbers; `sealed` and `failed` hear of each seal that was made, or was not."""
        self.record = record
        self.run = os.urandom(8)
        self._folder, self._rank, self._limits = folder, rank, limits
        self._sealed, self._failed = sealed, failed
        self._waiting: list[_Open] = []  # closed, and not sealed
        self._refused: Exception | None = None  # why the last seal failed
        self._open = self._new(number)

    @property
    def number(self) -> int:
        """The number of the segment being filled."""
        return self._open.number

    def append(self, batch: Sequence[Coming], tick: Callable[[], None] = lambda: None) -> None:
        """Write records: the bytes of all of them, then their frames.

        When the disk refuses, nothing of the batch is kept, the segment is closed as it is and the OSError is raised:
        the next batch goes into a new segment, so that recording goes on as soon as there is room again.
        """
        at = 0
        while at < len(batch):
            taken = self._that_fit(batch[at:])
            if not taken:
                full = self._open
                self.seal()
                if self._open is full:
                    raise self._refused or OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
                continue
            self._append(batch[at : at + taken], tick)
            at += taken
        if self._is_full():
            self.seal()

    def _that_fit(self, batch: Sequence[Coming]) -> int:
        """Return how many of the records the segment's header has room for; one always fits an empty segment."""
        now, limits = self._open, self._limits
        room, tensors, size = now.room, now.tensors, now.partial.end if now.partial is not None else 0
        for n, (row, data) in enumerate(batch):
            if len(now.rows) + n >= limits.records:
                return n
            if data is None:
                continue
            if now.partial is None and tensors == 0:
                room = HEADER_ROOM
            room -= len(entry(self.record + n, row.dtype, row.shape, size, size + data.size)) + 1
            tensors, size = tensors + 1, size + data.size
            if tensors > 1 and (room < 0 or tensors > limits.tensors or size > 2 * limits.nbytes):
                return n
            if room < 0:
                raise ValueError(f"a shape of {len(row.shape)} axes does not fit the header of a segment")
        return len(batch)

    def _append(self, batch: Sequence[Coming], tick: Callable[[], None]) -> None:
        now = self._open
        rows: list[TableRow] = []
        fresh: list[Bytes] = []
        end = 0
        try:
            if now.partial is None and any(data is not None for _, data in batch):
                now.partial = Partial.create(self._folder, now.number)
                now.room = now.partial.room
            known = dict(now.stored) if now.partial is not None else {}
            at = end = now.partial.end if now.partial is not None else 0
            for n, (row, data) in enumerate(batch):
                record = self.record + n
                if data is None or now.partial is None:
                    rows.append(row._replace(record=record))
                    continue
                check = crc32c(data)
                key = (check, data.size, row.dtype, row.shape)
                twin = known.get(key)
                if twin is not None and self._is_same(twin, data, fresh, end):
                    rows.append(
                        row._replace(
                            record=record, bytes_of=twin.record, offset=twin.offset, length=data.size, crc32c=check
                        )
                    )
                    continue
                placed = row._replace(record=record, bytes_of=record, offset=at, length=data.size, crc32c=check)
                known[key] = placed
                rows.append(placed)
                fresh.append(data)
                at += data.size
            if fresh and now.partial is not None:
                now.partial.write(fresh, tick)
            frames = [row_frame(now.journal.run, row) for row in rows]
            now.journal.append(b"".join(data for data, _ in frames))
        except OSError:
            self._forget(now, end)
            self._close_as_it_is()
            raise
        except BaseException:
            self._forget(now, end)
            raise
        now.stored = known
        now.rows += rows
        now.checks += [check for _, check in frames]
        now.size += sum(len(data) for data, _ in frames)
        for row in rows:
            if row.has_tensor and row.bytes_of == row.record:
                now.tensors += 1
                now.room -= len(entry(row.record, row.dtype, row.shape, row.offset, row.offset + row.length)) + 1
        self.record += len(rows)

    def _is_same(self, twin: TableRow, data: Bytes, fresh: list[Bytes], end: int) -> bool:
        """Whether bytes with the same checksum are the same: compared, not believed."""
        if twin.offset < end:
            assert self._open.partial is not None
            return self._open.partial.is_at(twin.offset, data)
        at = end
        for each in fresh:
            if at == twin.offset and each.size == data.size:
                return bool((each == data).all())
            at += each.size
        return not data.size

    def lose(self, loss: Dropped) -> None:
        """Write down a loss, as far as the disk still takes that; its count is of all with its point and reason."""
        now = self._open
        now.losses[loss.point, loss.reason] = loss
        now.journal.lose(loss.point, loss.reason, loss.count, loss.first)

    def seal(self) -> None:
        """Seal the segment being filled, and those that could not be sealed before."""
        now = self._open
        pending, self._waiting = [*self._waiting, *([] if now.is_empty else [now])], []
        for each in pending:
            if not self._seal(each) and each is not self._open:
                self._waiting.append(each)

    def _seal(self, each: _Open) -> bool:
        """Seal a segment; False where that is worth another try. What is not stays as a pair, for `recover`."""
        is_current = each is self._open

        def following() -> None:
            if is_current:
                self._open = self._new(each.number + 1)

        what = Sealing(each.journal.run, self._rank, each.rows, each.checks, list(each.losses.values()))
        try:
            fd = None if each.partial is None else each.partial.fd
            size = seal(self._folder, each.number, what, fd, following=following)
        except Exception as error:
            self._refused = error
            gone = each.journal.is_gone
            self._failed(each.number, error, each.rows if gone else ())
            if self._open is each:
                self._open_next()
            if isinstance(error, OSError) and not (gone or isinstance(error, Unsynced)):
                return False
            if self._open is not each:
                each.close()
            return True
        each.close()
        self._sealed(each.number, len(each.rows), size)
        return True

    def close(self) -> None:
        """Seal and close; an empty journal goes."""
        try:
            self.seal()
        finally:
            now = self._open
            now.close()
            for each in self._waiting:
                each.close()
            if now.is_empty:
                if now.partial is not None:
                    now.partial.path.unlink(missing_ok=True)
                now.journal.path.unlink(missing_ok=True)

    def disown(self) -> None:
        """Close the files as they are, in a forked child: the parent goes on writing them."""
        self._open.close()
        for each in self._waiting:
            each.close()

    def _is_full(self) -> bool:
        now, limits = self._open, self._limits
        size = now.partial.end if now.partial is not None else 0
        return (
            len(now.rows) >= limits.records
            or now.size >= limits.rows
            or now.tensors >= limits.tensors
            or size >= limits.nbytes
        )

    def _new(self, number: int) -> _Open:
        path = self._folder / (segment(number) + JOURNAL)
        return _Open(number, Journal(path, run=self.run, rank=self._rank))

    def _forget(self, now: _Open, end: int) -> None:
        """Cut off what was written of a batch; bytes that stay are between no rows, and readers pass over them."""
        if now.partial is not None and end:
            try:
                os.ftruncate(now.partial.fd, end)
                now.partial.end = end
            except OSError:
                pass

    def _close_as_it_is(self) -> None:
        """Close a segment that the disk refused something of, so that the next batch tries a new one."""
        now = self._open
        if now.rows and self._open_next():
            self._waiting.append(now)

    def _open_next(self) -> bool:
        """Go on with a new segment; False where the disk has no room for that either, and the old one goes on."""
        try:
            self._open = self._new(self._open.number + 1)
        except OSError:
            return False
        return True
