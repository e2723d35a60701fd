"""The recording itself: a context manager that listens to a runtime and hands records to a run.

with record(model, "model.layers.*", to="runs/fp32") as rec:
    model(**inputs)
"""

from __future__ import annotations

import logging
import os
import threading
import weakref
from collections import deque
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from functools import partial
from types import TracebackType
from typing import Any, Literal, NamedTuple, Protocol

import torch

from layerscope import ranks
from layerscope.errors import Incomplete, NoSuchPoint, NothingRecorded
from layerscope.points import Moment, Point
from layerscope.recorder.about import about
from layerscope.recorder.clock import Clock
from layerscope.recorder.copying import Arena, Pool, dtype_name, plain, undisturbed
from layerscope.recorder.devices import Statistics
from layerscope.recorder.gathering import Gathering, Held
from layerscope.recorder.lanes import Lost, flying, lane_of
from layerscope.recorder.ledger import Ledger
from layerscope.recorder.taps import Keep, Level, Only, Plan, Request, Wish, plan, schedule_of, taps_of
from layerscope.runtimes import eager, find, opened
from layerscope.runtimes.observing import measures
from layerscope.runtimes.runtime import Runtime
from layerscope.runtimes.sink import Step
from layerscope.schedules import Schedule
from layerscope.stats import Later, Summary, backend, prepare, summarize
from layerscope.stats.bits import lying
from layerscope.store import Blob, Completeness, MemoryRun, Missing, Run, Writer, open_run

__all__ = ["Listener", "Recording", "record"]

# Whether somebody listens to tensor operations, or changes what they make.
_dispatch_modes = torch._C._len_torch_dispatch_stack
_function_modes = torch._C._len_torch_function_stack
_inference_mode = torch.is_inference_mode_enabled

_log = logging.getLogger("layerscope")
_BUDGET = 512 << 20
_SILENT_BLOCK = (
    "it was not called (the recording's `model` is what to call), or it was called through torch.compile, "
    "where hooks added after compiling never fire"
)

# A record on its way into a run in memory; copy and summary may still have to arrive from a device.
_Copy = Callable[[], torch.Tensor]
_Taken = tuple["weakref.ref[torch.Tensor]", int, str, Any]  # whose, at which version, which one thing, and that
_Waiting = tuple[Point, Moment, "_Copy | None", "Summary | Callable[[], Summary] | None", "Mapping[str, Any] | None"]


def record(
    model: Any,
    taps: Any,
    *,
    to: str | os.PathLike[str] | None = None,
    keep: Keep | Callable[[torch.Tensor], Any] | None = None,
    when: Schedule | str | None = None,
    on_error: Literal["record", "raise"] = "record",
    append: bool = False,
    statistics: Level = "full",
    name: str | None = None,
    mode: str | None = None,
    weights: bool | None = None,
    settings: Mapping[str, Any] | None = None,
    observer: Literal["measure", "skip"] = "measure",
    precision_faithful: bool = False,
    budget: int = _BUDGET,
    listener: Listener | None = None,
) -> Recording:
    """Record the tapped points of `model` until the block ends: in memory, or in the run that `to` names.

    `taps` is a pattern (`"model.layers.*"`), a list of them, a mapping alias -> pattern, or `Tap`s with wishes of their
    own. `model` is a module, compiled or not, a TorchScript module, an exported program, or the path of a file that
    holds one; where it cannot itself be called, the recording's `model` is what to call.

    `keep` is `"tensor"` (the default in memory), `"both"` (the default on disk), `"summary"`, or a function of a tensor
    whose result is kept instead; it is given the live tensor, and must not change it. `when` is a schedule
    (`every(100) | first(3)`) or its text.

    What cannot be recorded is listed under `missing` and the model's run goes on; `on_error="raise"` raises at the end
    of the block. If forwards ran and no tap that was due saw anything, the end of the block always raises. `name`,
    `mode` and `settings` (plain values) are what the run says of its model and of how it ran. `weights` asks for the
    fingerprints of the model's parameters (by default for runs on disk of models up to 8 GiB); `budget` bounds the
    bytes that wait for the disk. A `listener` is told each record as it is made; in memory, summaries alone are then
    not kept.

    Taps can change what a compiler fuses, and so the output. Of a model that torch.compile runs, the first forward that
    is recorded is run untapped as well, once, and leaves no trace but the difference in the run's settings;
    `observer="skip"` does not. `precision_faithful` has Inductor round where the source does while it is recorded, so
    that taps change nothing: slower, and to other bits than the plain compiled model's.

    A tensor seen before is recognised as the same object at the same version. What changes it without changing its
    version (`.data`, numpy, a kernel of one's own) goes unnoticed until the next tensor.
    """
    if on_error not in ("record", "raise"):
        raise ValueError(f"on_error={on_error!r} is not known; use 'record' or 'raise'.")
    if append and to is None:
        raise ValueError("append=True needs `to=`: a recording in memory has nothing to append to.")
    model = opened(model)
    runtime = find(model, measure=measures(observer), precise=precision_faithful)
    try:
        planned = plan(
            taps_of(taps),
            runtime.points(model),
            runtime.shared(model),
            default=_default(keep, statistics, on_disk=to is not None),
            when=schedule_of(when),
        )
    except NoSuchPoint as error:
        raise NoSuchPoint(f"{error} {runtime.remark(model)}".rstrip()) from None
    runtime.check(model, planned.sides, ops=any(planned.ops))
    told = _Settings(to, on_error == "raise", append, statistics, name, mode, weights, settings or {}, budget)
    return Recording(model, runtime, planned, told, listener)


class Listener(Protocol):
    """Somebody who follows a recording while it is made; its methods are called in the middle of a forward.

    One that has a method `whole(point, moment, value)` is also told each value as the module gave it, tensors first.
    """

    def wants(self) -> bool:
        """Tell whether the forward that is about to begin counts; otherwise it is neither recorded nor numbered."""

    def seen(
        self, point: Point, moment: Moment, tensor: torch.Tensor, summary: Summary | Callable[[], Summary] | None
    ) -> None:
        """Take note of a record; the tensor is the model's own, and only for now."""


class _Settings(NamedTuple):
    """What `record` was told, apart from the taps."""

    to: str | os.PathLike[str] | None
    strict: bool
    append: bool
    statistics: Level
    name: str | None
    mode: str | None
    weights: bool | None
    settings: Mapping[str, Any]
    budget: int


@dataclass(slots=True, eq=False)
class _Step(Step):
    """A step with the taps that are due in it, and the tensors already looked at."""

    due: tuple[bool, ...] = ()
    requests: dict[int, Request] = field(default_factory=dict)
    looks: dict[int, _Look] = field(default_factory=dict)
    taken: dict[int, _Taken] = field(default_factory=dict)  # of tensors on a device, quickly
    moments: dict[int, Moment] = field(default_factory=dict)  # of each call

    def at(self, call: int) -> Moment:
        """Return the moment of a call within the step."""
        moment = self.moments.get(call)
        if moment is None:
            when = self.moment
            moment = self.moments[call] = Moment(when.epoch, when.step, when.batch, call, when.rank)
        return moment


class _Look:
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


class Recording:
    """What `record` returns. Inside the block it listens; after it, it reads back.

    `rec["model.layers.3"]` is a tensor, `rec.run` everything that was recorded, `rec.completeness` what is missing,
    `rec.model` what to call. In memory, points that saw one and the same tensor share one copy of it.
    """

    def __init__(
        self, model: Any, runtime: Runtime, plan: Plan, settings: _Settings, listener: Listener | None = None
    ) -> None:
        self.model = model
        self._watched = model
        self._runtime = runtime
        self._listener = listener
        self.to = settings.to
        self._settings = settings
        self._plan = plan
        self._ledger = Ledger()
        self._lock = threading.Lock()
        self._step: _Step | None = None
        self._pending: deque[_Waiting] = deque()
        self._arena = Arena()
        self._pool = Pool(settings.budget)
        self._devices = Statistics()
        self._clock = Clock()
        self._note: Mapping[str, Any] | None = None
        self._tell_whole: Callable[[Point, Moment, object], None] | None = getattr(listener, "whole", None)
        self._whole = None if self._tell_whole is None else self._on_whole
        self._quick = False  # whether a record can be kept with little Python
        self._shares = True  # whether two points are likely to see the same tensor
        self._gathering: Gathering | None = None
        self._memory: MemoryRun | None = None
        self._writer: Writer | None = None
        self._stack = ExitStack()
        self.completeness: Completeness | None = None

    # The block ----------------------------------------------------------------------------------

    def __enter__(self) -> Recording:
        if self._memory is not None or self._writer is not None:
            raise RuntimeError("a recording is entered once; call record() again for another one.")
        settings, rank = self._settings, ranks.rank()
        kernels = self._prepare()
        manifest = about(
            self._watched,
            self._runtime,
            self._plan,
            name=settings.name,
            mode=settings.mode,
            statistics=settings.statistics,
            weights=settings.weights,
            settings=settings.settings,
            kernels=kernels,
            on_disk=self.to is not None,
        )
        if self.to is None:
            self._memory = MemoryRun(manifest)
            self._clock = Clock(rank=rank)
        else:
            self._writer = Writer(self.to, manifest, rank=rank, append=settings.append, budget=settings.budget)
            self._clock = Clock(rank=rank, step=self._writer.next_step)
        ops = self._op_named if any(self._plan.ops) else None
        try:
            watch = self._runtime.watch(self._watched, self._plan.sides, self, ops=ops)
            self.model = self._stack.enter_context(watch)
        except BaseException:
            self._finish(state="interrupted")
            raise
        return self

    def _prepare(self) -> str | None:
        """Have the kernels ready before the first hook; return which they are, None when no statistics are wanted."""
        counts = self._plan.counts
        parameters = self._runtime.parameters(self._watched)
        on_device = [p for p in parameters if p.device.type != "cpu"]
        self._quick = any(p.is_cuda for p in on_device) and self._listener is None and self.to is None
        places = {p.device.index if p.is_cuda else None for p in on_device}
        place = places.pop() if len(places) == 1 else None
        if self._quick and place is not None and self._runtime is eager and not eager.compiled_parts(self._watched):
            self._gathering = Gathering(place, self._take_all)
        self._shares = any(sides != {"output"} for sides in self._plan.sides.values())
        if on_device:
            self._devices.prepare(on_device, level=self._settings.statistics if counts else None)
        elif counts:
            prepare(*_dtypes(parameters))
        return (self._devices.kernels if on_device else backend()) if counts else None

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            self._stack.close()
        finally:
            done = self._finish(state="complete" if error is None else "interrupted")
        if error is not None:
            return
        ledger = self._ledger
        if ledger.any_due and not ledger.any_recorded:
            raise NothingRecorded(
                f"{ledger.forwards} forward{'s' if ledger.forwards > 1 else ''} ran and no tap saw a tensor: "
                f"{_listed(done.missing)}. `layerscope points MODEL` lists what can be tapped."
            )
        if self._settings.strict and (done.missing or done.dropped):
            lost = [*done.missing, *done.dropped]
            raise Incomplete(f"not everything asked for was recorded: {_listed(lost)}.")

    def moment(
        self,
        *,
        epoch: int | None = None,
        step: int | None = None,
        batch: int | None = None,
        note: Mapping[str, Any] | None = None,
    ) -> None:
        """Name the moment of the forwards to come.

        With `epoch` alone, steps and batches go on counting by themselves. With `batch` or `step`, every forward
        belongs to it until the next call of `moment`. `note` is kept beside every record until then.
        """
        self._note = note
        self._clock.set(epoch=epoch, step=step, batch=batch)

    def flush(self) -> None:
        """Wait until everything recorded so far is safe: on disk and acknowledged, or arrived in memory."""
        if self._writer is not None:
            self._writer.flush()
        elif self._memory is not None:
            self._settle(self._memory)

    def take(self, *, leave: int = 0) -> MemoryRun:
        """Return what was recorded in memory until now as a run of its own, and let go of it.

        Called after each step, this keeps a long recording's memory at a few steps. The copies of the last step may
        still be on their way from a device: `leave=1` leaves that step for the next call, and waits for nothing.
        """
        if self._memory is None:
            raise RuntimeError("there is nothing to take: the recording is not in memory, or has not begun.")
        run = self._memory
        self._settle(run, leave=leave)
        self._memory = run.following()
        return run

    def add(
        self,
        point: Point,
        moment: Moment,
        tensor: torch.Tensor,
        *,
        summary: Summary | Callable[[], Summary] | None = None,
    ) -> None:
        """Keep a tensor that a listener held back, at the moment it was seen, in place of what is recorded there."""
        look = _Look(tensor)
        with undisturbed():
            self._take(look, tensor, Wish(tensor=True))
        if self._writer is not None:
            self._writer.write(point, moment, blob=look.blob, summary=summary, note=look.note)
        else:
            self._pending.append((point, moment, look.copy, summary, look.note))
        self._ledger.recorded(point)

    # Reading back -------------------------------------------------------------------------------

    def __getitem__(self, name: str) -> torch.Tensor:
        return self.run.tensor(name)

    @property
    def run(self) -> Run | MemoryRun:
        """What has been recorded so far, with the verbs of an opened run."""
        if self._memory is None and self._writer is None:
            raise RuntimeError("nothing is recorded before the block begins: `with record(...) as rec:`.")
        self.flush()
        return self._memory if self.to is None else open_run(self.to)  # type: ignore[return-value]

    @property
    def missing(self) -> list[Missing]:
        """What was asked for and has no record, with the reason; known once the block has ended."""
        return [] if self.completeness is None else list(self.completeness.missing)

    # What the runtime tells (the sink) ----------------------------------------------------------

    def begin(self) -> Step:
        """Start a step, or go on with the one the caller has named."""
        if not (self._listener is None or self._listener.wants()):
            return _Step(Moment(), idle=True)
        moment = self._clock.begin()
        with self._lock:
            if self._step is None or self._step.moment is not moment:
                due = self._due(moment)
                requests = self._plan.requests(due)
                self._step = _Step(moment, idle=not any(due), due=due, requests=requests, whole=self._whole)
            step = self._step
        self._ledger.began(step.due)
        if self._gathering is not None:
            self._gathering.begin()
        return step

    def _due(self, moment: Moment) -> tuple[bool, ...]:
        try:
            return self._plan.due(moment)
        except Exception as error:
            self._ledger.unscheduled(error)
            return (False,) * len(self._plan.taps)

    def end(self, step: Step, *, failed: bool) -> None:
        """Forget the tensors of the step; they are the model's again."""
        assert isinstance(step, _Step)
        if self._gathering is not None:
            self._gathering.end()
        step.looks.clear()
        step.taken.clear()
        self._devices.fetch()
        self._ledger.ended(() if step.idle else step.calls, failed=failed)

    def seen(
        self,
        step: Any,  # one of ours: `begin` made it
        point: Point,
        tensor: torch.Tensor,
        *,
        call: int,
        note: Mapping[str, str] | None = None,
    ) -> None:
        """Keep what the taps that are due want of this tensor."""
        request = step.requests.get(id(point)) or self._plan.request(step.due, point)
        if request.wish is None:
            self._ledger.passed(point)
            return
        try:
            only = request.only if self._quick and not (note or self._note or _function_modes()) else None
            if only is not None and self._kept_quickly(step, request, only, tensor, call):
                return
            if _dispatch_modes() or _function_modes() or _inference_mode():
                with undisturbed():
                    self._keep(step, request, request.wish, tensor, call, note)
            else:
                self._keep(step, request, request.wish, tensor, call, note)
        except Lost as error:
            self._lose(point, step.at(call), error)
        except Exception as error:
            self.failed(point, error)

    def _lose(self, point: Point, moment: Moment, error: Exception) -> None:
        home = self._writer or self._memory
        assert home is not None
        home.lose(point, moment, str(error))

    def _on_whole(self, step: Step, point: Point, value: object, call: int) -> None:
        assert isinstance(step, _Step)
        assert self._tell_whole is not None
        with undisturbed():
            self._tell_whole(point, step.at(call), value)

    def empty(self, point: Point, *, because: str) -> None:
        """Remember why a side that was asked for has no record."""
        self._ledger.empty(point, because)

    def recomputed(self, name: str) -> None:
        """Count a repeated call."""
        self._ledger.repeated()

    def failed(self, point: Point, error: Exception) -> None:
        """List a failure under `missing`, and say it once; the model's run goes on."""
        self._ledger.failed(point, error)

    # Keeping ------------------------------------------------------------------------------------

    def _kept_quickly(self, step: _Step, request: Request, only: Only, tensor: torch.Tensor, call: int) -> bool:
        """Keep one thing of a tensor on a device, in memory, where a model may be waiting for Python; False if not.

        No tensor operation runs here, so that nobody's modes need to be told apart. What a second point sees again is
        taken once: an output that is the next module's input is one object, and its version tells whether it changed.
        """
        gathering, got = self._gathering, None
        if gathering is not None and request.held > 0:
            got = gathering.hold(request, only, tensor)
        if got is None:
            got = self._taken_at_once(step, only, tensor)
            if got is None:
                return False
            if gathering is not None and request.held >= 0:
                gathering.doubt(request, only, tensor, got)
        copy, summary = (got, None) if only == "tensor" else (None, got)
        self._pending.append((request.point, step.moments.get(call) or step.at(call), copy, summary, None))
        if not request.recorded:
            request.recorded = True
            self._ledger.recorded(request.point)
        return True

    def _taken_at_once(self, step: _Step, only: Only, tensor: torch.Tensor) -> Any:
        """Take one thing of a tensor that lies plainly, or what was taken of it a moment ago; None of any other."""
        taken = step.taken.get(id(tensor))
        if taken is not None and taken[0]() is tensor and taken[1] == tensor._version and taken[2] == only:
            return taken[3]
        got = flying(tensor, self._arena.room) if only == "tensor" else self._devices.start(tensor, only)
        if got is not None and (self._shares or only == "tensor"):
            version = _version(tensor)
            if version is not None:
                step.taken[id(tensor)] = weakref.ref(tensor), version, only, got
        return got

    def _take_all(self, only: Only, tensors: list[torch.Tensor], stream: int) -> list[Any]:
        """Take one thing of each tensor, of most of them in one launch."""
        assert self._gathering is not None
        found: list[Any] = [None] * len(tensors)
        try:
            if only == "tensor":
                lane = lane_of(torch.device("cuda", self._gathering.place))
                found = [*lane.ferry(tensors, self._arena.room, stream)]
            else:
                found = [*self._devices.start_all(tensors, only, stream)]
        except Exception as error:
            _log.warning("small tensors could not be taken together: %s: %s", type(error).__name__, error)
        return [self._taken_alone(only, t) if got is None else got for got, t in zip(found, tensors, strict=True)]

    def _taken_alone(self, only: Only, tensor: torch.Tensor) -> Any:
        """Take one thing of a tensor, however it lies; what is returned raises where that failed."""
        look, wish = _Look(tensor), Wish(tensor=True) if only == "tensor" else Wish(summary=True, level=only)
        try:
            with undisturbed():
                self._take(look, tensor, wish)
        except Exception as error:
            return partial(_raise, error)
        return look.copy if only == "tensor" else look.summary

    def _keep(
        self,
        step: _Step,
        request: Request,
        wish: Wish,
        tensor: torch.Tensor,
        call: int,
        note: Mapping[str, str] | None,
    ) -> None:
        if wish.function is not None:
            tensor = _as_result(wish.function(tensor.detach()))
            wish = Wish(True, wish.summary, wish.level)
        # An output that is the next module's input is one object, and its version tells whether it was changed since.
        look = step.looks.get(id(tensor))
        if look is None or look.tensor() is not tensor or look.version != tensor._version:
            look = self._looked(step, tensor, wish)
        elif look.wish is not wish and not look.holds(wish, in_memory=self._writer is None):
            self._take(look, tensor, wish)
        point, moment = request.point, step.moments.get(call) or step.at(call)
        summary = look.summary if wish.summary else None
        said: Mapping[str, Any] | None = look.note
        if note or self._note:
            said = {**(self._note or {}), **(note or {}), **(look.note or {})}
        if self._listener is not None:
            self._listener.seen(point, moment, tensor, summary)
        if self._writer is not None:
            self._writer.write(point, moment, blob=look.blob, summary=summary, note=said)
            look.blob = look.wish = None
        elif wish.tensor or self._listener is None:
            self._pending.append((point, moment, look.copy if wish.tensor else None, summary, said))
        if not request.recorded:
            request.recorded = True
            self._ledger.recorded(point)

    def _looked(self, step: _Step, tensor: torch.Tensor, wish: Wish) -> _Look:
        """Take what is wanted of a tensor that has not been seen yet."""
        version = _version(tensor)
        look = _Look(tensor, version)
        if version is not None:
            step.looks[id(tensor)] = look
        self._take(look, tensor, wish)
        look.wish = wish
        return look

    def _take(self, look: _Look, tensor: torch.Tensor, wish: Wish) -> None:
        """Take what is wanted of a tensor and not there yet; on an accelerator it is only started here."""
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
        if wish.tensor and self._writer is None:
            look.copy = look.copy or self._arena.copy(values)
        elif wish.tensor:
            lease = self._pool.copy(values)
            look.blob = Blob(dtype_name(values.dtype), tuple(values.shape), values.nbytes, lease.data, lease.release)

    def _settle(self, run: MemoryRun, *, leave: int = 0) -> None:
        """Move what waits into a run, but for the last steps; copies from a device have then arrived."""
        if self._gathering is not None and self._gathering.is_mine:
            self._gathering.flush()
        waiting = [self._pending.popleft() for _ in range(len(self._pending))]
        steps = sorted({(moment.step, moment.batch) for _, moment, *_ in waiting}) if leave else []
        last = set(steps[-leave:]) if leave else set()
        left = []
        for one in waiting:
            point, moment, copy, summary, note = one
            held = copy if copy is not None else summary
            # Another thread's step may not have ended.
            if (moment.step, moment.batch) in last or (isinstance(held, Held) and held.tensor is not None):
                left.append(one)
                continue
            try:
                kept = None if copy is None else copy()
                if callable(summary) and not isinstance(summary, Later):
                    summary = summary()
                run.add(point, moment, tensor=kept, summary=summary, note=note)
            except Lost as error:
                run.lose(point, moment, str(error))
            except Exception as error:
                self.failed(point, error)
        self._pending.extendleft(reversed(left))

    # The end ------------------------------------------------------------------------------------

    def _finish(self, *, state: str) -> Completeness:
        if self.completeness is None:
            home = self._writer or self._memory
            assert home is not None
            if self._gathering is not None and self._gathering.is_mine:
                self._gathering.flush()
            self._devices.close()
            if self._memory is not None:
                self._settle(self._memory)
            if not self._ledger.forwards and state == "complete":
                _log.warning("no forward of %s ran while recording: %s", type(self._watched).__name__, _SILENT_BLOCK)
            if notes := self._runtime.notes(self._watched):
                home.manifest = replace(home.manifest, settings=home.manifest.settings | notes)
            self.completeness = home.close(
                state=state,
                forwards=self._ledger.forwards,
                failed=self._ledger.failed_forwards,
                points=len(self._plan.expected) + sum(map(len, self._plan.ops)),
                recomputed=self._ledger.recomputed,
                missing=self._ledger.missing(self._plan, partial(self._runtime.why_silent, self._watched)),
            )
        return self.completeness

    def _op_named(self, qualified: str) -> str | None:
        self._ledger.ran(qualified)
        return self._plan.op_named(qualified)


def _raise(error: Exception) -> None:
    raise error


def _version(tensor: torch.Tensor) -> int | None:
    """Return the version of a tensor; an inference tensor has none, so that each sight of one counts."""
    try:
        return tensor._version
    except RuntimeError:
        return None


def _default(keep: Any, statistics: Level, *, on_disk: bool) -> Wish:
    if statistics not in ("full", "moments"):
        raise ValueError(f"statistics={statistics!r} is not known; use 'full' or 'moments'.")
    if callable(keep):
        return Wish(summary=on_disk, level=statistics, function=keep)
    keep = keep or ("both" if on_disk else "tensor")
    if keep not in ("tensor", "summary", "both"):
        raise ValueError(f"keep={keep!r} is not known; use 'tensor', 'summary', 'both' or a function of a tensor.")
    return Wish(keep in ("tensor", "both"), keep in ("summary", "both"), statistics)


def _dtypes(parameters: list[torch.Tensor]) -> set[str]:
    """Return the dtypes that tensors of a model on the CPU are likely to have."""
    usual = {torch.float32, torch.bfloat16, torch.float16, torch.float64}
    found = {p.dtype for p in parameters if p.device.type == "cpu"} & usual
    return {dtype_name(dtype) for dtype in found or {torch.float32}}


def _as_result(value: Any) -> torch.Tensor:
    return value if isinstance(value, torch.Tensor) else torch.as_tensor(value)


def _listed(problems: list[Any]) -> str:
    shown = "; ".join(f"{p.point}: {p.reason}" for p in problems[:5])
    return f"{shown}; and {len(problems) - 5} more" if len(problems) > 5 else shown
