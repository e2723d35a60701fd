"""The recording itself: a context manager that listens to a runtime and hands records to a run.

with record(model, "model.layers.*", to="runs/fp32") as rec:
    model(**inputs)
"""

from __future__ import annotations

import errno
import os
import sys
import threading
import weakref
from collections import defaultdict, deque
from collections.abc import Callable, Mapping
from contextlib import ExitStack, suppress
from dataclasses import replace
from functools import partial
from itertools import count
from types import TracebackType
from typing import Any, Literal, NamedTuple, Protocol

import torch

from layerscope import ranks
from layerscope.errors import Incomplete, NoSuchPoint, NothingRecorded
from layerscope.log import log
from layerscope.patterns import select
from layerscope.points import Moment, Point
from layerscope.points import unwrapped as unwrapped_name
from layerscope.recorder.about import about
from layerscope.recorder.cargo import Lost
from layerscope.recorder.cargo import leave as send_off
from layerscope.recorder.clock import Clock
from layerscope.recorder.copying import undisturbed, unwrapped
from layerscope.recorder.ledger import Ledger
from layerscope.recorder.taking import Look, Taking
from layerscope.recorder.taps import Keep, Plan, Request, Wish, level_of, plan, schedule_of, taps_of
from layerscope.runtimes import find, opened
from layerscope.runtimes.observing import measures
from layerscope.runtimes.runtime import Runtime
from layerscope.runtimes.sink import Step
from layerscope.schedules import Schedule
from layerscope.stats import Summary
from layerscope.store import Completeness, MemoryRun, Missing, Run, Writer, open_run
from layerscope.store.address import LocalFolder, folder
from layerscope.store.floors import Floors, write_floors
from layerscope.twins import Begun, beginning, measure

__all__ = ["Listener", "Recording", "record"]

# Whether somebody listens to tensor operations, or changes what they make.
_dispatch_modes = torch._C._len_torch_dispatch_stack
_function_modes = torch._C._len_torch_function_stack
_inference_mode = torch.is_inference_mode_enabled
_transform = torch._C._functorch.peek_interpreter_stack  # of vmap, grad and their kind

_BUDGET = 512 << 20
_SILENT_BLOCK = (
    "it was not called (the recording's `model` is what to call), or it was called through torch.compile, "
    "where hooks added after compiling never fire"
)
_ADDED = "it came into the model while recording, and taps are resolved when the block begins: record again"

# A record on its way into a run in memory; copy and summary may still have to arrive from a device.
_Copy = Callable[[], torch.Tensor]
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
    statistics: str = "full",
    name: str | None = None,
    mode: str | None = None,
    weights: bool | None = None,
    settings: Mapping[str, Any] | None = None,
    observer: Literal["measure", "skip"] = "measure",
    precision_faithful: bool = False,
    budget: int = _BUDGET,
    rank: int | None = None,
    listener: Listener | None = None,
    floors: bool | Literal["no-weights"] = False,
    tell: Callable[[str, int, int], None] | None = None,
) -> Recording:
    """Record the tapped points of `model` until the block ends: in memory, or in the run that `to` names.

    `taps` is a pattern (`"model.layers.*"`), a list of them, a mapping alias -> pattern, or `Tap`s with wishes of their
    own. `model` is a module, compiled or not, a TorchScript module, an exported program, or the path of a file that
    holds one; where it cannot itself be called, the recording's `model` is what to call.

    `keep` is `"tensor"` (the default in memory), `"both"` (the default on disk), `"summary"`, or a function of a tensor
    whose result is kept instead; it is given the live tensor, and must not change it. `when` is a schedule
    (`every(100) | first(3)`) or its text. `statistics` is `"full"`, `"moments"` (without quantiles and fingerprints),
    or `"channels"`: the full ones, and those of each channel along the last axis; `"channels(axis=1)"` is for
    convolutions. Channels are kept in memory too, beside the tensors, unless `keep` says otherwise.

    What cannot be recorded is listed under `missing` and the model's run goes on; `on_error="raise"` raises at the end
    of the block. If forwards ran and no tap that was due saw anything, the end of the block always raises. `name`,
    `mode` and `settings` (plain values) are what the run says of its model and of how it ran. `weights` asks for the
    fingerprints of the model's parameters (by default for runs on disk of models up to 8 GiB); `budget` bounds the
    bytes that wait for the disk. `rank` is whose records these are, where one process holds those of several; else the
    launcher says it. A `listener` is told each record as it is made; in memory, summaries alone are then
    not kept.

    Taps can change what a compiler fuses, and so the output. Of a model that torch.compile runs, the first forward that
    is recorded is run untapped as well, once, and leaves no trace but the difference in the run's settings;
    `observer="skip"` does not. `precision_faithful` has Inductor round where the source does while it is recorded, so
    that taps change nothing: slower, and to other bits than the plain compiled model's.

    With `floors` the run is one that others can be judged by: when the block ends, twins of the model replay its first
    step, and what rounding does at each point is kept beside the records, with check rows of the weights ("no-weights"
    leaves those out). About eight forwards; the model, its gradients and random state are left as they are. `tell` is
    told how far that is. What cannot be measured is said in the run, and costs it nothing.

    A record is the value at the moment of the hook, whatever changes the tensor afterwards and by whichever way.
    """
    if floors not in (True, False, "no-weights"):
        raise ValueError(f"floors={floors!r} is not known; use True, False or 'no-weights'.")
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
    told = _Settings(
        to, on_error == "raise", append, statistics, name, mode, weights, settings or {}, budget, rank, floors, tell
    )
    return Recording(model, runtime, planned, told, listener)


def _modes() -> bool:
    return bool(_dispatch_modes() or _function_modes())


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
    statistics: str
    name: str | None
    mode: str | None
    weights: bool | None
    settings: Mapping[str, Any]
    budget: int
    rank: int | None
    floors: bool | Literal["no-weights"]
    tell: Callable[[str, int, int], None] | None


class _Step(Step):
    """A step with the taps that are due in it, and the tensors already looked at.

    One is made for every forward that is recorded: by hand, because a model may be waiting for Python.
    """

    __slots__ = ("due", "looks", "moments", "requests")

    def __init__(
        self,
        moment: Moment,
        due: tuple[bool, ...] = (),
        requests: dict[int, Request] | None = None,
        whole: Callable[[Step, Point, object, int], None] | None = None,
    ) -> None:
        self.moment = moment
        self.idle = True not in due
        self.calls = defaultdict(count)
        self.whole = whole
        self.due = due
        self.requests = {} if requests is None else requests
        self.looks: dict[int, Look] = {}
        self.moments: dict[int, Moment] = {}  # of each call

    def at(self, call: int) -> Moment:
        """Return the moment of a call within the step."""
        when = self.moment
        moment = self.moments.get(call)
        if moment is None:
            moment = when if call == when.call else Moment(when.epoch, when.step, when.batch, call, when.rank)
            self.moments[call] = moment
        return moment


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
        self._lock = threading.RLock()  # a schedule is somebody's function, which may run the model
        self._step: _Step | None = None
        self._idle = _Step(Moment())  # every step in which nothing is due
        self._pending: deque[_Waiting] = deque()
        self._taking = Taking(in_memory=self.to is None, budget=settings.budget)
        self._staging = self._taking.staging
        self._stages = self.to is None and listener is None
        self._clock = Clock()
        self._note: Mapping[str, Any] | None = None
        self._tell_whole: Callable[[Point, Moment, object], None] | None = getattr(listener, "whole", None)
        self._whole = None if self._tell_whole is None else self._on_whole
        self._memory: MemoryRun | None = None
        self._writer: Writer | None = None
        self._stack = ExitStack()
        self._process = os.getpid()
        self._known = _names(model)
        self._first: Begun | None = None
        self._floors: Floors | None = None
        self.completeness: Completeness | None = None

    # The block ----------------------------------------------------------------------------------

    def __enter__(self) -> Recording:
        if self._memory is not None or self._writer is not None:
            raise RuntimeError("a recording is entered once; call record() again for another one.")
        settings = self._settings
        rank = ranks.rank() if settings.rank is None else settings.rank
        kernels = self._taking.prepare(self._runtime.parameters(self._watched), self._plan)
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
        listening = weakref.proxy(self)  # the model's hooks do not keep a recording that nobody holds any more
        ops = partial(_op_named, listening) if any(self._plan.ops) else None
        try:
            watch = self._runtime.watch(self._watched, self._plan.sides, listening, ops=ops)
            self.model = self._stack.enter_context(watch)
            if settings.floors:
                self._first = self._stack.enter_context(beginning(self._watched))
        except BaseException:
            self._finish(state="interrupted")
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            self._stack.close()
            if error is None and not self._remote:
                self._measure_floors()
        finally:
            done = self._finish(state="complete" if error is None else "interrupted")
        if error is not None:
            return
        if self._remote:
            self._measure_floors()
        if done.state != "complete":
            log.error(
                "the run at %s is %s, not complete: `layerscope recover` seals what is there", self.to, done.state
            )
            if self._settings.strict:
                raise Incomplete(f"the run at {self.to} is {done.state}: the disk did not take everything in time.")
        ledger = self._ledger
        if ledger.any_due and not (ledger.any_recorded or ledger.any_declined):
            raise NothingRecorded(
                f"{ledger.forwards} forward{'s' if ledger.forwards > 1 else ''} ran and no tap saw a tensor: "
                f"{_listed(done.missing)}. `layerscope points MODEL` lists what can be tapped."
            )
        if self._settings.strict and (done.missing or done.dropped):
            lost = [*done.missing, *done.dropped]
            raise Incomplete(f"not everything asked for was recorded: {_listed(lost)}.")

    def __del__(self) -> None:
        """Take the hooks off the model when nobody holds the recording any more, and say that it was never ended."""
        with suppress(Exception):
            begun = self._writer is not None or self._memory is not None
            if begun and self.completeness is None and self._process == os.getpid() and not sys.is_finalizing():
                self._stack.close()
                self._finish(state="interrupted")
                log.warning("a recording of %s was let go before its block ended", type(self._watched).__name__)

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
        still be on their way from a device: `leave=1` leaves that step for the next call, and does not wait for it.
        """
        if not isinstance(leave, int) or isinstance(leave, bool) or leave < 0:
            raise ValueError(f"leave={leave!r} is not a number of steps; give how many of the last to leave.")
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
        with undisturbed():
            look = self._taking.look({}, tensor, Wish(tensor=True))
        if self._writer is not None:
            self._writer.write(point, moment, blob=look.blob, summary=summary, note=look.note)
        else:
            self._pending.append((point, moment, look.copy, summary, look.note))
        self._ledger.recorded(point)

    # Reading back -------------------------------------------------------------------------------

    def __getitem__(self, name: str) -> torch.Tensor:
        return self.run.tensor(name)

    def _repr_html_(self) -> str:
        if self._memory is None and self._writer is None:
            return "<p>nothing is recorded before the block begins</p>"
        return self.run._repr_html_()

    @property
    def run(self) -> Run | MemoryRun:
        """What has been recorded so far, with the verbs of an opened run."""
        if self._memory is None and self._writer is None:
            raise RuntimeError("nothing is recorded before the block begins: `with record(...) as rec:`.")
        self.flush()
        if self._memory is not None:
            self._memory._floors = self._floors
            return self._memory
        return open_run(self.to)  # type: ignore[arg-type]

    @property
    def missing(self) -> list[Missing]:
        """What was asked for and has no record, with the reason; known once the block has ended."""
        return [] if self.completeness is None else list(self.completeness.missing)

    # What the runtime tells (the sink) ----------------------------------------------------------

    def begin(self) -> Step:
        """Start a step, or go on with the one the caller has named."""
        if self._listener is not None and not self._listener.wants():
            return self._idle
        moment = self._clock.begin()
        with self._lock:
            step = self._step
            if step is None or step.moment is not moment:
                step = self._step = self._begun(moment)
            self._ledger.forwards += 1
        return step

    def _begun(self, moment: Moment) -> _Step:
        plan, ledger = self._plan, self._ledger
        due = plan.due(moment, ledger.unscheduled)
        if True not in due:
            self._idle.moment = moment
            return self._idle
        if due is not ledger.last:
            ledger.are_due(due)
        return _Step(moment, due, plan.requests(due), self._whole)

    def end(self, step: Step, *, failed: bool) -> None:
        """Forget the tensors of the step; they are the model's again."""
        assert isinstance(step, _Step)
        self._taking.end()
        if not step.idle:
            step.looks.clear()
            if not self._ledger.called.issuperset(step.calls):
                self._ledger.were_called(step.calls)
        if failed:
            self._ledger.forward_failed()

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
        wish = request.wish
        if wish is None:
            self._ledger.passed(point)
            return
        try:
            if wish.conditional:
                with undisturbed():
                    wish = wish.of(tensor.detach())
                    if wish:
                        self._keep(step, request, wish, tensor, call, note)
                    else:
                        self._ledger.declined(point)
                return
            if self._stages and tensor.is_cuda and wish.function is None and not (note or self._note or _modes()):
                staged = self._staging.stage(tensor, wish)
                if staged is not None:  # the shortest way, where a model may be waiting for Python
                    moment = step.moments.get(call) or step.at(call)
                    self._pending.append(
                        (
                            point,
                            moment,
                            staged.tensor if wish.tensor else None,
                            staged.summary if wish.summary else None,
                            None,
                        )
                    )
                    if not request.recorded:
                        request.recorded = True
                        self._ledger.recorded(point)
                    return
            if _transform() is not None:
                with undisturbed():
                    tensor, said = unwrapped(tensor)
                    self._keep(step, request, wish, tensor, call, {**(note or {}), **said} or None)
            elif _modes() or _inference_mode():
                with undisturbed():
                    self._keep(step, request, wish, tensor, call, note)
            else:
                self._keep(step, request, wish, tensor, call, note)
        except Exception as error:
            if _is_loss(error):
                self._lose(point, step.at(call), error)
            else:
                self.failed(point, error)

    def _lose(self, point: Point, moment: Moment, error: Exception) -> None:
        home = self._writer or self._memory
        assert home is not None
        home.lose(point, moment, str(error) if isinstance(error, Lost) else f"there was no memory for it: {error}")

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
            wish = Wish(True, wish.summary, wish.level, axis=wish.axis)
        look = self._taking.look(step.looks, tensor, wish)
        point, moment = request.point, step.moments.get(call) or step.at(call)
        summary = look.summary if wish.summary else None
        said: Mapping[str, Any] | None = look.note
        if note or self._note:
            said = {**(self._note or {}), **(note or {}), **(look.note or {})}
        if self._listener is not None:
            self._listener.seen(point, moment, tensor, summary)
        if self._writer is not None:
            self._writer.write(point, moment, blob=look.blob, summary=summary, note=said)
        elif wish.tensor or self._listener is None:
            self._pending.append((point, moment, look.copy if wish.tensor else None, summary, said))
        if not request.recorded:
            request.recorded = True
            self._ledger.recorded(point)

    def _settle(self, run: MemoryRun, *, leave: int = 0) -> None:
        """Move what waits into a run, but for the last steps; copies from a device have then arrived."""
        waiting: deque[_Waiting] = deque()
        with suppress(IndexError):  # another thread may be settling too
            for _ in range(len(self._pending)):
                waiting.append(self._pending.popleft())
        left: list[_Waiting] = []
        steps = list(dict.fromkeys(_step_of(one[1]) for one in waiting))
        last = set(steps[-leave:]) if leave else set()
        try:
            while waiting:
                one = waiting[0]
                if _step_of(one[1]) in last:
                    left.append(waiting.popleft())
                    with suppress(Exception):  # whoever waits for it is told
                        for part in (one[2], one[3]):
                            send_off(part)  # so that nobody waits for a later step to have this one
                else:
                    self._settle_one(run, one)
                    waiting.popleft()
        finally:  # an interrupt while a copy is waited for loses nothing
            self._pending.extendleft(reversed([*left, *waiting]))

    def _settle_one(self, run: MemoryRun, one: _Waiting) -> None:
        point, moment, copy, summary, note = one
        try:
            kept = None if copy is None else copy()
            if callable(summary):
                summary = summary()
            run.add(point, moment, tensor=kept, summary=summary, note=note)
        except Exception as error:
            if _is_loss(error):
                self._lose(point, moment, error)
            else:
                self.failed(point, error)

    # The end ------------------------------------------------------------------------------------

    @property
    def _remote(self) -> bool:
        """Whether the run can be read only once it is closed."""
        return self.to is not None and not isinstance(folder(self.to), LocalFolder)

    def _measure_floors(self) -> None:
        """Measure what others are judged by; what goes wrong is said in the run, which is as good without."""
        settings = self._settings
        if not settings.floors or not self._ledger.any_recorded:
            return
        home = self._writer or self._memory
        assert home is not None
        try:
            if self._first is None:
                floors = Floors(left_out=(f"{self._runtime.NAME} runs no twins; its eager source does",))
            else:
                floors = measure(self._first, self.run, weights=settings.floors is True, tell=settings.tell)
            if self.to is None:
                self._floors = floors
            else:
                write_floors(self.to, floors)
        except Exception as error:
            floors = Floors(left_out=(f"{type(error).__name__}: {error}",))
        if not floors.points:
            log.warning("floors were not measured: %s", "; ".join(floors.left_out))
        home.manifest = replace(home.manifest, settings=home.manifest.settings | {"floors": floors.sentences()})

    def _finish(self, *, state: str) -> Completeness:
        if self.completeness is None:
            home = self._writer or self._memory
            assert home is not None
            self._taking.close()
            if self._memory is not None:
                self._settle(self._memory)
            if not self._ledger.forwards and state == "complete":
                log.warning("no forward of %s ran while recording: %s", type(self._watched).__name__, _SILENT_BLOCK)
            if notes := self._runtime.notes(self._watched):
                home.manifest = replace(home.manifest, settings=home.manifest.settings | notes)
            self.completeness = home.close(
                state=state,
                forwards=self._ledger.forwards,
                failed=self._ledger.failed_forwards,
                points=len(self._plan.expected) + sum(map(len, self._plan.ops)),
                recomputed=self._ledger.recomputed,
                missing=[
                    *self._ledger.missing(self._plan, partial(self._runtime.why_silent, self._watched)),
                    *self._added(),
                ],
            )
        return self.completeness

    def _added(self) -> list[Missing]:
        """List what the taps name of the model as it is now, and of what was no part of it when the block began."""
        new = _names(self._watched) - self._known
        if not new:
            return []
        places = self._runtime.points(self._watched)
        found: dict[Point, None] = {}
        for tap in self._plan.taps:
            with suppress(NoSuchPoint):
                found.update(dict.fromkeys(select(tap.patterns, places)))
        return [Missing(str(point), _ADDED) for point in found if point.name in new]


def _op_named(recording: Recording, qualified: str) -> str | None:
    recording._ledger.ran(qualified)
    return recording._plan.op_named(qualified)


def _step_of(moment: Moment) -> tuple[int | None, int, int]:
    return moment.epoch, moment.step, moment.batch


def _default(keep: Any, statistics: str, *, on_disk: bool) -> Wish:
    level, axis = level_of(statistics)
    if callable(keep):
        return Wish(summary=on_disk, level=level, function=keep, axis=axis)
    keep = keep or ("both" if on_disk or axis is not None else "tensor")
    if keep not in ("tensor", "summary", "both"):
        raise ValueError(f"keep={keep!r} is not known; use 'tensor', 'summary', 'both' or a function of a tensor.")
    return Wish(keep in ("tensor", "both"), keep in ("summary", "both"), level, axis=axis)


def _names(model: Any) -> set[str]:
    """Return the names of the modules of a model, where it is made of them."""
    return {unwrapped_name(name) for name, _ in model.named_modules()} if isinstance(model, torch.nn.Module) else set()


def _is_loss(error: Exception) -> bool:
    """Tell whether an error is this record's alone, and not the point's: it was too much, this once."""
    if isinstance(error, (Lost, MemoryError, torch.OutOfMemoryError)):
        return True
    return "can't allocate memory" in str(error) or getattr(error, "errno", None) == errno.ENOMEM


def _as_result(value: Any) -> torch.Tensor:
    return value if isinstance(value, torch.Tensor) else torch.as_tensor(value)


def _listed(problems: list[Any]) -> str:
    shown = "; ".join(f"{p.point}: {p.reason}" for p in problems[:5])
    return f"{shown}; and {len(problems) - 5} more" if len(problems) > 5 else shown
