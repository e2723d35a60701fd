"""Small tensors on a GPU: copied on the device in the hook, and taken to the host together when the step ends.

    staged = staging.stage(tensor, want)     # in a hook; None of what is not small, not plain, or not on a GPU
    staging.send()                           # the step has ended: one launch for all statistics, one copy for all bytes
    staged.tensor(), staged.summary()        # wait for the host to have them; sends what is not sent yet

The copy into a staging buffer runs on the model's own stream, so that it holds what was there in the hook, whatever
changes the tensor afterwards. A launch, a copy to the host and the Python around them would cost several times as much
there. A buffer leaves when it is full or the step ends. One whose bytes go to the host is small, so that a copy the
model itself waits for never stands behind many of ours.
"""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING, Any

import torch

from layerscope.recorder.gpu.batches import Arrival, Lost, leave
from layerscope.recorder.gpu.transfer import Transfer, current_stream, is_current, lies_plainly, transfer_of
from layerscope.stats.driver import copying, why_no_driver

if TYPE_CHECKING:
    from collections.abc import Callable

    from layerscope.recorder.gpu.statistics import DeviceStatistics
    from layerscope.recorder.taps import Want
    from layerscope.stats import Summary

SMALL = 2 << 20  # bytes of a tensor that is staged; a larger one is copied or reduced at once
_ROOM = {False: 64 << 20, True: 16 << 20}  # bytes of a buffer, by whether they go to the host: see above
_BUFFERS = 3  # of a stream, whose bytes may be on their way to the host, before a new one waits for the first

_Key = tuple[int, int, bool]  # device, stream, and whether the bytes are wanted on the host


class Staged:
    """A tensor that was copied to a staging buffer, and what is wanted of it."""

    __slots__ = ("arrival", "at", "buffer", "dtype", "later", "lost", "shape", "want")

    arrival: Arrival  # these are there once it was sent
    later: Callable[[], Summary]
    lost: Lost  # why its values never arrive

    def __init__(self, buffer: _Buffer, at: int, tensor: torch.Tensor, want: Want) -> None:
        self.buffer: _Buffer | None = buffer  # None once it was sent
        self.at = at
        self.dtype = tensor.dtype
        self.shape = tensor.shape
        self.want = want

    @property
    def device(self) -> torch.device:
        """Where the copy lies, until it is sent."""
        assert self.buffer is not None
        return self.buffer.transfer.device

    @property
    def address(self) -> int:
        """Where the copy lies on the device, until it is sent."""
        assert self.buffer is not None
        return self.buffer.address + self.at

    @property
    def values(self) -> torch.Tensor:
        """The copy on the device, until it is sent."""
        assert self.buffer is not None
        size = self.shape.numel() * self.dtype.itemsize
        return self.buffer.memory[self.at : self.at + size].view(self.dtype).view(self.shape)

    def tensor(self) -> torch.Tensor:
        """Wait for the values."""
        self._sent()
        if not hasattr(self, "arrival"):
            raise getattr(self, "lost", None) or RuntimeError("it could not be sent from the device")
        return self.arrival()

    def summary(self) -> Summary:
        """Wait for the statistics."""
        self._sent()
        if not hasattr(self, "later"):
            raise RuntimeError("its statistics could not be launched")
        return self.later()

    def leave(self) -> None:
        """Send it, before it is asked for."""
        self._sent()
        leave(getattr(self, "arrival", None))
        leave(getattr(self, "later", None))

    def _sent(self) -> None:
        if self.buffer is not None:
            self.buffer.staging.send()


class _Buffer:
    """Memory of a device that is filled on one stream, and what was staged in it."""

    def __init__(self, staging: Staging, transfer: Transfer, raw: int, room: int) -> None:
        self.staging = staging
        self.transfer = transfer
        self.raw = raw
        self.room = room
        self.memory = torch.empty(room, dtype=torch.uint8, device=transfer.device)
        self.memory.record_stream(transfer.side)  # the next owner of this memory waits for our copies
        self.address = self.memory.data_ptr()
        self.at = 0
        self.staged: list[Staged] = []
        self.left: Any = None  # marks where the side stream has read it


class Staging:
    """The staging buffers of one recording, of several threads, streams and devices."""

    def __init__(self, statistics: DeviceStatistics) -> None:
        self._statistics = statistics
        self._lock = threading.RLock()
        self._open: dict[_Key, _Buffer] = {}
        self._idle: dict[_Key, list[_Buffer]] = {}
        self._copy: dict[int, Callable[[int, int, int, int], None]] = {}

    def stage(self, tensor: torch.Tensor, want: Want) -> Staged | None:
        """Copy a small tensor that lies on the current GPU; every line counts where a model waits for Python."""
        place = tensor.get_device()
        if not lies_plainly(tensor, place) or not 0 < (size := tensor.nbytes) <= SMALL:
            return None
        address, raw = tensor.data_ptr(), current_stream(place)
        if not address:  # it lies nowhere
            return None
        key = place, raw, want.tensor
        with self._lock:
            buffer = self._open.get(key)
            if buffer is None or buffer.at + size > buffer.room:
                if buffer is not None:
                    self._send(key, buffer)
                buffer = self._opened(key)
                if buffer is None:
                    return None
            at = buffer.at
            buffer.at = (at + size + 63) & -64
            self._copy[place](buffer.address + at, address, size, raw)
            staged = Staged(buffer, at, tensor, want)
            buffer.staged.append(staged)
        return staged

    def send(self) -> None:
        """Have everything leave that is staged: who waits for it waits for the device alone from then on."""
        with self._lock:
            for key, buffer in list(self._open.items()):
                if not buffer.staged:
                    continue
                place, raw, _ = key
                if raw == current_stream(place) and is_current(place):
                    self._send(key, buffer)
                else:
                    with torch.cuda.stream(buffer.transfer.origin(raw)):
                        self._send(key, buffer)

    def close(self) -> None:
        """Have everything leave, and give the buffers back."""
        with self._lock:
            self.send()
            self._open.clear()
            self._idle.clear()

    def _opened(self, key: _Key) -> _Buffer | None:
        place, raw, to_host = key
        if place not in self._copy:
            if why_no_driver():
                return None
            self._copy[place] = copying(place, on_device=True)
        idle = self._idle.setdefault(key, [])
        if len(idle) >= _BUFFERS or (idle and (idle[0].left is None or idle[0].left.query())):
            buffer = idle.pop(0)
            if buffer.left is not None:
                buffer.left.wait(buffer.transfer.origin(raw))  # the device waits, not we
        else:
            buffer = _Buffer(self, transfer_of(torch.device("cuda", place)), raw, _ROOM[to_host])
        self._open[key] = buffer
        return buffer

    def _send(self, key: _Key, buffer: _Buffer) -> None:
        """Send what a buffer holds, on the stream it was filled on, which is the current one."""
        del self._open[key]
        staged, buffer.staged = buffer.staged, []
        try:
            self._statistics.start_all([one for one in staged if one.want.summary])
            if key[2]:
                buffer.left = buffer.transfer.send_all(buffer.memory[: buffer.at], staged, buffer.raw)
        finally:
            for one in staged:
                one.buffer = None
        buffer.at = 0
        self._idle[key].append(buffer)
