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
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from functools import cache, lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, final

from layerscope.points import Moment, Point
from layerscope.store.address import Address
from layerscope.store.appender import Limits
from layerscope.store.checksum import bytes_of
from layerscope.store.dtypes import nbytes
from layerscope.store.home import at
from layerscope.store.journal import rest_text
from layerscope.store.losses import Losses
from layerscope.store.manifest import NAME, Completeness, Dropped, Manifest, Missing
from layerscope.store.strictjson import JSON

if TYPE_CHECKING:
    from layerscope.stats import Summary

__all__ = ["Blob", "Writer"]

# What a record without a tensor takes of the budget: its summary and its place in the queue.
_SMALL = 4096

# How many summaries' texts are remembered, each with its summary, so that an id cannot come to mean another.
_TEXTS = 256


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
        segment_bytes: int = 256 << 20,
        segment_tensors: int = 512,
    ) -> None:
        """Start writing; with `append=True` go on behind the records that are already there.

        Raises RunExists, RunBusy or NotARun rather than touch what another recording left, and OSError when the
        folder cannot be written at all.
        """
        self._home = at(address, rank=rank)
        self._losses = Losses(self._home.address)
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
        self._texts: dict[int, tuple[Summary, str]] = {}
        self._closing: Completeness | None = None
        self._completeness: Completeness | None = None
        limits = Limits(segment_bytes, segment_tensors, 8 * segment_tensors)
        self._appender = self._home.begin(append=append, limits=limits, failed=self._unsealed)
        self.next_step = self._home.next_step
        before = self._home.before
        self.manifest = manifest if before is None else before.followed_by(manifest)
        try:
            # Before the first record, so that a killed run says what it was.
            completeness = replace(Completeness() if before is None else before.completeness, state="recording")
            self._home.put(replace(self.manifest, completeness=completeness))
        except BaseException:
            self._home.undo(self._appender)
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

    def flush(self, *, patience: float = 60.0) -> None:
        """Return once everything accepted before is acknowledged or counted as dropped.

        Acknowledged means that a kill of this process no longer loses it. Gives up, and says so, when nothing moves
        for `patience` seconds.
        """
        if os.getpid() != self._pid:
            return
        with self._changed:
            target = self._accepted
        if not self._waited(lambda: self._done >= target or not self._thread.is_alive(), patience):
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
        self._waited(lambda: self._completeness is not None or not self._thread.is_alive(), self._home.patience)
        if self._completeness is not None:
            self._thread.join(self._home.patience)
            return self._completeness
        self._losses.say(f"the disk takes nothing; {self._accepted - self._done} records still wait")
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
                while not self._queue and self._closing is None:
                    self._changed.wait()
                item = self._queue.popleft() if self._queue else None
            if item is None:
                break
            try:
                self._store(item)
            except BaseException as error:  # whatever it was, it costs this record only
                self._drop(item, f"{type(error).__name__}: {error}")
            self._release(item)
            with self._changed:
                self._queued -= item.size
                self._done += 1
                self._ticks += 1
                # Waking somebody who must wait on costs as much as writing a small tensor.
                if self._full or not self._queue:
                    self._changed.notify_all()
            del item  # or the last buffer would live until the next one comes
        self._finish()

    def _store(self, item: _Item) -> None:
        blob, data, point = item.blob, None, _text(item.point)
        if blob is not None:
            expected = nbytes(blob.dtype, blob.shape)
            data = bytes_of(blob.data())
            if data.size != expected:
                raise ValueError(f"{data.size} bytes for a {blob.dtype} of shape {list(blob.shape)}: not {expected}")
        rest = self._summary(item) + rest_text(note=item.note)
        try:
            self._appender.append(
                point,
                item.moment,
                dtype=None if blob is None else blob.dtype,
                shape=() if blob is None else blob.shape,
                data=data,
                rest=rest,
                tick=self._tick,
            )
        except OSError as error:
            self._drop(item, f"the disk refused it: {error.strerror or error}")
            return
        self._records += 1
        self._points[point] = None

    def _summary(self, item: _Item) -> str:
        """Return the line's part with the summary; one that fails is counted as lost, and the tensor is kept.

        An output that is the next module's input has one summary and two records: its text is made once.
        """
        try:
            summary = item.summary() if callable(item.summary) else item.summary
            if summary is None:
                return ""
            known = self._texts.get(id(summary))
            if known is None:
                if len(self._texts) >= _TEXTS:
                    self._texts.clear()
                known = self._texts[id(summary)] = summary, rest_text(summary.to_json())
            return known[1]
        except Exception as error:
            if item.blob is None:
                raise
            reason = f"its summary failed, its tensor is kept: {type(error).__name__}: {error}"
            self._losses.count(str(item.point), str(item.moment), reason)
            return ""

    def _finish(self) -> None:
        assert self._closing is not None
        try:
            self._appender.close()
            self._tick()
            completeness = self._stated(self._closing)
            self.manifest = replace(self.manifest, completeness=completeness)
            self._home.put(self.manifest)
            self._home.finish()
        except Exception as error:
            self._losses.say(f"{NAME} could not be written: {error}")
            completeness = self._stated(replace(self._closing, state="interrupted"))
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
        before = self._home.before
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

    def _unsealed(self, path: Path, kept: list[tuple[str, Moment]], lost: bool, error: OSError) -> None:
        """Hear of a segment that could not be sealed: what it holds is lost if no reader can get at the file."""
        self._home.leave_out(path)
        if lost or not self._home.keeps_partials:
            for point, moment in kept:
                self._records -= 1
                self._losses.count(point, str(moment), f"its segment is lost: {error.strerror or error}")
        else:
            self._losses.say(
                f"{path.name} could not be sealed: {error.strerror or error}. It can be read as it is; "
                "`layerscope recover` seals it."
            )

    def _disown(self) -> None:
        """Close the inherited files in a forked child; a child that keeps them open keeps the lock of a dead parent."""
        self._appender.disown()


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
