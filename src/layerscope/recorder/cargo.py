"""What is on its way from an accelerator to the host: a tensor, and what leaves together.

arrival = arriving(tensor, room)         # `lanes.py`
arrival()                                # waits until the host has the values
"""

from __future__ import annotations

import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from layerscope.recorder.pinned import Room

if TYPE_CHECKING:
    from layerscope.recorder.lanes import Lane

__all__ = ["Arrival", "Bytes", "Cargo", "Carried", "Event", "Flight", "Lost", "Trip", "as_tensor", "flat", "leave"]

Bytes = np.ndarray[Any, np.dtype[np.uint8]]

# Marks a place in a stream: torch.cuda.Event without its Python around it.
Event: Any = torch._C._CudaEventBase

_QUIET, _PATIENCE = 0.002, 10  # seconds without company, and how often they may pass, until a cargo leaves alone


class Lost(RuntimeError):
    """A tensor's values could not be kept, this once."""


class Arrival:
    """A tensor on its way to the host."""

    __slots__ = ("cargo", "clone", "dtype", "host", "landing", "room", "shape")

    def __init__(self, dtype: torch.dtype, shape: torch.Size, room: Callable[[int], Bytes] | None = None) -> None:
        self.dtype = dtype
        self.shape = shape
        self.room = room  # for what the lane's thread brings
        self.host: torch.Tensor | None = None
        self.clone: torch.Tensor | None = None
        self.landing: Room | None = None
        self.cargo: Cargo | None = None

    def __call__(self) -> torch.Tensor:
        """Wait for the values."""
        if self.cargo is not None:
            self.cargo.wait()
        if self.host is None:
            assert self.landing is not None
            chunk, at, _ = self.landing
            size = self.shape.numel() * self.dtype.itemsize
            self.host = as_tensor(chunk[at : at + size], self.dtype, self.shape)
            self.landing = None
        return self.host

    @property
    def has_arrived(self) -> bool:
        """Whether a call would not wait."""
        return self.cargo is None or self.cargo.has_arrived

    def leave(self) -> None:
        """Have it leave, though nobody waits for it."""
        if self.cargo is not None:
            self.cargo.leave()

    def then(self, call: Callable[[], None]) -> None:
        """Call once nothing is written to memory that `room` gave: now, or later in another thread."""
        if isinstance(self.cargo, Trip):
            self.cargo.leave()
            self.cargo.then(call)
        else:  # the lane holds on to what is flown to
            call()


class Cargo(ABC):
    """What leaves a device as a whole, once the device has come to where it is ready.

    More may come aboard until it leaves: `aboard` counts, and `over` says that the step has ended.
    """

    lane: Lane
    origin: torch.cuda.Stream
    size = 0
    aboard = 0
    over = False
    is_finished = False
    _error: BaseException | None = None

    @abstractmethod
    def leave(self) -> None:
        """See to it that it leaves; a second call does nothing."""

    @abstractmethod
    def arrive(self) -> object:
        """Wait until it is there, after it has left."""

    @abstractmethod
    def _pause(self, seconds: float) -> None:
        """Wait so long for others to come aboard."""

    def wait(self) -> None:
        """Wait until it is there, in any thread but the lane's.

        One that is still being loaded may stay a little longer, because ten that leave alone cost ten times as much as
        ten that leave together; but not until the step ends, for its next hook may be waiting for us.
        """
        for _ in range(_PATIENCE):
            if self.over or self.is_finished:
                break
            aboard = self.aboard
            self._pause(_QUIET)
            if aboard == self.aboard:
                break
        if not self.is_finished:
            self.leave()
            self.arrive()
        if self._error is not None:
            raise RuntimeError(f"it did not arrive from the device: {self._error}") from self._error

    @property
    def has_arrived(self) -> bool:
        """Whether it is there."""
        return self.is_finished

    def finish(self, error: BaseException | None = None) -> None:
        """Note that it is there, or why it will never be."""
        self._error = error
        self.is_finished = True


class Carried(Cargo):
    """What the lane's thread brings to the host."""

    def __init__(self, lane: Lane, origin: torch.cuda.Stream) -> None:
        self.lane = lane
        self.origin = origin
        self.ready = Event()
        self._unloaded = threading.Event()
        self._after: list[Callable[[], None]] = []
        self._lock = threading.Lock()

    @abstractmethod
    def unload(self) -> None:
        """Bring it to the host; in the lane's thread."""

    def arrive(self, seconds: float | None = None) -> bool:
        """Wait for the thread, so long at most; whether it has brought it, or has told why it cannot."""
        return self._unloaded.wait(seconds)

    def _pause(self, seconds: float) -> None:
        self._unloaded.wait(seconds)

    def then(self, call: Callable[[], None]) -> None:
        """Call once it is there: now, or later in another thread."""
        with self._lock:
            if not self.is_finished:
                self._after.append(call)
                return
        call()

    def finish(self, error: BaseException | None = None) -> None:
        """Tell those who wait that it is there, or why it will never be."""
        with self._lock:
            super().finish(error)
            self._unloaded.set()
        for call in self._after:
            call()
        self._after.clear()


class Trip(Carried):
    """Clones of one stream's tensors."""

    def __init__(self, lane: Lane, origin: torch.cuda.Stream) -> None:
        super().__init__(lane, origin)
        self.arrivals: list[Arrival] = []

    def leave(self) -> None:
        """Leave with what is aboard."""
        self.lane.leave(self)

    def unload(self) -> None:
        """Copy the clones to memory that was given for them."""
        arrivals, self.arrivals = self.arrivals, []
        pairs = []
        for arrival in arrivals:
            assert arrival.clone is not None
            assert arrival.room is not None
            octets = arrival.room(arrival.clone.nbytes)
            arrival.host = as_tensor(octets, arrival.dtype, arrival.shape)
            pairs.append((arrival.clone, octets))
            arrival.clone = None
        self.lane.copy(pairs, after=self.ready)


class Flight(Cargo):
    """Copies under way to page-locked memory; it holds on to that memory until they have landed.

    One is made in every step: what most of them never need is not made for each.
    """

    beside = False  # whether something flies on the side stream
    _filled: tuple[Bytes, ...] = ()  # the chunks before this one
    _landed: tuple[Any, ...] = ()  # the events that mark the end of the copies, once it has departed

    def __init__(self, lane: Lane, origin: torch.cuda.Stream, raw: int, chunk: Bytes) -> None:
        self.lane = lane
        self.origin = origin
        self.raw = raw
        self.chunk: Bytes | None = chunk  # that was flown to last

    def hold(self, chunk: Bytes) -> None:
        """Keep another chunk from being used again before the copies have landed."""
        if self.chunk is not None:
            self._filled += (self.chunk,)
        self.chunk = chunk

    def leave(self) -> None:
        """Leave with what is aboard."""
        self.lane.leave(self)

    def depart(self, *streams: torch.cuda.Stream) -> None:
        """Mark in the streams where the last of the copies ends, with events that nobody looks at any more."""
        self.over = True
        spare = self.lane.spare
        marks: tuple[Any, ...] = ()
        for stream in streams:
            landed = spare.pop() if spare else Event()
            landed.record(stream)
            marks += (landed,)
        self._landed = marks

    @property
    def has_arrived(self) -> bool:
        """Whether the copies have landed, and nobody need wait for them."""
        return self.is_finished or (bool(self._landed) and self.has_landed())

    def has_landed(self) -> bool:
        """Whether those that have departed have landed."""
        return self.is_finished or all(landed.query() for landed in self._landed)

    def arrive(self) -> None:
        """Wait for the events that mark the end of the copies."""
        for landed in self._landed:
            landed.synchronize()  # of an event: a stream's would be noticed by the user's sync debug mode
        self.land()

    def land(self) -> None:
        """Let go of the memory, once the copies have landed."""
        self.chunk, self._filled, self.is_finished = None, (), True

    def give_back(self) -> tuple[Any, ...]:
        """Let go of the events too, and return them for another flight.

        A thread that still has one of them at hand may wait for that flight as well, but never too short.
        """
        self.land()
        landed, self._landed = self._landed, ()
        return landed

    def _pause(self, seconds: float) -> None:
        time.sleep(seconds)


def leave(part: object) -> None:
    """Have something leave the device, if it is on its way from there."""
    part = getattr(part, "__self__", part)  # of what was staged, a method
    if hasattr(part, "leave"):
        part.leave()


def as_tensor(octets: Bytes, dtype: torch.dtype, shape: torch.Size) -> torch.Tensor:
    """View bytes of the host as a tensor."""
    if not octets.size:
        return torch.empty(shape, dtype=dtype, device="cpu")
    return torch.from_numpy(octets).view(dtype).view(shape)


def flat(tensor: torch.Tensor) -> torch.Tensor:
    """View a contiguous tensor as bytes."""
    return tensor.reshape(-1).view(torch.uint8)
