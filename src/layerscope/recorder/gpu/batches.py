"""What is on its way from a GPU to the host: single tensors, and the batches they leave in.

arrival = to_host(tensor, room)          # `transfer.py`
arrival()                                # waits until the host has the values
"""

from __future__ import annotations

import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch

from layerscope.recorder.gpu.pinned_pool import Bytes, Room

if TYPE_CHECKING:
    from layerscope.recorder.gpu.transfer import Transfer

# Marks a place in a stream: torch.cuda.Event without its Python around it.
Event: Any = torch._C._CudaEventBase

_QUIET, _PATIENCE = 0.002, 10  # seconds without another tensor, and how often they may pass, until a batch leaves


class Lost(RuntimeError):
    """A tensor's values could not be kept, this once."""


class Arrival:
    """A tensor on its way to the host."""

    __slots__ = ("batch", "clone", "dtype", "host", "landing", "room", "shape")

    def __init__(self, dtype: torch.dtype, shape: torch.Size, room: Callable[[int], Bytes] | None = None) -> None:
        self.dtype = dtype
        self.shape = shape
        self.room = room  # gives memory for what the transfer's thread brings
        self.host: torch.Tensor | None = None
        self.clone: torch.Tensor | None = None
        self.landing: Room | None = None
        self.batch: Batch | None = None

    def __call__(self) -> torch.Tensor:
        """Wait for the values."""
        if self.batch is not None:
            self.batch.wait()
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
        return self.batch is None or self.batch.has_arrived

    def leave(self) -> None:
        """Send it, before it is asked for."""
        if self.batch is not None:
            self.batch.leave()


class Batch(ABC):
    """Tensors that leave a GPU together, once the GPU has come to where they are ready.

    More may be added until it leaves: `count` says how many there are, and `step_over` that the step has ended.
    """

    transfer: Transfer
    origin: torch.cuda.Stream
    size = 0
    count = 0
    step_over = False
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
        """Wait so long for others to be added."""

    def wait(self) -> None:
        """Wait until it is there, in any thread but the transfer's.

        One that is still being filled may stay a little longer, because ten that leave alone cost ten times as much as
        ten that leave together; but not until the step ends, for its next hook may be waiting for us.
        """
        for _ in range(_PATIENCE):
            if self.step_over or self.is_finished:
                break
            count = self.count
            self._pause(_QUIET)
            if count == self.count:
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


class ThreadBatch(Batch):
    """What the transfer's thread brings to the host."""

    def __init__(self, transfer: Transfer, origin: torch.cuda.Stream) -> None:
        self.transfer = transfer
        self.origin = origin
        self.ready = Event()
        self._unloaded = threading.Event()

    @abstractmethod
    def unload(self) -> None:
        """Bring it to the host; in the transfer's thread."""

    def arrive(self, seconds: float | None = None) -> bool:
        """Wait for the thread, so long at most; whether it has brought it, or has told why it cannot."""
        return self._unloaded.wait(seconds)

    def _pause(self, seconds: float) -> None:
        self._unloaded.wait(seconds)

    def finish(self, error: BaseException | None = None) -> None:
        """Tell those who wait that it is there, or why it will never be."""
        super().finish(error)
        self._unloaded.set()


class CloneBatch(ThreadBatch):
    """Clones of one stream's tensors, for which no page-locked memory was free."""

    def __init__(self, transfer: Transfer, origin: torch.cuda.Stream) -> None:
        super().__init__(transfer, origin)
        self.arrivals: list[Arrival] = []

    def leave(self) -> None:
        """Leave with the clones there are."""
        self.transfer.leave(self)

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
        self.transfer.copy(pairs, after=self.ready)


class PinnedBatch(Batch):
    """Copies on the side stream to page-locked memory; it holds on to that memory until they have landed."""

    def __init__(self, transfer: Transfer, origin: torch.cuda.Stream) -> None:
        self.transfer = transfer
        self.origin = origin
        self._chunks: list[Bytes] = []
        self._landed: Any = None  # the event that marks the end of the copies, once the batch has left

    def hold(self, chunk: Bytes) -> None:
        """Keep a chunk from being used again before the copies have landed."""
        if not (self._chunks and self._chunks[-1] is chunk):
            self._chunks.append(chunk)

    def leave(self) -> None:
        """Leave with the copies there are."""
        self.transfer.leave(self)

    def mark(self, stream: torch.cuda.Stream) -> None:
        """Mark in the side stream where the last of the copies ends."""
        self.step_over = True
        landed = Event()
        landed.record(stream)
        self._landed = landed

    @property
    def has_arrived(self) -> bool:
        """Whether the copies have landed, so that reading them does not wait."""
        return self.is_finished or (self._landed is not None and bool(self._landed.query()))

    def arrive(self) -> None:
        """Wait for the event that marks the end of the copies."""
        if self._landed is not None:
            self._landed.synchronize()  # of an event: a stream's would be noticed by the user's sync debug mode
        self.land()

    def land(self) -> None:
        """Let go of the memory, once the copies have landed."""
        self._chunks, self.is_finished = [], True

    def _pause(self, seconds: float) -> None:
        time.sleep(seconds)


def leave(part: object) -> None:
    """Have something leave the GPU, if it is on its way from there."""
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
