"""Summaries of tensors on an accelerator, made where they lie, without making the model wait for it.

    later = Statistics().of(tensor)          # launched on the device; later() gives the Summary

Nothing in a hook synchronises. One launch on the model's own stream takes the numbers of a tensor, so that a later
in-place operation cannot reach them; the numbers of many tensors are gathered by one more launch, straight to
page-locked memory, and the device's lane reads them (`lanes.py`).
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
from layerscope.recorder.cargo import Arrival, Carried, leave
from layerscope.recorder.copying import dtype_name, undisturbed
from layerscope.recorder.lanes import (
    arriving,
    capturing,
    current_stream,
    is_capturing,
    is_current,
    lane_of,
    lies_plainly,
    rest,
)
from layerscope.stats import Summary, summarize
from layerscope.stats.channels import Adding

if TYPE_CHECKING:
    from layerscope.recorder.staging import Staged
    from layerscope.stats.device import ChannelSums, Gathered, Laid, Level, Sheet, Start, StartAll
    from layerscope.stats.tensor_views import Array

    _Key = tuple[int, int, Level, bool]  # device, stream, level, and whether float64's buckets are wanted

__all__ = ["Later", "Statistics"]


_AHEAD = 8  # pages of one desk that are gathered, and that nobody has read
_BOUND = 10.0  # seconds that others wait for one of them, at most

_abandoned: list[Sheet] = []  # that a device may still write to, and nobody will read


class Statistics:
    """Summaries of tensors on an accelerator, made without waiting for it.

    Its methods may be called from several threads, and what they return in any thread at any time. Where the device has
    no kernels for a tensor, a copy of it is summarised on the host, when the summary is asked for.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._desks: dict[_Key, _Desk] = {}
        self._last: dict[Level, _Desk] = {}  # that was used at each level
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
            lane_of(where)
            if level is None or self.kernels != "triton":
                continue
            from layerscope.stats import device

            try:
                device.prepare(where, dtypes, level)
                if channels:
                    device.prepare_channels(where, dtypes)
                with self._lock:
                    self._desk_of((where.index, current_stream(where.index), level, False), where)
            except Exception as error:
                self._give_up(error)

    def start(self, tensor: torch.Tensor, level: Level) -> Later | None:
        """Launch the reduction of a tensor that lies plainly where the last ones did; None of any other: see `of`.

        Every line counts where a model waits for Python.
        """
        desk = self._last.get(level)
        if desk is None or not lies_plainly(tensor, desk.place) or current_stream(desk.place) != desk.stream:
            return None
        known, address, count = desk.known.get(tensor.dtype), tensor.data_ptr(), tensor.numel()
        if known is None or not address or address % 16 or not 0 < count < desk.most:
            return None
        return self._launched(desk, known, address, count, tensor.shape)

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
        arrival = arriving(tensor, lambda size: np.empty(size, np.uint8))
        return lambda: summarize(arrival(), level=level, channels=channels)

    def start_all(self, staged: list[Staged]) -> None:
        """Launch the reductions of staged tensors on the current stream, those of a dtype together."""
        groups: dict[tuple[Level, torch.dtype], list[Staged]] = {}
        for one in staged:
            groups.setdefault((one.wish.level, one.dtype), []).append(one)
        for (level, dtype), group in groups.items():
            desk = self._together(group[0].device, dtype, level)
            if desk is None:
                for one in group:
                    one.later = self.of(one.values, level=level, channels=one.wish.axis)
            else:
                self._start_together(desk, dtype, group)
                self._count_together(dtype, [one for one in group if one.wish.axis is not None], level)

    def _together(self, where: torch.device, dtype: torch.dtype, level: Level) -> _Desk | None:
        """Return the desk where tensors of a dtype are started together, if there is such a thing."""
        if self._broken is None:
            self._broken = _why_not()
        if self._broken or dtype is torch.float64:  # which is looked at twice
            return None
        from layerscope.stats import device

        if dtype not in device.KINDS:
            return None
        try:
            with self._lock:
                desk = self._desk_of((where.index, current_stream(where.index), level, False), where)
                desk.starting_all(dtype)
        except torch.OutOfMemoryError:
            raise
        except Exception as error:
            self._give_up(error)
            return None
        return desk

    def _start_together(self, desk: _Desk, dtype: torch.dtype, group: list[Staged]) -> None:
        start, tile, most, name = desk.starting_all(dtype)
        lying = np.array([(one.address, one.shape.numel(), 0) for one in group], np.int64)
        tiles = -(-lying[:, 1] // tile)
        lying[:, 2] = -(-tiles // most)
        programs = -(-tiles // lying[:, 2])
        done = 0
        while done < len(group):
            if desk.is_full:
                self._make_way(desk)
            with self._lock:
                page = self._page(desk)
                first = page.aboard
                last = min(len(group), done + desk.slots.size - first)
                page.aboard += last - done  # first of all: an interrupt must not use them twice
                page.over = False
                page.table[first : page.aboard] = lying[done:last]
                start(first, page.table.ctypes.data + 24 * first, last - done, int(programs[done:last].max()))
            for index, one in enumerate(group[done:last], first):
                one.later = Later(page, index, name, one.shape)
            done = last

    def _count_together(self, dtype: torch.dtype, group: list[Staged], level: Level) -> None:
        """Launch the sums of the channels of staged tensors, whose other statistics are launched."""
        if not group:
            return
        counted = self._counted(dtype, [(one.later, one.values, one.wish.axis) for one in group])  # type: ignore[misc]
        for index, one in enumerate(group):
            both = None if counted is None else counted[index]
            one.later = both or self.of(one.values, level=level, channels=one.wish.axis)

    def _counted(
        self, dtype: torch.dtype, tensors: list[tuple[Callable[[], Summary], torch.Tensor, int]]
    ) -> list[_Counted] | None:
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
        tables = _Tables(arriving(sums, lambda size: np.empty(size, np.uint8)))
        ends = accumulate(one.size for one in laid)
        return [_Counted(later, tables, end, one) for (later, _, _), end, one in zip(tensors, ends, laid, strict=True)]

    def _page(self, desk: _Desk) -> _Page:
        """Return the page of a desk, another one if all its slots are taken."""
        if desk.is_full:
            self._send(desk)
        return desk.page or self._opened(desk)

    def fetch(self) -> None:
        """Hear that a step has ended: what is waited for from now on leaves at once."""
        rest()
        for desk in list(self._desks.values()):
            if desk.page is not None:
                desk.page.over = True

    def close(self) -> None:
        """Send for what is left, and give the memory on the device back."""
        with self._lock:
            for desk in list(self._desks.values()):
                with suppress(Exception):  # whoever waits for the numbers is told
                    self._send(desk)
                self._desks.pop(desk.key, None)
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
                    desk = self._desk_of(key, where)
                    known = desk.known.get(dtype)
                    if known is None:
                        known = desk.known[dtype] = desk.slots.starting(dtype), dtype_name(dtype)
                    if not key[-1]:
                        self._last[level] = desk
            except torch.OutOfMemoryError:
                raise
            except Exception as error:
                self._give_up(error)
                return None
            return self._launched(desk, known, address, tensor.numel(), shape)

    def _launched(
        self, desk: _Desk, known: tuple[Start, str], address: int, count: int, shape: torch.Size
    ) -> Later | None:
        begin, name = known
        if desk.is_full:
            self._make_way(desk)
        try:
            with self._lock:
                page = self._page(desk)
                index, page.aboard = page.aboard, page.aboard + 1  # first of all: an interrupt must not use it twice
                page.over = False
                begin(index, address, count)
        except torch.OutOfMemoryError:
            raise
        except Exception as error:
            self._give_up(error)
            return None
        return Later(page, index, name, shape)

    def _make_way(self, desk: _Desk) -> None:
        """Wait, where another page would be one too many; but not for ever.

        Without the lock: others go on, and one of them may be what the device waits for.
        """
        while True:
            with self._lock:
                page = desk.in_the_way()
            if page is None:
                return
            if not page.arrive(_BOUND):
                desk.ahead = math.inf
                log.warning(
                    "device %d did not write its statistics for %g s: more than %d pages are under way from now on",
                    desk.place, _BOUND, _AHEAD,
                )  # fmt: skip

    def _opened(self, desk: _Desk) -> _Page:
        def leave() -> None:
            if desk.page is page:
                self._make_way(desk)
            with self._lock:
                if desk.page is page:
                    self._send(desk)

        page = desk.page = _Page(desk, leave)
        return page

    def _desk_of(self, key: _Key, where: torch.device) -> _Desk:
        desk = self._desks.get(key)
        if desk is None:
            desk = self._desks[key] = _Desk(key, where)
        return desk

    def _send(self, desk: _Desk) -> None:
        """Have a page's numbers gathered; its slots are free again, in the order of the stream."""
        page = desk.page
        if page is None or not page.aboard:
            return
        try:
            desk.page = None
            page.sheet = desk.sheet(page.aboard)
            if is_current(desk.place):
                desk.slots.gather(page.sheet)
            else:
                with torch.cuda.device(desk.place):
                    desk.slots.gather(page.sheet)
            page.lane.send(page)
            desk.sent.append(page)
        except BaseException as error:  # what is in the slots is not known any more
            if (sheet := page.sheet) is not None:
                _abandoned.append(sheet)
            page.finish(error)
            self._desks.pop(desk.key, None)
            self._last = {level: other for level, other in self._last.items() if other is not desk}
            raise


class _Desk:
    """Where the tensors of one stream are taken, at one level: the launch and the name of each dtype, the open page."""

    def __init__(self, key: _Key, where: torch.device) -> None:
        from layerscope.stats import device

        self.key = key
        self.place, self.stream, level, wide = key
        self.most = device.MOST
        self.lane = lane_of(where)
        self.origin = torch.cuda.current_stream(where)
        self.slots = device.Slots(where, level, self.stream, wide=wide)
        self.locks = where.type == "cuda"
        self.unused = [self.slots.sheet(0) for _ in range(2)]  # to get such memory holds up every launch
        self.tables: list[Array] = []  # of pages that were read
        self.known: dict[torch.dtype, tuple[Start, str]] = {}
        self._starts_all: dict[torch.dtype, tuple[StartAll, int, int, str]] = {}
        self.page: _Page | None = None
        self.sent: deque[_Page] = deque()  # whose sheets may not have been read
        self.ahead = float(_AHEAD)

    def starting_all(self, dtype: torch.dtype) -> tuple[StartAll, int, int, str]:
        """Return the launch for many tensors of a dtype, the items of a program, the most programs, and its name."""
        known = self._starts_all.get(dtype)
        if known is None:
            known = self.slots.starting_all(dtype), *self.slots.tiling(dtype), dtype_name(dtype)
            self._starts_all[dtype] = known
        return known

    def table(self) -> Array:
        """Return memory that the device can read, for what a launch is told of each tensor of a page."""
        if self.tables:
            return self.tables.pop()
        with undisturbed():
            return torch.empty((self.slots.size, 3), dtype=torch.int64, device="cpu", pin_memory=self.locks).numpy()

    def sheet(self, used: int) -> Sheet:
        """Return a sheet for so many tensors, in the memory of one that was read where there is any."""
        if self.unused:
            return self.unused.pop()._replace(used=used)
        with undisturbed():
            return self.slots.sheet(used)

    @property
    def is_full(self) -> bool:
        """Whether the open page has no slot that is free."""
        return self.page is not None and self.page.aboard == self.slots.size

    def in_the_way(self) -> _Page | None:
        """Forget pages that have been read; return the one that must be before another is gathered, if there is one."""
        while self.sent and self.sent[0].is_finished:
            self.sent.popleft()
        return self.sent[0] if len(self.sent) >= self.ahead else None


class _Page(Carried):
    """The numbers of tensors that are gathered together."""

    def __init__(self, desk: _Desk, leave: Callable[[], None]) -> None:
        super().__init__(desk.lane, desk.origin)
        self._unused, self._tables = desk.unused, desk.tables
        self.table = desk.table()  # where launches are told where many tensors lie
        self.sheet: Sheet | None = None
        self.gathered: Gathered | None = None
        self._send = leave

    def leave(self) -> None:
        self._send()

    def unload(self) -> None:
        from layerscope.stats.device import Gathered

        sheet = self.sheet
        assert sheet is not None
        try:
            self.ready.synchronize()
        except BaseException:
            _abandoned.append(sheet)
            raise
        self.gathered = Gathered.read(sheet)
        self.sheet = None
        self._unused.append(sheet)
        self._tables.append(self.table)

    def finish(self, error: BaseException | None = None) -> None:
        """Tell those who wait; who has the numbers holds neither their desk nor its memory from then on."""
        super().finish(error)
        self._send, self._unused, self._tables, self.table = _nothing, [], [], self.table[:0]


class Later:
    """A summary whose numbers are on their way."""

    __slots__ = ("_dtype", "_index", "_page", "_shape")

    def __init__(self, page: _Page, index: int, dtype: str, shape: torch.Size) -> None:
        self._page = page
        self._index = index
        self._dtype = dtype
        self._shape = shape

    def __call__(self) -> Summary:
        """Wait for the numbers."""
        self._page.wait()
        assert self._page.gathered is not None
        return self._page.gathered[self._index].summary(self._dtype, tuple(self._shape))

    @property
    def has_arrived(self) -> bool:
        """Whether a call would not wait."""
        return self._page.has_arrived

    def leave(self) -> None:
        """Have the numbers fetched, though nobody waits for them."""
        self._page.leave()


class _Tables:
    """The sums of the channels of several tensors, on their way to the host together."""

    def __init__(self, arrival: Arrival) -> None:
        self.arrival = arrival
        self._lock = threading.Lock()

    def part(self, start: int, stop: int) -> Array:
        """Wait for the sums of one tensor."""
        with self._lock:
            return self.arrival()[start:stop].numpy().copy()


class _Counted:
    """A summary whose numbers are on their way, and those of its channels."""

    __slots__ = ("_end", "_laid", "_later", "_tables")

    def __init__(self, later: Callable[[], Summary], tables: _Tables, end: int, laid: Laid) -> None:
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
        """Have the numbers fetched, though nobody waits for them."""
        leave(self._later)
        self._tables.arrival.leave()


def _with_none(later: Callable[[], Summary], axis: int) -> Summary:
    """Return the summary of a tensor without values, with its channels."""
    summary = later()
    assert summary.shape is not None
    return replace(summary, channels=Adding(summary.shape, axis).channels())


def _nothing() -> None:
    """Have a page that has left leave."""


def _why_not() -> str:
    from layerscope.stats.launching import why_not

    return why_not()


def _by_device(tensors: Iterable[torch.Tensor]) -> dict[torch.device, set[torch.dtype]]:
    found: dict[torch.device, set[torch.dtype]] = {}
    for tensor in tensors:
        if tensor.is_cuda:
            found.setdefault(tensor.device, set()).add(tensor.dtype)
    return found
