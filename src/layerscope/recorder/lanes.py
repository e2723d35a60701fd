"""Bring tensors from an accelerator to the host without making the model wait for it.

    arrival = arriving(tensor, room)         # on its way; arrival() waits until the host has the values

Nothing here synchronises, and a later in-place operation cannot reach what is on its way. Where page-locked memory is
free, a tensor flies there directly: a small one on the model's own stream, a large one as a clone on a side stream.
Otherwise it is cloned and taken by a thread, through one small page-locked buffer, to memory that the caller gives:
to copy to memory that is not page-locked would hold up every launch of the process.
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
from layerscope.recorder.cargo import Arrival, Bytes, Cargo, Carried, Event, Flight, Lost, Trip, as_tensor, flat
from layerscope.recorder.pinned import Pinned, Room
from layerscope.stats.driver import allow_captures, copying, why_no_driver

if TYPE_CHECKING:
    from layerscope.recorder.staging import Staged

__all__ = [
    "Lane", "arriving", "capturing", "current_stream", "is_alone", "is_capturing", "is_current", "lane_of",
    "lies_plainly", "rest",
]  # fmt: skip


_STAGE = 16 << 20
_MOST = 2 << 30  # bytes of clones a device holds at most, if a quarter of its free memory is not less
_TOGETHER = 256 << 20  # bytes of clones that leave before anybody has asked for one, if a quarter of that is not less
_SMALL = 2 << 20  # bytes that the model's own stream copies: 40 us at most, and the copy needs no clone
_BOUND = 10.0  # seconds that a hook waits for room on the device, at most
_FEW = 16  # flights that nobody asks whether they have landed, while no memory is short

# What torch asks CUDA, without its Python around it; a build without CUDA has none of them.
current_stream: Any = getattr(torch._C, "_cuda_getCurrentRawStream", None)
_current_device: Any = getattr(torch._C, "_cuda_getDevice", None)
is_capturing: Any = getattr(torch._C, "_cuda_isCurrentStreamCapturing", None)

_Tensor = torch.Tensor


def arriving(tensor: torch.Tensor, room: Callable[[int], Bytes]) -> Arrival:
    """Start a copy to the host; where it cannot fly, `room` gives so many bytes for it, later, in another thread.

    What is taken by the thread stays on the device until there is enough of it to leave together, or until it is waited
    for: a thread that works beside a model that waits for Python takes as much from it as it does itself. Where copies
    do not leave as fast as they come, the caller waits rather than fill the device, and is told `Lost` in the end.
    """
    arrival = Arrival(tensor.dtype, tensor.shape, room)
    if tensor.is_cuda:
        if is_capturing():
            raise capturing()
        lane = _lanes.get(tensor.get_device()) or lane_of(tensor.device)
        lane.board(arrival, tensor)
    else:
        arrival.host = as_tensor(room(tensor.nbytes), tensor.dtype, tensor.shape).copy_(tensor)
    return arrival


def _ordinary(size: int) -> Bytes:
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


def rest() -> None:
    """Hear that a step has ended: what is waited for need not wait for company."""
    for lane in [*_lanes.values()]:
        if lane.flight is not None or lane.trip is not None:
            lane.rest()


class Lane:
    """The way from one device to the host."""

    def __init__(self, device: torch.device) -> None:
        self.place: int = device.index
        self.device = device
        self._lock = threading.RLock()
        self._changed = threading.Condition(self._lock)
        self.trip: Trip | None = None
        self.flight: Flight | None = None
        self._flying: deque[Flight] = deque()  # in the order in which they departed
        self.spare: list[Any] = []  # events of flights that are over
        self._held = 0
        self._most = min(_MOST, torch.cuda.mem_get_info(device)[0] // 4)
        self._enough = min(_TOGETHER, self._most // 4)
        self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        self.side = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        self._arrived = torch.cuda.Event()  # type: ignore[no-untyped-call]
        self._stage = torch.empty(_STAGE, dtype=torch.uint8, device="cpu", pin_memory=True)
        self._queue: SimpleQueue[Carried | None] = SimpleQueue()  # None only asks for page-locked memory, or to stop
        self._stopped = False
        self._origins: dict[int, torch.cuda.Stream] = {}  # by their number
        self.pinned = None if why_no_driver() else Pinned(let_go=self._retire, ask=partial(self._queue.put, None))
        self._copy = None if why_no_driver() else copying(device.index)
        self._thread = threading.Thread(target=self._carry, name=f"layerscope-{device}", daemon=True)
        self._thread.start()
        atexit.register(self.stop)

    def stop(self) -> None:
        """End the thread, once it has carried what it was given.

        An interpreter that ends while the thread is inside torch or the driver aborts the process.
        """
        self._stopped = True
        self._queue.put(None)
        self._thread.join()

    def board(self, arrival: Arrival, tensor: torch.Tensor) -> None:
        """Have a tensor leave, as it is when the current stream comes to this point."""
        if is_current(self.place):
            self._board(arrival, tensor)
        else:
            with torch.cuda.device(self.device):
                self._board(arrival, tensor)

    def _board(self, arrival: Arrival, tensor: torch.Tensor) -> None:
        size = tensor.nbytes
        if 0 < size <= _SMALL:
            source = tensor if tensor.is_contiguous() else tensor.contiguous()  # which lives until its copy is queued
            if self._let_fly(arrival, source.data_ptr(), size):
                return
        raw = current_stream(self.place)
        with self._lock:
            room = self.pinned.room(size) if size > _SMALL and self.pinned is not None else None
            if room is None:
                self._take_along(arrival, tensor, size, raw)
            else:
                self._fly_beside(arrival, tensor, room, size, raw)

    def _let_fly(self, arrival: Arrival, address: int, size: int) -> bool:
        """Copy what lies in order on the current device straight to page-locked memory; False where none is free."""
        raw = current_stream(self.place)
        with self._lock:
            room = None if self.pinned is None else self.pinned.room(size)
            if room is None:
                return False
            flight = self._boarding(room[0], raw)
            self._copy(room[2], address, size, raw)  # type: ignore[misc]  # it is there if memory is
            arrival.landing, arrival.cargo = room, flight
            flight.aboard += 1
            flight.over = False
        return True

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
                    arrival = Arrival(one.dtype, one.shape, _ordinary)
                    try:
                        self._take_along(arrival, one.values, one.values.nbytes, raw)
                        one.arrival = arrival
                    except Lost as error:
                        one.lost = error
                return None
            chunk, at, address = room
            self._depart()
            flight = self.flight = Flight(self, self.origin(raw), raw, chunk)
            ready = Event()
            ready.record(flight.origin)
            self.side.wait_event(ready)
            self._copy(address, memory.data_ptr(), size, self.side.cuda_stream)  # type: ignore[misc]
            flight.beside = True
            flight.aboard += len(staged)
            for one in staged:
                one.arrival = Arrival(one.dtype, one.shape)
                one.arrival.landing, one.arrival.cargo = (chunk, at + one.at, address + one.at), flight
            left = Event()
            left.record(self.side)
            self._depart()
            return left

    def _boarding(self, chunk: Bytes, raw: int) -> Flight:
        """Return the flight that is being loaded for a stream, and have it hold on to the chunk."""
        flight = self.flight
        if flight is None or flight.raw != raw:
            if flight is not None or self._held:
                self._depart()
            flight = self.flight = Flight(self, self.origin(raw), raw, chunk)
        elif flight.chunk is not chunk:
            flight.hold(chunk)
        return flight

    def origin(self, raw: int) -> torch.cuda.Stream:
        """Return the stream of a number."""
        known = self._origins.get(raw)
        if known is None:
            here = torch.cuda.current_stream(self.device)
            known = here if here.cuda_stream == raw else torch.cuda.ExternalStream(raw, self.device)  # type: ignore[no-untyped-call]
            self._origins[raw] = known
        return known

    def _fly_beside(self, arrival: Arrival, tensor: torch.Tensor, room: Room, size: int, raw: int) -> None:
        """Copy a clone on the side stream, while the model goes on."""
        if self._held + size > self._most:
            self._depart()
            self._make_room(size)
        flight = self._boarding(room[0], raw)
        clone = tensor.clone(memory_format=torch.contiguous_format)
        ready = torch.cuda.Event()  # type: ignore[no-untyped-call]
        ready.record(flight.origin)
        self.side.wait_event(ready)
        self._copy(room[2], clone.data_ptr(), size, self.side.cuda_stream)  # type: ignore[misc]
        clone.record_stream(self.side)
        arrival.landing, arrival.cargo = room, flight
        flight.beside = True
        flight.aboard += 1
        flight.over = False
        flight.size += size
        self._held += size
        if flight.size >= self._enough:
            self._depart()

    def _make_room(self, size: int) -> None:
        """Wait until the device has room for another clone, but not for ever."""
        until = time.monotonic() + _BOUND
        while self._held and self._held + size > self._most:
            self._leave()
            if self._flying:
                self._await_one()
            elif not self._changed.wait(until - time.monotonic()):
                raise Lost(
                    f"copies did not leave {self.device}: {self._held >> 20} MiB of them waited for {_BOUND:g} s"
                )

    def _take_along(self, arrival: Arrival, tensor: torch.Tensor, size: int, raw: int) -> None:
        self._make_room(size)
        trip = self.trip
        if trip is None or trip.origin.cuda_stream != raw:
            self._leave()
            trip = self.trip = Trip(self, torch.cuda.current_stream(self.device))
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
            if cargo is self.trip:
                self._leave()
            elif cargo is self.flight:
                self._depart()

    def rest(self) -> None:
        """Hear that the step has ended, with something that is still being loaded."""
        if (current_stream(self.place) or not is_alone()) and is_capturing():
            return  # a capture does not bear the question whether a copy has landed; number 0 is never captured
        with self._lock:
            if self.trip is not None:
                self.trip.over = True
            if self.flight is not None:
                self._depart()

    def _depart(self) -> None:
        """Let a flight go, and forget those that have landed; not each time where all they hold is host memory."""
        flight, self.flight = self.flight, None
        if flight is not None:
            try:
                flight.depart(flight.origin, *((self.side,) if flight.beside else ()))
            except BaseException as error:
                flight.finish(error)
                raise
            self._flying.append(flight)
        self._retire_some()

    def _retire_some(self) -> None:
        if self._held:
            self._retire()
        elif len(self._flying) > _FEW:
            self._retire_half()

    def _retire(self) -> None:
        """Forget the flights that have landed."""
        while self._flying and self._flying[0].has_landed():
            self._forget(self._flying.popleft())

    def _retire_half(self) -> None:
        """Forget the older half of the flights, if it has landed; none has clones beside it.

        The copies of a stream land in their order: the last one that is asked for speaks for those before it.
        """
        half = len(self._flying) // 2
        last = self._flying[half - 1]
        if last.has_landed():
            while half and (self._flying[0].raw == last.raw or self._flying[0].has_landed()):
                self._forget(self._flying.popleft())
                half -= 1

    def _await_one(self) -> None:
        flight = self._flying.popleft()
        flight.arrive()
        self._forget(flight)

    def _forget(self, flight: Flight) -> None:
        self._held -= flight.size
        self.spare += flight.give_back()

    def _leave(self) -> None:
        trip, self.trip = self.trip, None
        if trip is not None:
            try:
                self.send(trip)
            except BaseException as error:  # nobody comes for it: whoever waits is told
                self._held -= trip.size
                trip.finish(error)
                raise

    def send(self, cargo: Carried) -> None:
        """Have the thread carry something that is ready when its stream has come as far as it is now."""
        cargo.ready.record(cargo.origin)
        self._queue.put(cargo)

    def copy(self, pairs: Iterable[tuple[torch.Tensor, Bytes]], *, after: Any) -> None:
        """Copy contiguous tensors to the host, once the device has come to an event; in the lane's thread."""
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

    def _carry(self) -> None:
        torch.cuda.set_device(self.device)
        if self.pinned is not None:
            with suppress(Exception):
                allow_captures()
        while True:
            cargo = self._queue.get()
            if cargo is not None:
                self._unload(cargo)
            elif self._stopped:
                return
            del cargo
            if self.pinned is not None and not self._stopped:
                self._get_memory(self.pinned.grow)

    def _unload(self, cargo: Carried) -> None:
        error = None
        try:
            cargo.unload()
        except BaseException as raised:
            traceback.clear_frames(raised.__traceback__)  # which would hold memory of the device
            error = raised
        try:
            cargo.finish(error)
        except Exception as raised:  # somebody else's; the lane must go on
            log.warning("after a copy from %s: %s: %s", self.device, type(raised).__name__, raised)
        if cargo.size:  # nobody waits for others, and a lock that the model holds is waited for
            with self._changed:
                self._held -= cargo.size
                self._changed.notify_all()


_lanes: dict[int, Lane] = {}  # by the number of the device
_making = threading.Lock()


def lane_of(device: torch.device) -> Lane:
    """Return the one lane of a device."""
    lane = _lanes.get(device.index)
    if lane is None:
        with _making:
            lane = _lanes.get(device.index)
            if lane is None:
                lane = _lanes[device.index] = Lane(device)
    return lane
