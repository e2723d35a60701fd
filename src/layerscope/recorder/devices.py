"""Summaries of tensors on an accelerator, made where they lie, without making the model wait for it.

    later = Statistics().of(tensor)          # launched on the device; later() gives the Summary

Nothing in a hook synchronises. One launch on the model's own stream takes a tensor's numbers, so that a later in-place
operation cannot reach them; the numbers of many tensors are gathered by one more and leave together, by the device's
lane (`lanes.py`).
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any

import torch

from layerscope.recorder.lanes import Carried, Lane, arriving, lane_of, refuse_capture, rest
from layerscope.stats import Summary, summarize

if TYPE_CHECKING:
    from layerscope.stats.device import Gathered, Level, Sheet, Slots

    _Key = tuple[int, int, Level, bool]  # device, stream, level, and whether float64's buckets are wanted

__all__ = ["Statistics"]

_log = logging.getLogger("layerscope")
_current_stream: Any = getattr(torch._C, "_cuda_getCurrentRawStream", None)  # None in a build without CUDA


class Statistics:
    """Summaries of tensors on an accelerator, made without waiting for it.

    `of` may be called from several threads, and what it returns in any thread at any time. Where the device has no
    kernels for a tensor, a copy of it is summarised on the host, when the summary is asked for.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._slots: dict[_Key, Slots] = {}
        self._open: dict[_Key, _Page] = {}
        self._known: dict[torch.dtype, tuple[str, Callable[[torch.Tensor], bool], bool]] = {}
        self._broken: str | None = None

    @property
    def kernels(self) -> str:
        """Which code makes them: "triton", or the host, and why."""
        reason = _why_not() if self._broken is None else self._broken
        return f"on the host: {reason}" if reason else "triton"

    def prepare(self, tensors: Iterable[torch.Tensor], *, level: Level | None = None) -> None:
        """Make ready for tensors like these, and for their statistics at `level`, lest the first hook wait for it."""
        for where, dtypes in _by_device(tensors).items():
            lane_of(where)
            if level is None or self.kernels != "triton":
                continue
            from layerscope.stats import device

            try:
                device.prepare(where, dtypes, level)
                stream = torch._C._cuda_getCurrentRawStream(where.index)
                with self._lock:
                    self._slots_at((where.index, stream, level, False), where)
            except Exception as error:
                self._give_up(error)

    def of(self, tensor: torch.Tensor, *, level: Level = "full") -> Callable[[], Summary]:
        """Start the reduction of a plain tensor; the call that is returned waits for the numbers."""
        if tensor.is_cuda:
            refuse_capture()
            if self._broken is None:
                self._broken = _why_not()
            if not self._broken:
                try:
                    later = self._started(tensor, level)
                except torch.OutOfMemoryError:
                    raise
                except Exception as error:
                    self._give_up(error)
                else:
                    if later is not None:
                        return later
        shape, dtype = tensor.shape, tensor.dtype
        arrival = arriving(tensor, lambda: torch.empty(shape, dtype=dtype, device="cpu"))
        return lambda: summarize(arrival(), level=level)

    def fetch(self) -> None:
        """Hear that a step has ended: what is waited for from now on leaves at once."""
        rest()
        for page in list(self._open.values()):
            page.over = True

    def close(self) -> None:
        """Send for what is left, and give the memory on the device back."""
        with self._lock:
            for key in list(self._open):
                self._send(key)
            self._slots.clear()

    def _give_up(self, error: Exception) -> None:
        self._broken = f"Triton failed: {type(error).__name__}: {error}"
        _log.warning("%s. Statistics are made on the host, which costs a copy of every tensor.", self._broken)

    def _started(self, tensor: torch.Tensor, level: Level) -> Callable[[], Summary] | None:
        """Launch; None where there is no kernel for this tensor. Every line counts where a model waits for Python."""
        dtype, shape = tensor.dtype, tuple(tensor.shape)
        known = self._known.get(dtype)
        if known is None:
            known = self._known[dtype] = _known(dtype)
        name, takes, wide = known
        if not takes(tensor):
            return None
        if 0 in shape:
            nothing = summarize(torch.empty(shape, dtype=dtype, device="cpu"), level=level)
            return lambda: nothing
        if not tensor.is_contiguous() or tensor.data_ptr() % 16:
            tensor = tensor.clone(memory_format=torch.contiguous_format)
        place = tensor.get_device()
        key = place, _current_stream(place), level, wide and level == "full"
        with self._lock:
            page = self._open.get(key)
            if page is None:
                page = self._opened(key, tensor.device)
            index = page.aboard
            page.slots.start(index, tensor)
            page.aboard = index + 1
            page.over = False
            if page.aboard == page.slots.size:
                self._send(key)
        return _Later(page, index, name, shape)

    def _opened(self, key: _Key, where: torch.device) -> _Page:
        def leave() -> None:
            with self._lock:
                if self._open.get(key) is page:
                    self._send(key)

        page = _Page(lane_of(where), torch.cuda.current_stream(where), self._slots_at(key, where), leave)
        self._open[key] = page
        return page

    def _slots_at(self, key: _Key, where: torch.device) -> Slots:
        slots = self._slots.get(key)
        if slots is None:
            from layerscope.stats import device

            _, stream, level, wide = key
            slots = self._slots[key] = device.Slots(where, level, stream, wide=wide)
        return slots

    def _send(self, key: _Key) -> None:
        """Have a page's numbers gathered; its slots are free again, in the order of the stream."""
        page = self._open.pop(key)
        if page.aboard:
            with torch.cuda.stream(page.origin):  # in another thread it would not be the current one
                page.sheet = page.slots.gather(page.aboard)
            page.lane.send(page)


class _Later:
    """A summary whose numbers are on their way."""

    __slots__ = ("_dtype", "_index", "_page", "_shape")

    def __init__(self, page: _Page, index: int, dtype: str, shape: tuple[int, ...]) -> None:
        self._page = page
        self._index = index
        self._dtype = dtype
        self._shape = shape

    def __call__(self) -> Summary:
        """Wait for the numbers."""
        self._page.wait()
        assert self._page.gathered is not None
        return self._page.gathered[self._index].summary(self._dtype, self._shape)


class _Page(Carried):
    """The numbers of tensors that are gathered together."""

    def __init__(self, lane: Lane, origin: torch.cuda.Stream, slots: Slots, leave: Callable[[], None]) -> None:
        super().__init__(lane, origin)
        self.slots = slots
        self.sheet: Sheet | None = None
        self.gathered: Gathered | None = None
        self._send = leave

    def leave(self) -> None:
        self._send()

    def unload(self) -> None:
        from layerscope.stats.device import Gathered

        assert self.sheet is not None
        self.gathered = Gathered.read(self.sheet, self.lane.bring)
        self.sheet = None


def _why_not() -> str:
    from layerscope.stats.launching import why_not

    return why_not()


def _known(dtype: torch.dtype) -> tuple[str, Callable[[torch.Tensor], bool], bool]:
    """Return what is always the same about a dtype: its name, which of its tensors have a kernel, how wide it is."""
    from layerscope.stats.device import takes

    return str(dtype).removeprefix("torch."), takes, dtype is torch.float64


def _by_device(tensors: Iterable[torch.Tensor]) -> dict[torch.device, set[torch.dtype]]:
    found: dict[torch.device, set[torch.dtype]] = {}
    for tensor in tensors:
        if tensor.is_cuda:
            found.setdefault(tensor.device, set()).add(tensor.dtype)
    return found
