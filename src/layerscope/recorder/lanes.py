"""Bring tensors from an accelerator to the host without making the model wait for it.

    arrival = arriving(tensor, room)         # on its way; arrival() waits until the host has the values

Nothing here synchronises, and a later in-place operation cannot reach what is on its way. Where page-locked memory is
free, a tensor flies there directly: a small one on the model's own stream, a large one as a clone on a side stream.
Otherwise it is cloned and taken by a thread, through one small page-locked buffer, to memory that the caller gives:
to copy to memory that is not page-locked would hold up every launch of the process.
"""

from __future__ import annotations

import ctypes
import logging
import threading
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Iterable
from functools import cache
from queue import SimpleQueue
from typing import Any

import numpy as np
import torch

from layerscope.errors import Unsupported
from layerscope.recorder.pinned import Pinned, Room

__all__ = ["Arrival", "Carried", "Lane", "arriving", "lane_of", "refuse_capture", "rest"]

_log = logging.getLogger("layerscope")

_STAGE = 16 << 20
_MOST = 2 << 30  # bytes of clones a device holds at most, if a quarter of its free memory is not less
_TOGETHER = 256 << 20  # bytes of clones that leave before anybody has asked for one, if a quarter of that is not less
_SMALL = 2 << 20  # bytes that the model's own stream copies: 40 us at most, and the copy needs no clone
_QUIET, _PATIENCE = 0.002, 10  # seconds without company, and how often they may pass, until a cargo leaves alone

Bytes = np.ndarray[Any, np.dtype[np.uint8]]


def arriving(tensor: torch.Tensor, room: Callable[[], torch.Tensor]) -> Arrival:
    """Start a copy to the host; where it cannot fly, `room` gives contiguous memory for it, later, in another thread.

    What is taken by the thread stays on the device until there is enough of it to leave together, or until it is waited
    for: a thread that works beside a model that waits for Python takes as much from it as it does itself. Where copies
    do not leave as fast as they come, the caller waits rather than fill the device.
    """
    arrival = Arrival(room)
    if tensor.device.type == "cuda":
        refuse_capture()
        lane_of(tensor.device).board(arrival, tensor)
    else:
        arrival.host = room().copy_(tensor)
    return arrival


class Arrival:
    """A tensor on its way to the host."""

    __slots__ = ("cargo", "clone", "host", "landing", "room")

    def __init__(self, room: Callable[[], torch.Tensor]) -> None:
        self.room = room
        self.host: torch.Tensor | None = None
        self.clone: torch.Tensor | None = None
        self.landing: tuple[Bytes, torch.dtype, torch.Size] | None = None
        self.cargo: Cargo | None = None

    def __call__(self) -> torch.Tensor:
        """Wait for the values."""
        if self.cargo is not None:
            self.cargo.wait()
        if self.host is None:
            assert self.landing is not None
            octets, dtype, shape = self.landing
            self.host = torch.from_numpy(octets).view(dtype).view(shape)
        return self.host

    def then(self, call: Callable[[], None]) -> None:
        """Call once nothing is written to memory that `room` gave: now, or later in another thread."""
        if self.cargo is None or self.landing is not None:  # the lane holds on to what is flown to
            call()
        else:
            self.cargo.leave()
            self.cargo.then(call)


def refuse_capture() -> None:
    """Refuse to record in the middle of the capture of a CUDA graph."""
    if torch.cuda.is_current_stream_capturing():
        raise Unsupported(
            "nothing can be recorded while a CUDA graph is captured: its replays would not record it again; "
            "record a forward that runs without the graph"
        )


def rest() -> None:
    """Hear that a step has ended: what is waited for need not wait for company."""
    for lane in list(_lanes.values()):
        lane.rest()


class Cargo(ABC):
    """What leaves a device as a whole, once the device has come to where it is ready.

    More may come aboard until it leaves: `aboard` counts, and `over` says that the step has ended.
    """

    size = 0
    aboard = 0
    over = False

    def __init__(self, lane: Lane, origin: torch.cuda.Stream) -> None:
        self.lane = lane
        self.origin = origin
        self._unloaded = threading.Event()
        self._error: BaseException | None = None
        self._after: list[Callable[[], None]] = []
        self._lock = threading.Lock()

    @abstractmethod
    def leave(self) -> None:
        """See to it that it leaves; a second call does nothing."""

    @abstractmethod
    def arrive(self) -> None:
        """Wait until it is there, after it has left."""

    def wait(self) -> None:
        """Wait until it is there, in any thread but the lane's.

        One that is still being loaded may stay a little longer, because ten that leave alone cost ten times as much as
        ten that leave together; but not until the step ends, for its next hook may be waiting for us.
        """
        for _ in range(_PATIENCE):
            aboard = self.aboard
            if self.over or self._unloaded.wait(_QUIET) or aboard == self.aboard:
                break
        if not self._unloaded.is_set():
            self.leave()
            self.arrive()
        if self._error is not None:
            raise RuntimeError(f"it did not arrive from the device: {self._error}") from self._error

    def then(self, call: Callable[[], None]) -> None:
        """Call once it is there: now, or later in another thread."""
        with self._lock:
            if not self._unloaded.is_set():
                self._after.append(call)
                return
        call()

    def finish(self, error: BaseException | None = None) -> None:
        """Tell those who wait that it is there, or why it will never be."""
        with self._lock:
            self._error = error
            self._unloaded.set()
        for call in self._after:
            call()
        self._after.clear()


class Carried(Cargo):
    """What the lane's thread brings to the host."""

    def __init__(self, lane: Lane, origin: torch.cuda.Stream) -> None:
        super().__init__(lane, origin)
        self.ready = torch.cuda.Event()  # type: ignore[no-untyped-call]

    @abstractmethod
    def unload(self) -> None:
        """Bring it to the host; in the lane's thread."""

    def arrive(self) -> None:
        """Wait for the thread."""
        self._unloaded.wait()


class _Trip(Carried):
    """Clones of one stream's tensors."""

    def __init__(self, lane: Lane, origin: torch.cuda.Stream) -> None:
        super().__init__(lane, origin)
        self.arrivals: list[Arrival] = []

    def leave(self) -> None:
        self.lane.leave(self)

    def unload(self) -> None:
        arrivals, self.arrivals = self.arrivals, []
        pairs = []
        for arrival in arrivals:
            arrival.host = arrival.room()
            assert arrival.clone is not None
            pairs.append((arrival.clone, _flat(arrival.host).numpy()))
            arrival.clone = None
        self.lane.copy(pairs)


class _Flight(Cargo):
    """Copies under way to page-locked memory; it holds on to that memory until they have landed."""

    def __init__(self, lane: Lane, origin: torch.cuda.Stream, raw: int) -> None:
        super().__init__(lane, origin)
        self.raw = raw
        self.held: list[Bytes] = []
        self.beside = False  # whether something flies on the side stream
        self._landed: list[torch.cuda.Event] = []

    def leave(self) -> None:
        self.lane.leave(self)

    def depart(self, side: torch.cuda.Stream) -> None:
        """Mark in the streams where the last of the copies ends."""
        self.over = True
        for stream in (self.origin, side) if self.beside else (self.origin,):
            landed = torch.cuda.Event()  # type: ignore[no-untyped-call]
            landed.record(stream)
            self._landed.append(landed)

    def has_landed(self) -> bool:
        return all(landed.query() for landed in self._landed)  # type: ignore[no-untyped-call]

    def arrive(self) -> None:
        for landed in self._landed:
            landed.synchronize()  # of an event: a stream's would be noticed by the user's sync debug mode
        self.held.clear()
        self.finish()


class Lane:
    """The way from one device to the host."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._changed = threading.Condition()
        self._trip: _Trip | None = None
        self._flight: _Flight | None = None
        self._flying: deque[_Flight] = deque()
        self._held = 0
        self._most = min(_MOST, torch.cuda.mem_get_info(device)[0] // 4)
        self._enough = min(_TOGETHER, self._most // 4)
        self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        self._side = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        self._arrived = torch.cuda.Event()  # type: ignore[no-untyped-call]
        self._stage = torch.empty(_STAGE, dtype=torch.uint8, device="cpu", pin_memory=True)
        self._queue: SimpleQueue[Carried] = SimpleQueue()
        self._alone = torch.cuda.device_count() == 1
        self._fly = _driver_copy()
        self.pinned = Pinned() if self._fly else None
        threading.Thread(target=self._carry, name=f"layerscope-{device}", daemon=True).start()

    def board(self, arrival: Arrival, tensor: torch.Tensor) -> None:
        """Have a tensor leave, as it is when the current stream comes to this point."""
        if self._alone or torch.cuda.current_device() == self._device.index:
            self._board(arrival, tensor)
        else:
            with torch.cuda.device(self._device):
                self._board(arrival, tensor)

    def _board(self, arrival: Arrival, tensor: torch.Tensor) -> None:
        size = tensor.nbytes
        room = None if self.pinned is None or not size else self.pinned.room(size)
        raw = torch._C._cuda_getCurrentRawStream(tensor.get_device())
        with self._changed:
            if room is None:
                self._take_along(arrival, tensor, size, raw)
            else:
                self._let_fly(arrival, tensor, room, size, raw)

    def _let_fly(self, arrival: Arrival, tensor: torch.Tensor, room: Room, size: int, raw: int) -> None:
        fly = self._fly
        assert fly is not None
        flight = self._flight
        if flight is None or flight.raw != raw:
            self._depart()
            flight = self._flight = _Flight(self, torch.cuda.current_stream(self._device), raw)
        if size <= _SMALL:
            fly(room.address, tensor.contiguous().data_ptr(), size, raw)
        else:
            while self._held and self._held + size > self._most:
                self._depart()
                self._await_one()
                flight = self._flight = _Flight(self, torch.cuda.current_stream(self._device), raw)
            clone = tensor.clone(memory_format=torch.contiguous_format)
            ready = torch.cuda.Event()  # type: ignore[no-untyped-call]
            ready.record(flight.origin)
            self._side.wait_event(ready)
            fly(room.address, clone.data_ptr(), size, self._side.cuda_stream)
            clone.record_stream(self._side)
            flight.beside = True
            flight.size += size
            self._held += size
        arrival.landing = room.bytes, tensor.dtype, tensor.shape
        arrival.cargo = flight
        flight.held.append(room.bytes)
        flight.aboard += 1
        flight.over = False
        if flight.size >= self._enough:
            self._depart()

    def _take_along(self, arrival: Arrival, tensor: torch.Tensor, size: int, raw: int) -> None:
        while self._held and self._held + size > self._most:
            self._leave()
            if self._flying:
                self._await_one()
            else:
                self._changed.wait()
        trip = self._trip
        if trip is None or trip.origin.cuda_stream != raw:
            self._leave()
            trip = self._trip = _Trip(self, torch.cuda.current_stream(self._device))
        arrival.clone = tensor.clone(memory_format=torch.contiguous_format)
        arrival.cargo = trip
        trip.arrivals.append(arrival)
        trip.aboard += 1
        trip.over = False
        trip.size += size
        self._held += size
        if trip.size >= self._enough:
            self._leave()

    def leave(self, cargo: Cargo) -> None:
        """Send a cargo that is still being loaded."""
        with self._changed:
            if cargo is self._trip:
                self._leave()
            elif cargo is self._flight:
                self._depart()

    def rest(self) -> None:
        """Hear that the step has ended."""
        with self._changed:
            if self._trip is not None:
                self._trip.over = True
            if self._flight is not None:
                self._flight.over = True
                self._depart()

    def _depart(self) -> None:
        """Let a flight go, and forget those that have landed."""
        flight, self._flight = self._flight, None
        if flight is not None:
            flight.depart(self._side)
            self._flying.append(flight)
        while self._flying and self._flying[0].has_landed():
            self._await_one()

    def _await_one(self) -> None:
        if self._flying:
            flight = self._flying.popleft()
            flight.arrive()
            self._held -= flight.size

    def _leave(self) -> None:
        trip, self._trip = self._trip, None
        if trip is not None:
            self.send(trip)

    def send(self, cargo: Carried) -> None:
        """Have the thread carry something that is ready when its stream has come as far as it is now."""
        cargo.ready.record(cargo.origin)
        self._queue.put(cargo)

    def copy(self, pairs: Iterable[tuple[torch.Tensor, Bytes]]) -> None:
        """Copy contiguous tensors to the host; in the lane's thread."""
        stage, at = self._stage.numpy(), 0
        staged: list[tuple[torch.Tensor, torch.Tensor, Bytes, Bytes]] = []
        for tensor, target in pairs:
            source, done = _flat(tensor), 0
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

    def bring(self, *tensors: torch.Tensor) -> list[np.ndarray[Any, Any]]:
        """Return contiguous tensors of plain numbers as arrays; in the lane's thread."""
        hosts = [torch.empty(tensor.shape, dtype=tensor.dtype, device="cpu") for tensor in tensors]
        self.copy([(tensor, _flat(host).numpy()) for tensor, host in zip(tensors, hosts, strict=True)])
        return [host.numpy() for host in hosts]

    def _carry(self) -> None:
        torch.cuda.set_device(self._device)
        while True:
            cargo = self._queue.get()
            error = None
            try:
                self._stream.wait_event(cargo.ready)
                cargo.unload()
            except BaseException as raised:
                error = raised
            try:
                cargo.finish(error)
                if self.pinned is not None:
                    self.pinned.grow()
            except Exception as raised:  # somebody else's; the lane must go on
                _log.warning("after a copy from %s: %s: %s", self._device, type(raised).__name__, raised)
            with self._changed:
                self._held -= cargo.size
                self._changed.notify_all()
            del cargo, error


_lanes: dict[torch.device, Lane] = {}
_making = threading.Lock()


def lane_of(device: torch.device) -> Lane:
    """Return the one lane of a device."""
    lane = _lanes.get(device)
    if lane is None:
        with _making:
            lane = _lanes.get(device)
            if lane is None:
                lane = _lanes[device] = Lane(device)
    return lane


def _flat(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.reshape(-1).view(torch.uint8)


@cache
def _driver_copy() -> Callable[[int, int, int, int], None] | None:
    """Return NVIDIA's own copy to the host: (to, from, bytes, stream), all as numbers; None where there is none.

    torch's takes tensors, and to make one of each room costs more than the copy. The interpreter stays locked: to let
    go of it and get it back can take milliseconds when another thread is busy, and the call takes two microseconds.
    """
    try:
        copy = ctypes.PyDLL("libcuda.so.1").cuMemcpyDtoHAsync_v2
    except (OSError, AttributeError):
        return None
    copy.argtypes = (ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t, ctypes.c_void_p)
    copy.restype = ctypes.c_int

    def fly(to: int, source: int, size: int, stream: int) -> None:
        code = copy(to, source, size, stream)
        if code:
            raise RuntimeError(f"the driver refused a copy of {size} bytes to the host: CUDA error {code}")

    return fly
