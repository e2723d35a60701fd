"""Bring tensors from a GPU to the host without making the model wait for it.

    arrival = to_host(tensor, room)          # on its way; arrival() waits until the host has the values

Nothing here synchronises, and a later in-place operation cannot reach what is on its way: it is a clone, made on the
model's own stream. Where page-locked memory is free, a side stream copies the clone there. Otherwise a thread takes it,
through one small page-locked buffer, to memory that the caller gives: a copy to memory that is not page-locked would
hold up every launch of the process.
"""

from __future__ import annotations

import atexit
import threading
import time
import traceback
from collections import deque
from collections.abc import Callable, Iterable
from contextlib import suppress
from functools import cache, partial
from queue import SimpleQueue
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from layerscope.errors import Unsupported
from layerscope.log import log
from layerscope.recorder.gpu.batches import (
    Arrival,
    Batch,
    CloneBatch,
    Event,
    Lost,
    PinnedBatch,
    ThreadBatch,
    as_tensor,
    flat,
)
from layerscope.recorder.gpu.pinned_pool import Bytes, PinnedPool, Room
from layerscope.stats.driver import allow_captures, copying, why_no_driver

if TYPE_CHECKING:
    from layerscope.recorder.gpu.staging import Staged

_STAGE = 16 << 20
_MOST = 2 << 30  # bytes of clones a device holds at most, if a quarter of its free memory is not less
_TOGETHER = 256 << 20  # bytes of clones that are sent before one is asked for, if a quarter of the device's is not less
_BOUND = 10.0  # seconds that a hook waits for room on the device, at most

# What torch asks CUDA, without its Python around it; a build without CUDA has none of them.
current_stream: Any = getattr(torch._C, "_cuda_getCurrentRawStream", None)
_current_device: Any = getattr(torch._C, "_cuda_getDevice", None)
is_capturing: Any = getattr(torch._C, "_cuda_isCurrentStreamCapturing", None)

_Tensor = torch.Tensor


def to_host(tensor: torch.Tensor, room: Callable[[int], Bytes]) -> Arrival:
    """Start a copy to the host; where no page-locked memory is free, `room` gives memory for it, in another thread.

    What the thread takes stays on the device until there is enough of it to leave together, or until it is waited for:
    a thread that works beside a model that waits for Python takes as much from it as it does itself. Where copies do
    not leave as fast as they come, the caller waits rather than fill the device, and is told `Lost` in the end.
    """
    arrival = Arrival(tensor.dtype, tensor.shape, room)
    if tensor.is_cuda:
        if is_capturing():
            raise capturing()
        transfer_of(tensor.device).add(arrival, tensor)
    else:
        arrival.host = as_tensor(room(tensor.nbytes), tensor.dtype, tensor.shape).copy_(tensor)
    return arrival


def ordinary(size: int) -> Bytes:
    """Return ordinary memory of the host."""
    return np.empty(size, np.uint8)


def lies_plainly(tensor: torch.Tensor, place: int) -> bool:
    """Tell whether an ordinary tensor lies in order on the current device, `place`, and no graph is captured.

    Says no quickly rather than why. The default stream, number 0, is never captured.
    """
    try:
        return (
            type(tensor) is _Tensor
            and tensor.get_device() == place
            and tensor.is_contiguous()
            and not tensor.is_neg()
            and not (tensor.dtype.is_complex or tensor.is_nested or tensor.is_quantized)
            and not (current_stream(place) and is_capturing())
            and is_current(place)
        )
    except RuntimeError:  # what is sparse does not lie in order
        return False


@cache
def is_alone() -> bool:
    """Tell whether there is no other device."""
    return torch.cuda.device_count() <= 1


def is_current(place: int) -> bool:
    """Tell whether a device is the current one, which is where the driver launches and copies."""
    return is_alone() or bool(_current_device() == place)


def capturing() -> Unsupported:
    """Say that nothing is recorded in the middle of the capture of a CUDA graph."""
    return Unsupported(
        "nothing can be recorded while a CUDA graph is captured: its replays would not record it again; "
        "record a forward that runs without the graph"
    )


def end_step() -> None:
    """Send what the step has left: who waits for it need not wait for more."""
    for transfer in [*_transfers.values()]:
        if transfer.loading is not None or transfer.clones is not None:
            transfer.end_step()


class Transfer:
    """The way from one device to the host: its side stream, its page-locked memory, its thread."""

    def __init__(self, device: torch.device) -> None:
        self.place: int = device.index
        self.device = device
        self._lock = threading.RLock()
        self._changed = threading.Condition(self._lock)
        self.clones: CloneBatch | None = None  # that is being filled
        self.loading: PinnedBatch | None = None  # that is being filled
        self._under_way: deque[PinnedBatch] = deque()  # in the order in which they left, and will land
        self._held = 0
        self._most = min(_MOST, torch.cuda.mem_get_info(device)[0] // 4)
        self._enough = min(_TOGETHER, self._most // 4)
        self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        self.side = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        self._arrived = torch.cuda.Event()  # type: ignore[no-untyped-call]
        self._stage = torch.empty(_STAGE, dtype=torch.uint8, device="cpu", pin_memory=True)
        self._queue: SimpleQueue[ThreadBatch | None] = SimpleQueue()  # None asks for page-locked memory, or to stop
        self._stopped = False
        self._origins: dict[int, torch.cuda.Stream] = {}  # by their number
        self.pinned = None if why_no_driver() else PinnedPool(let_go=self._retire, ask=partial(self._queue.put, None))
        self._copy = None if why_no_driver() else copying(device.index)
        self._thread = threading.Thread(target=self._run, name=f"layerscope-{device}", daemon=True)
        self._thread.start()
        atexit.register(self.stop)

    def stop(self) -> None:
        """End the thread, once it has carried what it was given.

        An interpreter that ends while the thread is inside torch or the driver aborts the process.
        """
        self._stopped = True
        self._queue.put(None)
        self._thread.join()

    def add(self, arrival: Arrival, tensor: torch.Tensor) -> None:
        """Have a tensor leave, as it is when the current stream comes to this point."""
        if is_current(self.place):
            self._add(arrival, tensor)
        else:
            with torch.cuda.device(self.device):
                self._add(arrival, tensor)

    def _add(self, arrival: Arrival, tensor: torch.Tensor) -> None:
        size = tensor.nbytes
        raw = current_stream(self.place)
        with self._lock:
            room = self.pinned.room(size) if size and self.pinned is not None else None
            if room is None:
                self._keep_clone(arrival, tensor, size, raw)
            else:
                self._copy_beside(arrival, tensor, room, size, raw)

    def prepare(self) -> None:
        """Get memory, lest the first steps wait for it or go without."""
        if self.pinned is not None:
            self._get_memory(self.pinned.prepare)

    def _get_memory(self, get: Callable[[], None]) -> None:
        try:
            get()
        except Exception as error:  # there is a way without
            said = f"{type(error).__name__}: {error}"
            log.warning(
                "no more page-locked memory for copies from %s, which are slower without: %s", self.device, said
            )

    def send_all(self, memory: torch.Tensor, staged: list[Staged], raw: int) -> Any:
        """Copy a staging buffer to the host on the side stream; return what marks that it was read there.

        `raw`, the current stream, has filled it.
        """
        with self._lock:
            size = memory.numel()
            room = None if self.pinned is None else self.pinned.room(size)
            if room is None:
                for one in staged:
                    arrival = Arrival(one.dtype, one.shape, ordinary)
                    try:
                        self._keep_clone(arrival, one.values, one.values.nbytes, raw)
                        one.arrival = arrival
                    except Lost as error:
                        one.lost = error
                return None
            chunk, at, address = room
            self._send_pinned()
            batch = self._filling(chunk, raw)
            self._copy_after(batch, address, memory.data_ptr(), size)
            batch.count += len(staged)
            for one in staged:
                one.arrival = Arrival(one.dtype, one.shape)
                one.arrival.landing, one.arrival.batch = (chunk, at + one.at, address + one.at), batch
            left = Event()
            left.record(self.side)
            self._send_pinned()
            return left

    def _filling(self, chunk: Bytes, raw: int) -> PinnedBatch:
        """Return the batch that is being filled from a stream, and have it hold on to the chunk."""
        batch = self.loading
        origin = self.origin(raw)
        if batch is None or batch.origin is not origin:
            self._send_pinned()
            batch = self.loading = PinnedBatch(self, origin)
        batch.hold(chunk)
        return batch

    def origin(self, raw: int) -> torch.cuda.Stream:
        """Return the stream of a number."""
        known = self._origins.get(raw)
        if known is None:
            here = torch.cuda.current_stream(self.device)
            known = here if here.cuda_stream == raw else torch.cuda.ExternalStream(raw, self.device)  # type: ignore[no-untyped-call]
            self._origins[raw] = known
        return known

    def _copy_beside(self, arrival: Arrival, tensor: torch.Tensor, room: Room, size: int, raw: int) -> None:
        """Copy a clone on the side stream, while the model goes on."""
        if self._held + size > self._most:
            self._send_pinned()
            self._make_room(size)
        batch = self._filling(room[0], raw)
        clone = tensor.clone(memory_format=torch.contiguous_format)
        self._copy_after(batch, room[2], clone.data_ptr(), size)
        clone.record_stream(self.side)
        arrival.landing, arrival.batch = room, batch
        batch.count += 1
        batch.step_over = False
        batch.size += size
        self._held += size
        if batch.size >= self._enough:
            self._send_pinned()

    def _copy_after(self, batch: PinnedBatch, to: int, source: int, size: int) -> None:
        """Copy on the side stream, once the batch's own stream has come as far as it is now."""
        ready = Event()
        ready.record(batch.origin)
        self.side.wait_event(ready)
        self._copy(to, source, size, self.side.cuda_stream)  # type: ignore[misc]  # it is there if memory is

    def _make_room(self, size: int) -> None:
        """Wait until the device has room for another clone, but not for ever."""
        until = time.monotonic() + _BOUND
        while self._held and self._held + size > self._most:
            self._send_clones()
            if self._under_way:
                self._await_one()
            elif not self._changed.wait(until - time.monotonic()):
                raise Lost(
                    f"copies did not leave {self.device}: {self._held >> 20} MiB of them waited for {_BOUND:g} s"
                )

    def _keep_clone(self, arrival: Arrival, tensor: torch.Tensor, size: int, raw: int) -> None:
        """Clone a tensor, for the thread to bring."""
        self._make_room(size)
        batch = self.clones
        if batch is None or batch.origin.cuda_stream != raw:
            self._send_clones()
            batch = self.clones = CloneBatch(self, torch.cuda.current_stream(self.device))
        arrival.clone = tensor.clone(memory_format=torch.contiguous_format)
        arrival.batch = batch
        batch.arrivals.append(arrival)
        batch.count += 1
        batch.step_over = False
        batch.size += size
        self._held += size
        if batch.size >= self._enough:
            self._send_clones()

    def leave(self, batch: Batch) -> None:
        """Send a batch that is still being filled."""
        with self._changed:
            if batch is self.clones:
                self._send_clones()
            elif batch is self.loading:
                self._send_pinned()

    def end_step(self) -> None:
        """Send what was copied beside; clones wait for more, unless they are waited for."""
        if (current_stream(self.place) or not is_alone()) and is_capturing():
            return  # a capture does not bear the question whether a copy has landed; number 0 is never captured
        with self._lock:
            if self.clones is not None:
                self.clones.step_over = True
            self._send_pinned()

    def _send_pinned(self) -> None:
        """Mark the end of the copies that are being made, and forget those that have landed."""
        batch, self.loading = self.loading, None
        if batch is not None:
            try:
                batch.mark(self.side)
            except BaseException as error:
                batch.finish(error)
                raise
            self._under_way.append(batch)
        self._retire()

    def _retire(self) -> None:
        """Forget the batches that have landed: they land in their order."""
        while self._under_way and self._under_way[0].has_arrived:
            self._forget(self._under_way.popleft())

    def _await_one(self) -> None:
        batch = self._under_way.popleft()
        batch.arrive()
        self._forget(batch)

    def _forget(self, batch: PinnedBatch) -> None:
        self._held -= batch.size
        batch.land()

    def _send_clones(self) -> None:
        batch, self.clones = self.clones, None
        if batch is not None:
            try:
                self.send(batch)
            except BaseException as error:  # it will not be fetched: its readers get the error
                self._held -= batch.size
                batch.finish(error)
                raise

    def send(self, batch: ThreadBatch) -> None:
        """Have the thread bring what is ready when its stream has come as far as it is now."""
        batch.ready.record(batch.origin)
        self._queue.put(batch)

    def copy(self, pairs: Iterable[tuple[torch.Tensor, Bytes]], *, after: Any) -> None:
        """Copy contiguous tensors to the host, once the device has come to an event; in the thread."""
        after.wait(self._stream)
        stage, at = self._stage.numpy(), 0
        staged: list[tuple[torch.Tensor, torch.Tensor, Bytes, Bytes]] = []
        for tensor, target in pairs:
            source, done = flat(tensor), 0
            while done < target.size:
                if at == _STAGE:
                    self._land(staged)
                    at = 0
                size = min(target.size - done, _STAGE - at)
                staged.append(
                    (self._stage[at : at + size], source[done : done + size], target[done : done + size], stage[at:])
                )
                at, done = at + size, done + size
        self._land(staged)

    def _land(self, staged: list[tuple[torch.Tensor, torch.Tensor, Bytes, Bytes]]) -> None:
        if staged:
            with torch.cuda.stream(self._stream):
                torch._foreach_copy_([part[0] for part in staged], [part[1] for part in staged], non_blocking=True)
                self._arrived.record(self._stream)
            self._arrived.synchronize()
            for _, _, target, source in staged:
                np.copyto(target, source[: target.size])
            staged.clear()

    def _run(self) -> None:
        torch.cuda.set_device(self.device)
        if self.pinned is not None:
            with suppress(Exception):
                allow_captures()
        while True:
            batch = self._queue.get()
            if batch is not None:
                self._unload(batch)
            elif self._stopped:
                return
            del batch
            if self.pinned is not None and not self._stopped:
                self._get_memory(self.pinned.grow)

    def _unload(self, batch: ThreadBatch) -> None:
        error = None
        try:
            batch.unload()
        except BaseException as raised:
            traceback.clear_frames(raised.__traceback__)  # which would hold memory of the device
            error = raised
        try:
            batch.finish(error)
        except Exception as raised:  # of other code; the transfer must go on
            log.warning("after a copy from %s: %s: %s", self.device, type(raised).__name__, raised)
        if batch.size:  # never waits for other threads' locks: the model may hold one
            with self._changed:
                self._held -= batch.size
                self._changed.notify_all()


_transfers: dict[int, Transfer] = {}  # by the number of the device
_making = threading.Lock()


def transfer_of(device: torch.device) -> Transfer:
    """Return the one transfer of a device."""
    transfer = _transfers.get(device.index)
    if transfer is None:
        with _making:
            transfer = _transfers.get(device.index)
            if transfer is None:
                transfer = _transfers[device.index] = Transfer(device)
    return transfer
