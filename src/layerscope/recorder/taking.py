"""Take what is wanted of a tensor, before the model can change it.

    look = taking.look(step.looks, tensor, wish)                    # its copy, its summary, or both
    got = taking.once(step.taken, request, "moments", tensor)       # one thing of a tensor on a device, quickly

On an accelerator everything is only started here. What a second point sees again is taken once: an output that is the
next module's input is one object, and its version tells whether it was changed since.
"""

from __future__ import annotations

import logging
import weakref
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, TypeAlias

import torch

from layerscope import native
from layerscope.errors import Unsupported
from layerscope.points import Moment, Point
from layerscope.recorder.berths import Berths
from layerscope.recorder.copying import Arena, Pool, dtype_name, plain, undisturbed
from layerscope.recorder.devices import Statistics
from layerscope.recorder.gathering import Gathering, Held
from layerscope.recorder.lanes import flying, is_capturing, lane_of
from layerscope.recorder.taps import Level, Only, Plan, Request, Wish
from layerscope.stats import Summary, backend, prepare, summarize
from layerscope.stats.bits import lying
from layerscope.store import Blob

__all__ = ["Look", "Taken", "Taking"]

_log = logging.getLogger("layerscope")

Taken: TypeAlias = tuple["weakref.ref[torch.Tensor]", int, Only, Any]  # whose, at which version, what, and that


class Look:
    """What was taken of one tensor; it holds for the same object at the same version, and no longer."""

    __slots__ = ("blob", "copy", "level", "note", "summary", "tensor", "version", "wish")

    def __init__(self, tensor: torch.Tensor, version: int | None = None) -> None:
        self.tensor = weakref.ref(tensor)
        self.version = version
        self.wish: Wish | None = None  # that it was taken for, and may be asked for again
        self.copy: Callable[[], torch.Tensor] | None = None  # in memory, shared by every point that saw the tensor
        self.blob: Blob | None = None  # on its way to disk, for one record
        self.summary: Summary | Callable[[], Summary] | None = None
        self.level: Level | None = None
        self.note: Mapping[str, str] | None = None

    def holds(self, wish: Wish, *, in_memory: bool) -> bool:
        """Whether nothing more has to be taken of the tensor."""
        tensor = not wish.tensor or (in_memory and self.copy is not None)
        return tensor and (not wish.summary or self.level == "full" or self.level == wish.level)


class Taking:
    """The copies and statistics of one recording."""

    def __init__(
        self,
        *,
        in_memory: bool,
        listened: bool,
        budget: int,
        keep: Callable[[Held], None] = lambda held: None,
        doubtful: Callable[[Point], None] = lambda point: None,
    ) -> None:
        self.quick = False  # whether `once` is worth asking
        self.gathering: Gathering | None = None  # what waits for the end of its step, where anything may
        self._keep = keep  # is given each tensor that is held back, in its place among the records
        self._in_memory = in_memory
        self._listened = listened  # whether somebody else wants to know of each record at once
        self._arena = Arena()
        self._pool = Pool(budget)
        self._devices = Statistics()
        self._berths: Berths | None = None
        self._gave_up = False  # and said so
        self._doubtful = doubtful  # is told of points whose records may show later values
        self._shares = True  # whether two points are likely to see the same tensor

    def prepare(self, parameters: list[torch.Tensor], plan: Plan, *, gathers: bool) -> str | None:
        """Have the kernels ready before the first hook; return which they are, None when no statistics are wanted.

        `gathers` says whether a tensor may be held back to the end of its step.
        """
        on_device = [p for p in parameters if p.device.type != "cpu"]
        places = {p.device.index if p.is_cuda else None for p in on_device}
        place = places.pop() if len(places) == 1 else None
        on_gpu = any(p.is_cuda for p in on_device)
        if on_gpu and is_capturing():
            raise Unsupported(
                "a recording cannot begin while a CUDA graph is captured: it gets memory, which no capture bears; "
                "begin it before the capture"
            )
        self.quick = on_gpu and self._in_memory and not self._listened
        self._shares = any(sides != {"output"} for sides in plan.sides.values())
        if on_device:
            self._devices.prepare(on_device, level=plan.default.level if plan.counts else None)
            if self.quick and gathers and place is not None:
                self._gather(place)
        elif plan.counts:
            prepare(*_dtypes(parameters))
        return (self._devices.kernels if on_device else backend()) if plan.counts else None

    def _gather(self, place: int) -> None:
        gates = native.load()
        if gates is None:
            _log.info("tensors on the GPU are taken one by one: %s", native.why_not())
            return
        self.gathering = Gathering(
            gates,
            place,
            take_all=self._take_all,
            alone=self._alone,
            keep=self._keep,
            doubtful=self._doubtful,
            taken=self._devices.taken,
        )
        try:
            lane_of(torch.device("cuda", place)).prepare()
        except Exception as error:
            self.gather_no_more(error)

    def gate(self, hook: Any, local: Any) -> Any | None:
        """Return what stands in a hook's place, and lets the usual calls pass, where there is such a thing."""
        if self.gathering is None:
            return None
        return self.gathering.gates.Gate(self.gathering.basket, hook.kind, hook, hook.module, hook.name, local)

    def end(self, *, idle: bool = False) -> None:
        """End a step: what was held back is taken, and what is waited for from now on leaves at once.

        In an `idle` one nothing was, but a backward pass may have brought something since the last.
        """
        if self.gathering is not None and not idle:
            try:
                self.gathering.end()
            except Exception as error:
                self.gather_no_more(error)
        try:
            self._devices.fetch()
        except Exception as error:  # whoever waits for the values is told
            _log.warning("after a step: %s: %s", type(error).__name__, error)

    def shut(self) -> None:
        """Have no tensor wait in the rest of this step."""
        if self.gathering is not None:
            self.gathering.basket.bar()

    def flush(self) -> None:
        """Take what this thread has held back until now."""
        if self.gathering is not None and self.gathering.is_mine:
            with undisturbed():
                self.gathering.flush()

    def close(self) -> None:
        """Take what any thread has held back, and give the memory on devices back."""
        if self.gathering is not None:
            self.gathering.close()
        self._devices.close()
        self._berths = None

    def look(self, looks: dict[int, Look], tensor: torch.Tensor, wish: Wish) -> Look:
        """Take what is wanted of a tensor, and is not among the looks that the step has had at it."""
        look = looks.get(id(tensor))
        if look is None or look.tensor() is not tensor or look.version != tensor._version:
            version = _version(tensor)
            look = Look(tensor, version)
            if version is not None:
                looks[id(tensor)] = look
            self._take(look, tensor, wish)
            look.wish = wish
        elif look.wish is not wish and not look.holds(wish, in_memory=self._in_memory):
            self._take(look, tensor, wish)
        return look

    def _take(self, look: Look, tensor: torch.Tensor, wish: Wish) -> None:
        if not wish.tensor and tensor.is_cuda and look.summary is None:
            look.summary = self._devices.start(tensor, wish.level)
            if look.summary is not None:
                look.level = wish.level
                return
        if wish.tensor or lying(tensor) is None:
            values, said = plain(tensor)
            look.note = said or None
        else:
            values = tensor
        if wish.summary and (look.summary is None or (wish.level == "full" and look.level != "full")):
            if values.is_cpu:
                look.summary = summarize(values, level=wish.level, later=True)
            else:
                look.summary = self._devices.of(values, level=wish.level)
            look.level = wish.level
        if wish.tensor and self._in_memory:
            look.copy = look.copy or self._arena.copy(values)
        elif wish.tensor:
            lease = self._pool.copy(values)
            look.blob = Blob(dtype_name(values.dtype), tuple(values.shape), values.nbytes, lease.data, lease.release)

    # Quickly, on a device -----------------------------------------------------------------------

    def once(self, taken: dict[int, Taken], request: Request, only: Only, tensor: torch.Tensor) -> Any | None:
        """Take one thing of a tensor that lies plainly; what is returned is called for the values. See `hold` first.

        None of any other, for `look`. No tensor operation runs here, so that nobody's modes notice.
        """
        got = self._at_once(taken, only, tensor)
        if self.gathering is not None:
            self.gathering.doubt(request, only, tensor, got)
        return got

    def make_room(self) -> None:
        """Take what waits, where that and what is tried beside it are too much; what `once` took is kept by then."""
        if self.gathering is not None and self.gathering.is_mine:
            self.gathering.basket.make_room()

    def hold(self, request: Request, tensor: torch.Tensor, moment: Moment) -> bool:
        """Have a tensor wait for the end of its step, if it may; it is kept then."""
        return self.gathering is not None and self.gathering.hold(request, tensor, moment) is not None

    def _at_once(self, taken: dict[int, Taken], only: Only, tensor: torch.Tensor) -> Any:
        known = taken.get(id(tensor))
        if known is not None and known[0]() is tensor and known[1] == tensor._version and known[2] == only:
            return known[3]
        got = flying(tensor, self._arena.room) if only == "tensor" else self._devices.start(tensor, only)
        if got is not None and (self._shares or only == "tensor"):
            version = _version(tensor)
            if version is not None:
                taken[id(tensor)] = weakref.ref(tensor), version, only, got
        return got

    def _take_all(self, only: Only, dtype: torch.dtype, held: list[Held]) -> None:
        """Take one thing of each tensor, in one launch on the current stream; none where that cannot be done."""
        assert self.gathering is not None
        try:
            gates = self.gathering.gates
            if only == "tensor":
                device = torch.device("cuda", self.gathering.place)
                lane, self._berths = lane_of(device), self._berths or Berths(device)
                ferry = partial(lane.ferry, width=dtype.itemsize, gates=gates, berths=self._berths)
                ferry(held)
                way = gates.Way(only, dtype, None, None, ferry, None, 0, 0, 0)
            else:
                way = self._devices.start_all(only, dtype, held, gates)
            if way is not None:
                self.gathering.basket.aim(way)
        except Exception as error:
            self.gather_no_more(error)

    def gather_no_more(self, error: Exception) -> None:
        """Have everything taken as it appears from now on."""
        assert self.gathering is not None
        self.gathering.give_up()
        self._berths = None
        if not self._gave_up:
            self._gave_up = True
            _log.warning(
                "small tensors cannot be taken together, and are taken one by one: %s: %s", type(error).__name__, error
            )

    def _alone(self, only: Only, tensor: torch.Tensor) -> Any:
        """Take one thing of a tensor, however it lies; what is returned raises where that failed."""
        wish = Wish(tensor=True) if only == "tensor" else Wish(summary=True, level=only)
        try:
            with undisturbed():
                look = self.look({}, tensor, wish)
        except Exception as error:
            return partial(_raise, error)
        return look.copy if only == "tensor" else look.summary


def _version(tensor: torch.Tensor) -> int | None:
    """Return the version of a tensor; an inference tensor has none, so that each sight of one counts."""
    try:
        return tensor._version
    except RuntimeError:
        return None


def _raise(error: Exception) -> None:
    raise error


def _dtypes(parameters: list[torch.Tensor]) -> set[str]:
    """Return the dtypes that tensors of a model on the CPU are likely to have."""
    usual = {torch.float32, torch.bfloat16, torch.float16, torch.float64}
    found = {p.dtype for p in parameters if p.device.type == "cpu"} & usual
    return {dtype_name(dtype) for dtype in found or {torch.float32}}
