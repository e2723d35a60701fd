"""Take values from an accelerator without making the model wait for it.

    arrival = arriving(tensor, room)         # cloned on the device; arrival() waits until the host has the values
    later = Statistics().of(tensor)          # launched on the device; later() gives the Summary

Nothing in a hook synchronises. A tensor is cloned on the model's own stream, so that a later in-place operation cannot
reach what is recorded. Statistics are made where the tensor lies, by one launch. Everything then leaves the device
through its `_Lane`: a thread that copies on a side stream, through one small pinned buffer, to where it belongs.

Pinned memory costs 0.6 ms per MiB to get (H200) and holds up every launch of the process meanwhile, and so does copying
to memory that is not pinned; hence the buffer, 16 MiB for each device, which stays. What is recorded does not.
"""

from __future__ import annotations

import logging
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable
from queue import SimpleQueue
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from layerscope.errors import Unsupported
from layerscope.stats import Summary, summarize

if TYPE_CHECKING:
    from layerscope.stats.device import Level, Numbers, Sheet, Slots

    _Key = tuple[int, int, Level, bool]  # device, stream, level, and whether float64's buckets are wanted

__all__ = ["Arrival", "Statistics", "arriving"]

_log = logging.getLogger("layerscope")

_STAGE = 16 << 20
_MOST = 2 << 30  # bytes of clones a device holds at most, if a quarter of its free memory is not less
_TRIP = (
    256 << 20
)  # bytes of clones that leave before anybody has asked for one of them, if a quarter of that is not less
_QUIET, _PATIENCE = 0.002, 10  # seconds without company, and how often they may pass, until a cargo leaves alone

Bytes = np.ndarray[Any, np.dtype[np.uint8]]


def arriving(tensor: torch.Tensor, room: Callable[[], torch.Tensor]) -> Arrival:
    """Start a copy to the host; `room` gives the contiguous memory for it, when the copy comes, in another thread.

    Clones stay on the device until there are enough of them to leave together, or until one is waited for: a thread
    that works beside a model that waits for Python takes as much from it as it does itself. Where copies do not leave
    as fast as they come, the caller waits rather than fill the device.
    """
    arrival = Arrival(room)
    if tensor.device.type == "cuda":
        _refuse_capture()
        _lane(tensor.device).board(arrival, tensor)
    else:
        arrival.host = room().copy_(tensor)
    return arrival


class Arrival:
    """A tensor on its way to the host."""

    __slots__ = ("clone", "host", "room", "trip")

    def __init__(self, room: Callable[[], torch.Tensor]) -> None:
        self.room = room
        self.host: torch.Tensor | None = None
        self.clone: torch.Tensor | None = None
        self.trip: _Trip | None = None

    def __call__(self) -> torch.Tensor:
        """Wait for the values."""
        if self.trip is not None:
            self.trip.wait()
        assert self.host is not None
        return self.host

    def then(self, call: Callable[[], None]) -> None:
        """Call once nothing is written to the host's memory any more: now, or later in another thread."""
        if self.trip is None:
            call()
        else:
            self.trip.leave()
            self.trip.then(call)


def _refuse_capture() -> None:
    if torch.cuda.is_current_stream_capturing():
        raise Unsupported(
            "nothing can be recorded while a CUDA graph is captured: its replays would not record it again; "
            "record a forward that runs without the graph"
        )


# The way to the host ----------------------------------------------------------------------------


class _Cargo(ABC):
    """What a lane carries as a whole, once the device has come to where it is ready.

    More may come aboard until it leaves: `aboard` counts, and `over` says that the step has ended.
    """

    size = 0
    aboard = 0
    over = False

    def __init__(self, lane: _Lane, origin: torch.cuda.Stream) -> None:
        self.lane = lane
        self.origin = origin
        self.ready = torch.cuda.Event()  # type: ignore[no-untyped-call]
        self._unloaded = threading.Event()
        self._error: BaseException | None = None
        self._after: list[Callable[[], None]] = []
        self._lock = threading.Lock()

    @abstractmethod
    def leave(self) -> None:
        """See to it that the lane gets it; a second call does nothing."""

    @abstractmethod
    def unload(self) -> None:
        """Bring it to the host; in the lane's thread."""

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
            self._unloaded.wait()
        if self._error is not None:
            raise RuntimeError(f"it did not arrive from the device: {self._error}") from self._error

    def then(self, call: Callable[[], None]) -> None:
        with self._lock:
            if not self._unloaded.is_set():
                self._after.append(call)
                return
        call()

    def finish(self, error: BaseException | None) -> None:
        with self._lock:
            self._error = error
            self._unloaded.set()
        for call in self._after:
            call()
        self._after.clear()


class _Trip(_Cargo):
    """Clones of one stream's tensors."""

    def __init__(self, lane: _Lane, origin: torch.cuda.Stream) -> None:
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
            pairs.append((arrival.clone, _bytes(arrival.host)))
            arrival.clone = None
        self.lane.copy(pairs)


class _Lane:
    """The way from one device to the host."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._changed = threading.Condition()
        self._filling: _Trip | None = None
        self._held = 0
        self._most = min(_MOST, torch.cuda.mem_get_info(device)[0] // 4)
        self._enough = min(_TRIP, self._most // 4)
        self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        self._arrived = torch.cuda.Event()  # type: ignore[no-untyped-call]
        self._stage = torch.empty(_STAGE, dtype=torch.uint8, device="cpu", pin_memory=True)
        self._queue: SimpleQueue[_Cargo] = SimpleQueue()
        threading.Thread(target=self._carry, name=f"layerscope-{device}", daemon=True).start()

    def board(self, arrival: Arrival, tensor: torch.Tensor) -> None:
        """Clone a tensor on the current stream, and send the clone with the next trip."""
        size = tensor.nbytes
        raw = torch._C._cuda_getCurrentRawStream(tensor.get_device())
        with self._changed:
            while self._held and self._held + size > self._most:
                self._leave()
                self._changed.wait()
            trip = self._filling
            if trip is None or trip.origin.cuda_stream != raw:
                self._leave()
                trip = self._filling = _Trip(self, torch.cuda.current_stream(self._device))
            arrival.clone = tensor.clone(memory_format=torch.contiguous_format)
            arrival.trip = trip
            trip.arrivals.append(arrival)
            trip.aboard += 1
            trip.over = False
            trip.size += size
            self._held += size
            if trip.size >= self._enough:
                self._leave()

    def leave(self, trip: _Trip) -> None:
        """Send a trip, unless it has left."""
        with self._changed:
            if trip is self._filling:
                self._leave()

    def rest(self) -> None:
        """Hear that the step has ended: what is waiting need not wait for company."""
        with self._changed:
            if self._filling is not None:
                self._filling.over = True

    def _leave(self) -> None:
        trip, self._filling = self._filling, None
        if trip is not None:
            self.send(trip)

    def send(self, cargo: _Cargo) -> None:
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
            self._arrived.synchronize()  # of an event: a stream's would be noticed by the user's sync debug mode
            for _, _, target, source in staged:
                np.copyto(target, source[: target.size])
            staged.clear()

    def bring(self, *tensors: torch.Tensor) -> list[np.ndarray[Any, Any]]:
        """Return contiguous tensors of plain numbers as arrays; in the lane's thread."""
        hosts = [torch.empty(tensor.shape, dtype=tensor.dtype, device="cpu") for tensor in tensors]
        self.copy([(tensor, _bytes(host)) for tensor, host in zip(tensors, hosts, strict=True)])
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
            except Exception as raised:  # somebody else's; the lane must go on
                _log.warning("after a copy from %s: %s: %s", self._device, type(raised).__name__, raised)
            with self._changed:
                self._held -= cargo.size
                self._changed.notify_all()
            del cargo, error


_lanes: dict[torch.device, _Lane] = {}
_making = threading.Lock()


def _lane(device: torch.device) -> _Lane:
    lane = _lanes.get(device)
    if lane is None:
        with _making:
            lane = _lanes.get(device)
            if lane is None:
                lane = _lanes[device] = _Lane(device)
    return lane


def _flat(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.reshape(-1).view(torch.uint8)


def _bytes(host: torch.Tensor) -> Bytes:
    return _flat(host).numpy()


# Statistics -------------------------------------------------------------------------------------


class Statistics:
    """Summaries of tensors on an accelerator, made without waiting for it.

    `of` may be called from several threads, and what it returns in any thread at any time. Where the device has no
    kernels for a tensor, a copy of it is summarised on the host, when the summary is asked for.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._slots: dict[_Key, Slots] = {}
        self._open: dict[_Key, _Page] = {}
        self._names: dict[torch.dtype, str] = {}
        self._broken: str | None = None

    @property
    def kernels(self) -> str:
        """Which code makes them: "triton", or the host, and why."""
        reason = self._why_not()
        return f"on the host: {reason}" if reason else "triton"

    def prepare(self, tensors: Iterable[torch.Tensor], *, level: Level | None = None) -> None:
        """Make ready for tensors like these, and for their statistics at `level`, lest the first hook wait for it."""
        for where, dtypes in _by_device(tensors).items():
            _lane(where)
            if level is None or self._why_not():
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
            _refuse_capture()
            if not self._why_not():
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
        for lane in list(_lanes.values()):
            lane.rest()
        for page in list(self._open.values()):
            page.over = True

    def close(self) -> None:
        """Send for what is left, and give the memory on the device back."""
        with self._lock:
            for key in list(self._open):
                self._send(key)
            self._slots.clear()

    def _why_not(self) -> str:
        if self._broken is None:
            from layerscope.stats.launching import why_not

            self._broken = why_not()
        return self._broken

    def _give_up(self, error: Exception) -> None:
        self._broken = f"Triton failed: {type(error).__name__}: {error}"
        _log.warning("%s. Statistics are made on the host, which costs a copy of every tensor.", self._broken)

    def _started(self, tensor: torch.Tensor, level: Level) -> Callable[[], Summary] | None:
        from layerscope.stats.device import takes

        dtype = tensor.dtype
        name = self._names.get(dtype)
        if name is None:
            name = self._names[dtype] = str(dtype).removeprefix("torch.")
        if not takes(tensor):
            return None
        shape = tuple(tensor.shape)
        if 0 in shape:
            nothing = summarize(torch.empty(shape, dtype=dtype, device="cpu"), level=level)
            return lambda: nothing
        if not tensor.is_contiguous() or tensor.data_ptr() % 16:
            tensor = tensor.clone(memory_format=torch.contiguous_format)
        place = tensor.get_device()
        stream = torch._C._cuda_getCurrentRawStream(place)
        key = (place, stream, level, level == "full" and dtype is torch.float64)
        with self._lock:
            page = self._open.get(key) or self._opened(key, tensor.device)
            index = page.aboard
            page.slots.start(index, tensor)
            page.aboard = index + 1
            page.over = False
            if page.aboard == page.slots.size:
                self._send(key)

        def later() -> Summary:
            page.wait()
            return page.numbers[index].summary(name, shape)

        return later

    def _opened(self, key: _Key, where: torch.device) -> _Page:
        def leave() -> None:
            with self._lock:
                if self._open.get(key) is page:
                    self._send(key)

        page = _Page(_lane(where), torch.cuda.current_stream(where), self._slots_at(key, where), leave)
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


class _Page(_Cargo):
    """The numbers of tensors that are gathered together."""

    def __init__(self, lane: _Lane, origin: torch.cuda.Stream, slots: Slots, leave: Callable[[], None]) -> None:
        super().__init__(lane, origin)
        self.slots = slots
        self.sheet: Sheet | None = None
        self.numbers: list[Numbers] = []
        self._send = leave

    def leave(self) -> None:
        self._send()

    def unload(self) -> None:
        from layerscope.stats.device import Numbers

        assert self.sheet is not None
        self.numbers = Numbers.read(self.sheet, self.lane.bring)
        self.sheet = None


def _by_device(tensors: Iterable[torch.Tensor]) -> dict[torch.device, set[torch.dtype]]:
    found: dict[torch.device, set[torch.dtype]] = {}
    for tensor in tensors:
        if tensor.is_cuda:
            found.setdefault(tensor.device, set()).add(tensor.dtype)
    return found
