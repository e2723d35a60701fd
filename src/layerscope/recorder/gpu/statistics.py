"""Summaries of tensors on an accelerator, made where they lie, without making the model wait for it.

    later = DeviceStatistics().of(tensor)          # launched on the device; later() gives the Summary

Nothing in a hook synchronises. One launch on the model's own stream takes the numbers of a tensor, so that a later
in-place operation cannot reach them; the numbers of many tensors are gathered by one more launch, straight to
page-locked memory, and the device's transfer reads them (`transfer.py`).
Only where so many are gathered before the first are read that they would take too much memory, the hook waits.
"""

from __future__ import annotations

import math
import threading
from collections import deque
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import replace
from functools import partial
from itertools import accumulate
from typing import TYPE_CHECKING

import numpy as np
import torch

from layerscope.log import log
from layerscope.recorder.gpu.batches import Arrival, ThreadBatch, leave
from layerscope.recorder.gpu.transfer import (
    capturing,
    current_stream,
    end_step,
    is_capturing,
    is_current,
    lies_plainly,
    ordinary,
    to_host,
    transfer_of,
)
from layerscope.recorder.tensors import dtype_name, undisturbed
from layerscope.stats import Summary, summarize
from layerscope.stats.channels import Adding

if TYPE_CHECKING:
    from layerscope.recorder.gpu.staging import Staged
    from layerscope.stats.device import ChannelSums, Laid, Level, ResultBuffer, Results, Start, StartAll
    from layerscope.stats.tensor_views import Array

    _Key = tuple[int, int, Level, bool]  # device, stream, level, and whether float64's buckets are wanted

_AHEAD = 8  # batches of one queue that are gathered and not read yet
_BOUND = 10.0  # seconds that others wait for one of them, at most

_abandoned: list[ResultBuffer] = []  # that a device may still write to, and that will not be read


class DeviceStatistics:
    """Summaries of tensors on an accelerator, made without waiting for it.

    Its methods may be called from several threads, and what they return in any thread at any time. Where the device has
    no kernels for a tensor, a copy of it is summarised on the host, when the summary is asked for.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._queues: dict[_Key, _Queue] = {}
        self._last: dict[Level, _Queue] = {}  # that was used at each level
        self._broken: str | None = None
        self._launches: ChannelSums | None = None

    @property
    def _channels(self) -> ChannelSums:
        if self._launches is None:
            from layerscope.stats.device import ChannelSums

            self._launches = ChannelSums()
        return self._launches

    @property
    def kernels(self) -> str:
        """Which code makes them: "triton", or the host, and why."""
        reason = _why_not() if self._broken is None else self._broken
        return f"on the host: {reason}" if reason else "triton"

    def prepare(self, tensors: Iterable[torch.Tensor], *, level: Level | None = None, channels: bool = False) -> None:
        """Make ready for tensors like these, and for their statistics at `level`, lest the first hook wait for it."""
        for where, dtypes in _by_device(tensors).items():
            transfer_of(where)
            if level is None or self.kernels != "triton":
                continue
            from layerscope.stats import device

            try:
                device.prepare(where, dtypes, level)
                if channels:
                    device.prepare_channels(where, dtypes)
                with self._lock:
                    self._queue_of((where.index, current_stream(where.index), level, False), where)
            except Exception as error:
                self._give_up(error)

    def start(self, tensor: torch.Tensor, level: Level) -> PendingSummary | None:
        """Launch the reduction of a tensor that lies plainly where the last ones did; None of any other: see `of`.

        Every line counts where a model waits for Python.
        """
        queue = self._last.get(level)
        if queue is None or not lies_plainly(tensor, queue.place) or current_stream(queue.place) != queue.stream:
            return None
        known, address, count = queue.known.get(tensor.dtype), tensor.data_ptr(), tensor.numel()
        if known is None or not address or address % 16 or not 0 < count < queue.most:
            return None
        return self._launched(queue, known, address, count, tensor.shape)

    def of(self, tensor: torch.Tensor, *, level: Level = "full", channels: int | None = None) -> Callable[[], Summary]:
        """Start the reduction of a plain tensor, however it lies; the call that is returned waits for the numbers.

        `channels` is the axis whose channels get numbers of their own.
        """
        if tensor.is_cuda:
            if is_capturing():
                raise capturing()
            if self._broken is None:
                self._broken = _why_not()
            if not self._broken and (later := self._anyhow(tensor, level)) is not None:
                if channels is None:
                    return later
                if 0 in tensor.shape:
                    return partial(_with_none, later, channels)
                with torch.cuda.device(tensor.device):
                    counted = self._counted(tensor.dtype, [(later, tensor, channels)])
                if counted is not None:
                    return counted[0]
        arrival = to_host(tensor, ordinary)
        return lambda: summarize(arrival(), level=level, channels=channels)

    def start_all(self, staged: list[Staged]) -> None:
        """Launch the reductions of staged tensors on the current stream, those of a dtype together."""
        groups: dict[tuple[Level, torch.dtype], list[Staged]] = {}
        for one in staged:
            groups.setdefault((one.want.level, one.dtype), []).append(one)
        for (level, dtype), group in groups.items():
            queue = self._together(group[0].device, dtype, level)
            if queue is None:
                for one in group:
                    one.later = self.of(one.values, level=level, channels=one.want.axis)
            else:
                self._start_together(queue, dtype, group)
                self._count_together(dtype, [one for one in group if one.want.axis is not None], level)

    def _together(self, where: torch.device, dtype: torch.dtype, level: Level) -> _Queue | None:
        """Return the queue where tensors of a dtype are started together, if there is such a thing."""
        if self._broken is None:
            self._broken = _why_not()
        if self._broken or dtype is torch.float64:  # which is looked at twice
            return None
        from layerscope.stats import device

        if dtype not in device.KINDS:
            return None
        try:
            with self._lock:
                queue = self._queue_of((where.index, current_stream(where.index), level, False), where)
                queue.starting_all(dtype)
        except torch.OutOfMemoryError:
            raise
        except Exception as error:
            self._give_up(error)
            return None
        return queue

    def _start_together(self, queue: _Queue, dtype: torch.dtype, group: list[Staged]) -> None:
        start, tile, most, name = queue.starting_all(dtype)
        lying = np.array([(one.address, one.shape.numel(), 0) for one in group], np.int64)
        tiles = -(-lying[:, 1] // tile)
        lying[:, 2] = -(-tiles // most)
        programs = -(-tiles // lying[:, 2])
        done = 0
        while done < len(group):
            if queue.is_full:
                self._make_way(queue)
            with self._lock:
                batch = self._open_batch(queue)
                first = batch.count
                last = min(len(group), done + queue.slots.size - first)
                batch.count += last - done  # first of all: an interrupt must not use them twice
                batch.step_over = False
                batch.table[first : batch.count] = lying[done:last]
                start(first, batch.table.ctypes.data + 24 * first, last - done, int(programs[done:last].max()))
            for index, one in enumerate(group[done:last], first):
                one.later = PendingSummary(batch, index, name, one.shape)
            done = last

    def _count_together(self, dtype: torch.dtype, group: list[Staged], level: Level) -> None:
        """Launch the sums of the channels of staged tensors, whose other statistics are launched."""
        if not group:
            return
        counted = self._counted(dtype, [(one.later, one.values, one.want.axis) for one in group])  # type: ignore[misc]
        for index, one in enumerate(group):
            both = None if counted is None else counted[index]
            one.later = both or self.of(one.values, level=level, channels=one.want.axis)

    def _counted(
        self, dtype: torch.dtype, tensors: list[tuple[Callable[[], Summary], torch.Tensor, int]]
    ) -> list[_PendingChannels] | None:
        """Launch the sums of the channels of tensors of one dtype, and send for them; None where that cannot be."""
        from layerscope.stats import device

        try:
            with self._lock, undisturbed():
                laid = [device.Laid.of(tensor, axis) for _, tensor, axis in tensors]
                sums = self._channels.start(dtype, laid)
        except torch.OutOfMemoryError:
            raise
        except Exception as error:
            self._give_up(error)
            return None
        tables = _ChannelTables(to_host(sums, ordinary))
        ends = accumulate(one.size for one in laid)
        return [
            _PendingChannels(later, tables, end, one)
            for (later, _, _), end, one in zip(tensors, ends, laid, strict=True)
        ]

    def _open_batch(self, queue: _Queue) -> _SlotBatch:
        """Return the batch of a queue, another one if all its slots are taken."""
        if queue.is_full:
            self._send(queue)
        return queue.batch or self._opened(queue)

    def end_step(self) -> None:
        """Send what the step has left to the host; what is waited for from now on leaves at once."""
        end_step()
        for queue in list(self._queues.values()):
            if queue.batch is not None:
                queue.batch.step_over = True

    def close(self) -> None:
        """Send for what is left, and give the memory on the device back."""
        with self._lock:
            for queue in list(self._queues.values()):
                with suppress(Exception):  # the reader of the numbers gets the error
                    self._send(queue)
                self._queues.pop(queue.key, None)
            self._last.clear()

    def _give_up(self, error: Exception) -> None:
        self._broken = f"Triton failed: {type(error).__name__}: {error}"
        self._last.clear()
        log.warning("%s. Statistics are made on the host, which costs a copy of every tensor.", self._broken)

    def _anyhow(self, tensor: torch.Tensor, level: Level) -> Callable[[], Summary] | None:
        """Launch, and have the next tensor of the kind go by `start`; None where there is no kernel for this one."""
        from layerscope.stats import device

        dtype, shape = tensor.dtype, tensor.shape
        if not device.takes(tensor):
            return None
        if 0 in shape:
            nothing = summarize(torch.empty(shape, dtype=dtype, device="cpu"), level=level)
            return lambda: nothing
        if not tensor.is_contiguous() or tensor.data_ptr() % 16:
            tensor = tensor.clone(memory_format=torch.contiguous_format)
        where, address = tensor.device, tensor.data_ptr()
        key = where.index, current_stream(where.index), level, dtype is torch.float64 and level == "full"
        with torch.cuda.device(where):
            try:
                with self._lock:
                    queue = self._queue_of(key, where)
                    known = queue.known.get(dtype)
                    if known is None:
                        known = queue.known[dtype] = queue.slots.starting(dtype), dtype_name(dtype)
                    if not key[-1]:
                        self._last[level] = queue
            except torch.OutOfMemoryError:
                raise
            except Exception as error:
                self._give_up(error)
                return None
            return self._launched(queue, known, address, tensor.numel(), shape)

    def _launched(
        self, queue: _Queue, known: tuple[Start, str], address: int, count: int, shape: torch.Size
    ) -> PendingSummary | None:
        begin, name = known
        if queue.is_full:
            self._make_way(queue)
        try:
            with self._lock:
                batch = self._open_batch(queue)
                index, batch.count = batch.count, batch.count + 1  # first of all: an interrupt must not use it twice
                batch.step_over = False
                begin(index, address, count)
        except torch.OutOfMemoryError:
            raise
        except Exception as error:
            self._give_up(error)
            return None
        return PendingSummary(batch, index, name, shape)

    def _make_way(self, queue: _Queue) -> None:
        """Wait, where another batch would be one too many; but not for ever.

        Without the lock: others go on, and one of them may be what the device waits for.
        """
        while True:
            with self._lock:
                batch = queue.in_the_way()
            if batch is None:
                return
            if not batch.arrive(_BOUND):
                queue.ahead = math.inf
                log.warning(
                    "device %d did not write its statistics for %g s: more than %d batches are under way from now on",
                    queue.place, _BOUND, _AHEAD,
                )  # fmt: skip

    def _opened(self, queue: _Queue) -> _SlotBatch:
        def leave() -> None:
            if queue.batch is batch:
                self._make_way(queue)
            with self._lock:
                if queue.batch is batch:
                    self._send(queue)

        batch = queue.batch = _SlotBatch(queue, leave)
        return batch

    def _queue_of(self, key: _Key, where: torch.device) -> _Queue:
        queue = self._queues.get(key)
        if queue is None:
            queue = self._queues[key] = _Queue(key, where)
        return queue

    def _send(self, queue: _Queue) -> None:
        """Have a batch's numbers gathered; its slots are free again, in the order of the stream."""
        batch = queue.batch
        if batch is None or not batch.count:
            return
        try:
            queue.batch = None
            batch.buffer = queue.buffer(batch.count)
            if is_current(queue.place):
                queue.slots.gather(batch.buffer)
            else:
                with torch.cuda.device(queue.place):
                    queue.slots.gather(batch.buffer)
            batch.transfer.send(batch)
            queue.sent.append(batch)
        except BaseException as error:  # what is in the slots is not known any more
            if (buffer := batch.buffer) is not None:
                _abandoned.append(buffer)
            batch.finish(error)
            self._queues.pop(queue.key, None)
            self._last = {level: other for level, other in self._last.items() if other is not queue}
            raise


class _Queue:
    """The launches of one stream at one level: how each dtype is launched, the batch that is open, those that left."""

    def __init__(self, key: _Key, where: torch.device) -> None:
        from layerscope.stats import device

        self.key = key
        self.place, self.stream, level, wide = key
        self.most = device.MOST
        self.transfer = transfer_of(where)
        self.origin = torch.cuda.current_stream(where)
        self.slots = device.Slots(where, level, self.stream, wide=wide)
        self.locks = where.type == "cuda"
        self.unused = [self.slots.buffer(0) for _ in range(2)]  # to get such memory holds up every launch
        self.tables: list[Array] = []  # of batches that were read
        self.known: dict[torch.dtype, tuple[Start, str]] = {}
        self._starts_all: dict[torch.dtype, tuple[StartAll, int, int, str]] = {}
        self.batch: _SlotBatch | None = None
        self.sent: deque[_SlotBatch] = deque()  # whose buffers may not have been read
        self.ahead = float(_AHEAD)

    def starting_all(self, dtype: torch.dtype) -> tuple[StartAll, int, int, str]:
        """Return the launch for many tensors of a dtype, the items of a program, the most programs, and its name."""
        known = self._starts_all.get(dtype)
        if known is None:
            known = self.slots.starting_all(dtype), *self.slots.tiling(dtype), dtype_name(dtype)
            self._starts_all[dtype] = known
        return known

    def table(self) -> Array:
        """Return memory that the device can read, for what a launch is told of each tensor of a batch."""
        if self.tables:
            return self.tables.pop()
        with undisturbed():
            return torch.empty((self.slots.size, 3), dtype=torch.int64, device="cpu", pin_memory=self.locks).numpy()

    def buffer(self, used: int) -> ResultBuffer:
        """Return a buffer for so many tensors, in the memory of one that was read where there is any."""
        if self.unused:
            return self.unused.pop()._replace(used=used)
        with undisturbed():
            return self.slots.buffer(used)

    @property
    def is_full(self) -> bool:
        """Whether the open batch has no slot that is free."""
        return self.batch is not None and self.batch.count == self.slots.size

    def in_the_way(self) -> _SlotBatch | None:
        """Forget batches that have been read; return the first of the others where no more may be under way."""
        while self.sent and self.sent[0].is_finished:
            self.sent.popleft()
        return self.sent[0] if len(self.sent) >= self.ahead else None


class _SlotBatch(ThreadBatch):
    """The numbers of tensors that are gathered together."""

    def __init__(self, queue: _Queue, leave: Callable[[], None]) -> None:
        super().__init__(queue.transfer, queue.origin)
        self._unused, self._tables = queue.unused, queue.tables
        self.table = queue.table()  # where launches are told where many tensors lie
        self.buffer: ResultBuffer | None = None
        self.gathered: Results | None = None
        self._send = leave

    def leave(self) -> None:
        self._send()

    def unload(self) -> None:
        from layerscope.stats.device import Results

        buffer = self.buffer
        assert buffer is not None
        try:
            self.ready.synchronize()
        except BaseException:
            _abandoned.append(buffer)
            raise
        self.gathered = Results.read(buffer)
        self.buffer = None
        self._unused.append(buffer)
        self._tables.append(self.table)

    def finish(self, error: BaseException | None = None) -> None:
        """Tell those who wait; who has the numbers holds neither their queue nor its memory from then on."""
        super().finish(error)
        self._send, self._unused, self._tables, self.table = _nothing, [], [], self.table[:0]


class PendingSummary:
    """A summary whose numbers are on their way."""

    __slots__ = ("_batch", "_dtype", "_index", "_shape")

    def __init__(self, batch: _SlotBatch, index: int, dtype: str, shape: torch.Size) -> None:
        self._batch = batch
        self._index = index
        self._dtype = dtype
        self._shape = shape

    def __call__(self) -> Summary:
        """Wait for the numbers."""
        self._batch.wait()
        assert self._batch.gathered is not None
        return self._batch.gathered[self._index].summary(self._dtype, tuple(self._shape))

    @property
    def has_arrived(self) -> bool:
        """Whether a call would not wait."""
        return self._batch.has_arrived

    def leave(self) -> None:
        """Fetch the numbers before they are asked for."""
        self._batch.leave()


class _ChannelTables:
    """The sums of the channels of several tensors, on their way to the host together."""

    def __init__(self, arrival: Arrival) -> None:
        self.arrival = arrival
        self._lock = threading.Lock()

    def part(self, start: int, stop: int) -> Array:
        """Wait for the sums of one tensor."""
        with self._lock:
            return self.arrival()[start:stop].numpy().copy()


class _PendingChannels:
    """A summary whose numbers are on their way, and those of its channels."""

    __slots__ = ("_end", "_laid", "_later", "_tables")

    def __init__(self, later: Callable[[], Summary], tables: _ChannelTables, end: int, laid: Laid) -> None:
        self._later = later
        self._tables = tables
        self._end = end
        self._laid = laid

    def __call__(self) -> Summary:
        """Wait for the numbers."""
        summary = self._later()
        return replace(summary, channels=self._laid.channels(self._tables.part(self._end - self._laid.size, self._end)))

    @property
    def has_arrived(self) -> bool:
        """Whether a call would not wait."""
        return self._tables.arrival.has_arrived and getattr(self._later, "has_arrived", True)

    def leave(self) -> None:
        """Fetch the numbers before they are asked for."""
        leave(self._later)
        self._tables.arrival.leave()


def _with_none(later: Callable[[], Summary], axis: int) -> Summary:
    """Return the summary of a tensor without values, with its channels."""
    summary = later()
    assert summary.shape is not None
    return replace(summary, channels=Adding(summary.shape, axis).channels())


def _nothing() -> None:
    """Have a batch that has left leave."""


def _why_not() -> str:
    from layerscope.stats.launching import why_not

    return why_not()


def _by_device(tensors: Iterable[torch.Tensor]) -> dict[torch.device, set[torch.dtype]]:
    found: dict[torch.device, set[torch.dtype]] = {}
    for tensor in tensors:
        if tensor.is_cuda:
            found.setdefault(tensor.device, set()).add(tensor.dtype)
    return found
