"""Write a run from a background thread, within a byte budget, without ever failing the run it watches.

    writer = Writer("runs/fp32", Manifest(mode="fp32"))
    writer.write(Point("blocks.3"), Moment(step=3), blob=Blob("float32", (2, 3), 24, data=lambda: buffer))
    writer.close(forwards=4, points=1)

What cannot be written (a full queue, a full disk, a record that fails) is counted per point and reason, said once in
the log and kept in `run.json`; recording goes on.
"""

from __future__ import annotations

import atexit
import os
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache, lru_cache
from typing import TYPE_CHECKING, Any, final

from layerscope.points import Moment, Point
from layerscope.store import strictjson
from layerscope.store.address import Address, LocalFolder, RemoteFolder, folder
from layerscope.store.appender import Coming, Limits
from layerscope.store.checksum import bytes_of
from layerscope.store.columns import TableRow
from layerscope.store.destination import Destination
from layerscope.store.dtypes import nbytes
from layerscope.store.journal import GONE
from layerscope.store.losses import Losses
from layerscope.store.manifest import NAME, Completeness, Dropped, Manifest, Missing
from layerscope.store.strictjson import JSON

if TYPE_CHECKING:
    from layerscope.stats import Summary


# What a record without a tensor takes of the budget: its summary and its place in the queue.
_SMALL = 4096

# Small records leave together: their bytes in one call to the system, and then their frames in one.
_TOGETHER = 256
_TOGETHER_BYTES = 1 << 20


@dataclass(frozen=True, slots=True)
class Blob:
    """The bytes of one tensor on their way to disk.

    `dtype` is torch's name without the prefix. `data` is called in the writer's thread, gives a C-contiguous buffer
    and may wait for a device; `release` is called once the bytes are written or dropped.
    """

    dtype: str
    shape: tuple[int, ...]
    nbytes: int
    data: Callable[[], Any]
    release: Callable[[], None] | None = None


@dataclass(frozen=True, slots=True)
class _Item:
    point: Point
    moment: Moment
    blob: Blob | None
    summary: Summary | Callable[[], Summary] | None
    note: Mapping[str, JSON] | None
    size: int
    release: Callable[[], None] | None


@final
class Writer:
    """Writes one rank's records of one run. Nothing it does after its construction raises into the caller.

    `budget` bounds the bytes waiting to be written: `write` waits up to `wait` seconds for room, then drops. A tensor
    larger than the whole budget is taken when nothing else waits. `manifest` may be replaced until `close`, which
    writes it. In a forked child every method returns at once.
    """

    def __init__(
        self,
        address: Address,
        manifest: Manifest,
        *,
        rank: int = 0,
        append: bool = False,
        budget: int = 512 << 20,
        wait: float = 5.0,
        segment_bytes: int = Limits().nbytes,
        segment_tensors: int = Limits().tensors,
    ) -> None:
        """Start writing; with `append=True` go on behind the records that are already there.

        Raises RunExists, RunBusy or NotARun rather than touch what another recording left, and OSError when the
        folder cannot be written at all.
        """
        self._to = destination_of(address, rank=rank)
        self._losses = Losses(self._to.address, heard=self._lost)
        self._budget = budget
        self._wait = wait
        self._pid = os.getpid()
        self._changed = threading.Condition()
        self._queue: deque[_Item] = deque()
        self._queued = 0
        self._full = 0  # how many callers wait for room
        self._accepted = 0
        self._done = 0
        self._ticks = 0
        self._stuck = -1  # the tick at which a write waited in vain: no second one waits before the next tick
        self._points: dict[str, None] = {}
        self._records = 0
        self._unheard: deque[Dropped] = deque()  # losses that the journal does not have yet
        self._flushes = 0
        self._flushed = 0
        self._closing: Completeness | None = None
        self._completeness: Completeness | None = None
        limits = Limits(segment_bytes, segment_tensors, min(Limits().records, 32 * segment_tensors))
        self._appender = self._to.begin(append=append, limits=limits, failed=self._unsealed)
        self.next_step = self._to.next_step
        before = self._to.before
        self.manifest = manifest if before is None else before.followed_by(manifest)
        try:
            # Before the first record, so that a killed run says what it was.
            completeness = replace(Completeness() if before is None else before.completeness, state="recording")
            self._to.put(replace(self.manifest, completeness=completeness))
        except BaseException:
            self._to.undo(self._appender)
            raise
        _watch()
        _LIVE.add(self)
        self._thread = threading.Thread(target=self._run, name="layerscope-writer", daemon=True)
        self._thread.start()

    # What a recorder calls ----------------------------------------------------------------------

    def write(
        self,
        point: Point,
        moment: Moment,
        *,
        blob: Blob | None = None,
        summary: Summary | Callable[[], Summary] | None = None,
        note: Mapping[str, JSON] | None = None,
        holds: int = 0,
        release: Callable[[], None] | None = None,
    ) -> bool:
        """Hand over one record; False when it was dropped, which is then counted and named.

        A callable `summary` is called in the writer's thread, after `blob.data` and before `blob.release`. One that
        keeps a tensor alive says so with `holds`, the bytes that count against the budget, and `release`, which is
        called once the record is written or dropped, as the blob's own is.
        """
        if os.getpid() != self._pid:
            return False
        size = _SMALL + holds + (blob.nbytes if blob is not None else 0)
        item = _Item(point, moment, blob, summary, note, size, release)
        with self._changed:
            if self._closing is None and self._room_for(size):
                self._queue.append(item)
                self._queued += size
                self._accepted += 1
                if len(self._queue) == 1:  # the thread sleeps only on an empty queue
                    self._changed.notify_all()
                return True
            closed = self._closing is not None
        if closed:
            self._drop(item, "the writer was closed")
        else:
            self._drop(item, f"the disk did not keep up: {self._budget >> 20} MiB were waiting for {self._wait:g} s")
        self._release(item)
        return False

    def lose(self, point: Point, moment: Moment, reason: str) -> None:
        """Count a record that could not be made, and say the first of its kind."""
        self._losses.count(_text(point), str(moment), reason)

    def flush(self, *, patience: float | None = None) -> None:
        """Return once everything accepted before is acknowledged or counted as dropped.

        Acknowledged means that a kill of this process no longer loses it: elsewhere, that it is there. Gives up, and
        says so, when nothing moves for `patience` seconds.
        """
        patience = self._to.patience if patience is None else patience
        if os.getpid() != self._pid:
            return
        with self._changed:
            target = self._accepted
            self._flushes += 1
            mine = self._flushes
            self._changed.notify_all()
        is_over = lambda: (self._done >= target and self._flushed >= mine) or not self._thread.is_alive()  # noqa: E731
        if not self._waited(is_over, patience):
            self._losses.say(f"nothing was written for {patience:g} s; not waiting any longer")

    def close(
        self,
        *,
        forwards: int = 0,
        points: int = 0,
        recomputed: int = 0,
        missing: Iterable[Missing] = (),
        failed: int = 0,
        state: str = "complete",
    ) -> Completeness:
        """Write what waits, seal, and state in `run.json` how complete the run is. A second call returns the same.

        Waits as long as the disk takes what it is given, and a minute when it takes nothing: then the thread goes on
        alone, the state returned is `interrupted`, and what it does not manage is for `recover`.
        """
        asked = Completeness(state, forwards, points, 0, recomputed, list(missing), failed=failed)
        if os.getpid() != self._pid:
            return replace(asked, state="recording")
        with self._changed:
            if self._closing is None:
                self._closing = asked
                self._changed.notify_all()
        self._waited(lambda: self._completeness is not None or not self._thread.is_alive(), self._to.patience)
        if self._completeness is not None:
            self._thread.join(self._to.patience)
            return self._completeness
        self._losses.say(f"nothing is taken; {self._accepted - self._done} records still wait{self._to.kept}")
        return self._stated(replace(self._closing, state="interrupted"))

    @property
    def records(self) -> int:
        """How many records have been acknowledged."""
        return self._records

    @property
    def dropped(self) -> list[Dropped]:
        """What was lost until now, by point and reason."""
        return self._losses.dropped

    # The thread ---------------------------------------------------------------------------------

    def _run(self) -> None:
        while True:
            with self._changed:
                while not (self._queue or self._unheard or self._closing or self._flushes != self._flushed):
                    self._changed.wait()
                batch, flushes = self._batch(), self._flushes
            if batch:
                self._store_all(batch)
                with self._changed:
                    self._queued -= sum(item.size for item in batch)
                    self._done += len(batch)
                    self._ticks += 1
                    # Waking a thread that must go on waiting costs as much as writing a small tensor.
                    if self._full or not self._queue:
                        self._changed.notify_all()
                del batch  # or the last buffers would live until the next ones come
            elif self._unheard:
                self._tell_losses()
            elif flushes != self._flushed:
                self._flush()
                with self._changed:
                    self._flushed = flushes
                    self._changed.notify_all()
            else:
                break
        self._finish()

    def _batch(self) -> list[_Item]:
        """Take what waits, as much as leaves together; called with the lock held."""
        batch: list[_Item] = []
        size = 0
        while self._queue and len(batch) < _TOGETHER and (not batch or size + self._queue[0].size <= _TOGETHER_BYTES):
            batch.append(self._queue.popleft())
            size += batch[-1].size - _SMALL
        return batch

    def _store_all(self, batch: list[_Item]) -> None:
        """Write a batch; where the disk refuses it, each record is tried by itself, and costs no other."""
        coming: list[tuple[_Item, Coming]] = []
        for item in batch:
            try:
                coming.append((item, self._coming(item)))
            except BaseException as error:  # whatever it was, it costs this record only
                self._drop(item, f"{type(error).__name__}: {error}")
        first = self._appender.record
        try:
            self._append([each for _, each in coming])
        except Exception:
            for item, each in coming[self._appender.record - first :]:
                try:
                    self._append([each])
                except OSError as error:
                    self._drop(item, f"the disk refused it: {error.strerror or error}")
                except Exception as error:
                    self._drop(item, f"{type(error).__name__}: {error}")
        self._tell_losses()
        for item in batch:
            self._release(item)

    def _append(self, coming: list[Coming]) -> None:
        first = self._appender.record
        try:
            self._appender.append(coming, self._tick)
        finally:
            stored = self._appender.record - first
            self._records += stored
            self._points.update(dict.fromkeys(each.row.point for each in coming[:stored]))

    def _coming(self, item: _Item) -> Coming:
        blob, data, m = item.blob, None, item.moment
        if blob is not None:
            expected = nbytes(blob.dtype, blob.shape)
            data = bytes_of(blob.data())
            if data.size != expected:
                raise ValueError(f"{data.size} bytes for a {blob.dtype} of shape {list(blob.shape)}: not {expected}")
        note = strictjson.dumps(item.note).encode() if item.note else b""
        row = TableRow(
            0, _text(item.point), _whole(m.epoch), int(m.step), int(m.batch), int(m.call), int(m.rank),
            blob is not None, "" if blob is None else blob.dtype, () if blob is None else tuple(map(int, blob.shape)),
            summary=self._summary(item), note=note,
        )  # fmt: skip
        return Coming(row, data)

    def _summary(self, item: _Item) -> Summary | None:
        """Return the record's statistics; where they fail they are counted as lost, and the tensor is kept."""
        try:
            return item.summary() if callable(item.summary) else item.summary
        except Exception as error:
            if item.blob is None:
                raise
            reason = f"its summary failed, its tensor is kept: {type(error).__name__}: {error}"
            self._losses.count(str(item.point), str(item.moment), reason)
            return None

    def _lost(self, loss: Dropped) -> None:
        self._unheard.append(loss)
        if os.getpid() == self._pid:
            with self._changed:
                self._changed.notify_all()

    def _tell_losses(self) -> None:
        """Write down what was lost, as far as the disk takes that; `run.json` has it at the end as well."""
        while self._unheard:
            try:
                self._appender.lose(self._unheard.popleft())
            except Exception as error:
                self._losses.say(f"the account of losses could not be written: {error}")

    def _flush(self) -> None:
        try:
            self._to.flush(self._appender)
        except Exception as error:
            self._losses.say(f"not all that was flushed is there: {error}")

    def _finish(self) -> None:
        assert self._closing is not None
        try:
            self._tell_losses()
            self._appender.close()
            self._tick()
            completeness = self._stated(self._closing)
            self.manifest = replace(self.manifest, completeness=completeness)
            self._to.put(self.manifest)
        except Exception as error:
            self._losses.say(f"{NAME} could not be written: {error}")
            completeness = self._stated(replace(self._closing, state="interrupted"))
        self._to.finish()
        _LIVE.discard(self)
        with self._changed:
            self._completeness = completeness
            self._changed.notify_all()

    # Waiting and counting -----------------------------------------------------------------------

    def _room_for(self, size: int) -> bool:
        """Wait for room in the budget; called with the lock held."""
        if not self._queued or self._queued + size <= self._budget:
            return True
        if self._stuck == self._ticks:
            return False
        deadline = time.monotonic() + self._wait
        self._full += 1
        try:
            while self._queued and self._queued + size > self._budget and self._closing is None:
                left = deadline - time.monotonic()
                if left <= 0:
                    self._stuck = self._ticks
                    return False
                self._changed.wait(left)
        finally:
            self._full -= 1
        return self._closing is None

    def _waited(self, is_over: Callable[[], bool], patience: float) -> bool:
        """Wait until `is_over`; False when nothing moved for `patience` seconds."""
        with self._changed:
            ticks, since = self._ticks, time.monotonic()
            while not is_over():
                self._changed.wait(min(patience, 0.2))
                if self._ticks != ticks:
                    ticks, since = self._ticks, time.monotonic()
                elif time.monotonic() - since >= patience:
                    return is_over()
        return True

    def _tick(self) -> None:
        self._ticks += 1

    def _stated(self, asked: Completeness) -> Completeness:
        mine = replace(asked, records=self._records, dropped=self.dropped)
        before = self._to.before
        return mine if before is None else before.completeness.followed_by(mine, recorded=self._points)

    def _drop(self, item: _Item, reason: str) -> None:
        try:
            self._losses.count(str(item.point), str(item.moment), reason)
        except Exception as error:  # a point that cannot be written down
            self._losses.count("?", "?", f"{reason}; its name cannot be written: {type(error).__name__}")

    def _release(self, item: _Item) -> None:
        for release in (item.release, None if item.blob is None else item.blob.release):
            try:
                if release is not None:
                    release()
            except Exception as error:
                self._losses.say(f"releasing a buffer failed: {type(error).__name__}: {error}")

    def _unsealed(self, number: int, error: Exception, gone: Sequence[TableRow]) -> None:
        """Hear of a segment that could not be sealed; it is tried again, and read as it is until then."""
        for row in gone:
            self._records -= 1
            self._losses.count(row.point, str(row.moment), f"the disk refused it: {GONE}")
        if gone:
            return
        why = getattr(error, "strerror", None) or error
        self._losses.say(
            f"segment {number} could not be sealed: {why}. It can be read as it is; `layerscope recover` seals it."
        )

    def _disown(self) -> None:
        """Close the inherited files in a forked child; a child that keeps them open keeps the lock of a dead parent."""
        self._appender.disown()
        self._to.disown()


# Every process's writers ------------------------------------------------------------------------

_LIVE: weakref.WeakSet[Writer] = weakref.WeakSet()


@cache
def _watch() -> None:
    """Arrange, once, for what happens to open writers when the process forks or ends."""
    atexit.register(_close_all)
    if hasattr(os, "register_at_fork"):
        os.register_at_fork(after_in_child=_disown_all)


def _close_all() -> None:
    for writer in list(_LIVE):
        writer.close(state="interrupted")


def _disown_all() -> None:
    for writer in list(_LIVE):
        writer._disown()
    _LIVE.clear()


@lru_cache(maxsize=1 << 14)
def _text(point: Point) -> str:
    return str(point)


def _whole(number: int | None) -> int | None:
    return None if number is None else int(number)


def destination_of(address: Address, *, rank: int) -> Destination:
    """Return the place of one rank in the run at an address."""
    files = folder(address)
    if isinstance(files, LocalFolder):
        return Destination(files, rank=rank)
    from layerscope.store.remote import RemoteDestination

    assert isinstance(files, RemoteFolder)
    return RemoteDestination(files, rank=rank)
