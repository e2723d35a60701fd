"""Record a model: a context manager that listens to a runtime and hands records to a run.

with record(model, "model.layers.*", to="runs/fp32") as rec:
    model(**inputs)
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Mapping
from contextlib import ExitStack, suppress
from dataclasses import replace
from functools import partial
from types import TracebackType
from typing import Any, Literal

import torch

from layerscope import ranks
from layerscope.errors import Incomplete, NoSuchPoint, NothingRecorded
from layerscope.log import log
from layerscope.patterns import select
from layerscope.points import Moment, Point
from layerscope.points import unwrapped as unwrapped_name
from layerscope.recorder.capture import Capture
from layerscope.recorder.clock import Clock
from layerscope.recorder.coverage import Coverage
from layerscope.recorder.provenance import provenance
from layerscope.recorder.record_options import RecordOptions
from layerscope.recorder.recording_sink import RecordingSink
from layerscope.recorder.taps import Keep, TapPlan, Want, level_of, plan, schedule_of, taps_of
from layerscope.runtimes import find, opened
from layerscope.runtimes.observer_effect import measures
from layerscope.runtimes.runtime import Runtime
from layerscope.schedules import Schedule
from layerscope.stats import Summary
from layerscope.store import Completeness, MemoryRun, Missing, Run, Writer, open_run
from layerscope.store.address import LocalFolder, folder
from layerscope.store.floors import Floors, write_floors
from layerscope.twins import Begun, beginning, measure, measure_program

_SILENT_BLOCK = (
    "it was not called (the recording's `model` is what to call), or it was called through torch.compile, "
    "where hooks added after compiling never fire"
)
_ADDED = "it came into the model while recording, and taps are resolved when the block begins: record again"


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
    floors: bool | Literal["no-weights"] = False,
    options: RecordOptions | None = None,
) -> Recording:
    """Record the tapped points of `model` until the block ends: in memory, or in the run that `to` names.

    `taps` is a pattern (`"model.layers.*"`), a list of them, a mapping alias -> pattern, or `Tap`s with wants of their
    own. `model` is a module, compiled or not, a TorchScript module, an exported program, or the path of a file that
    holds one; where it cannot itself be called, the recording's `model` is what to call.

    `keep` is `"tensor"` (the default in memory), `"both"` (the default on disk), `"summary"`, or a function of a tensor
    whose result is kept instead; it is given the live tensor, and must not change it. `when` is a schedule
    (`every(100) | first(3)`) or its text. `statistics` is `"full"`, `"moments"` (without quantiles and fingerprints),
    or `"channels"`: the full ones, and those of each channel along the last axis; `"channels(axis=1)"` is for
    convolutions. Channels are kept in memory too, beside the tensors, unless `keep` says otherwise.

    What cannot be recorded is listed under `missing` and the model's run goes on; `on_error="raise"` raises at the end
    of the block. If forwards ran and no tap that was due saw anything, the end of the block always raises.

    With `floors` the run is one that others can be judged by: when the block ends, twins of the model replay its first
    step, and what rounding does at each point is kept beside the records, with check rows of the weights ("no-weights"
    leaves those out). About eight forwards; the model, its gradients and random state are left as they are. What cannot
    be measured is said in the run, and costs it nothing. `options` are what few need: see `RecordOptions`.

    A record is the value at the moment of the hook, whatever changes the tensor afterwards and by whichever way.
    """
    if floors not in (True, False, "no-weights"):
        raise ValueError(f"floors={floors!r} is not known; use True, False or 'no-weights'.")
    if on_error not in ("record", "raise"):
        raise ValueError(f"on_error={on_error!r} is not known; use 'record' or 'raise'.")
    if append and to is None:
        raise ValueError("append=True needs `to=`: a recording in memory has nothing to append to.")
    options = options or RecordOptions()
    model = opened(model)
    runtime = find(model, measure=measures(options.observer), precise=options.precision_faithful)
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
    return Recording(
        model,
        runtime,
        planned,
        options,
        to=to,
        strict=on_error == "raise",
        append=append,
        statistics=statistics,
        floors=floors,
    )


class Recording:
    """What `record` returns. Inside the block it listens; after it, it reads back.

    `rec["model.layers.3"]` is a tensor, `rec.run` everything that was recorded, `rec.completeness` what is missing,
    `rec.model` what to call. In memory, points that saw one and the same tensor share one copy of it.
    """

    def __init__(
        self,
        model: Any,
        runtime: Runtime,
        plan: TapPlan,
        options: RecordOptions,
        *,
        to: str | os.PathLike[str] | None,
        strict: bool,
        append: bool,
        statistics: str,
        floors: bool | Literal["no-weights"],
    ) -> None:
        self.model = model
        self.to = to
        self.completeness: Completeness | None = None
        self._watched = model
        self._runtime = runtime
        self._plan = plan
        self._options = options
        self._strict = strict
        self._append = append
        self._statistics = statistics
        self._asks_floors = floors
        self._coverage = Coverage()
        self._capture = Capture(in_memory=to is None, budget=options.budget)
        self._sink = RecordingSink(plan, self._capture, self._coverage, options.listener)
        self._stack = ExitStack()
        self._process = os.getpid()
        self._known = _names(model)
        self._first: Begun | None = None
        self._floors: Floors | None = None

    # The block ----------------------------------------------------------------------------------

    def __enter__(self) -> Recording:
        sink, options = self._sink, self._options
        if self._destination is not None:
            raise RuntimeError("a recording is entered once; call record() again for another one.")
        rank = ranks.rank() if options.rank is None else options.rank
        kernels = self._capture.prepare(self._runtime.parameters(self._watched), self._plan)
        manifest = provenance(
            self._watched,
            self._runtime,
            self._plan,
            options,
            statistics=self._statistics,
            kernels=kernels,
            on_disk=self.to is not None,
        )
        if self.to is None:
            sink.memory = MemoryRun(manifest)
            sink.clock = Clock(rank=rank)
        else:
            sink.writer = Writer(self.to, manifest, rank=rank, append=self._append, budget=options.budget)
            sink.clock = Clock(rank=rank, step=sink.writer.next_step)
        try:
            # Hooks hold the sink, and not the recording, which may be let go of: see `__del__`.
            ops = sink.op_named if any(self._plan.ops) else None
            watch = self._runtime.watch(self._watched, self._plan.sides, sink, ops=ops)
            self.model = self._stack.enter_context(watch)
            if self._asks_floors:
                self._first = self._stack.enter_context(beginning(self._watched))
                if self._first is None and not isinstance(self.model, torch.nn.Module):
                    self._first = Begun(torch.nn.Module())
                    self.model = self._first.calling(self.model)
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
            if self._strict:
                raise Incomplete(f"the run at {self.to} is {done.state}: the disk did not take everything in time.")
        coverage = self._coverage
        if coverage.any_due and not (coverage.any_recorded or coverage.any_declined):
            raise NothingRecorded(
                f"{coverage.forwards} forward{'s' if coverage.forwards > 1 else ''} ran and no tap saw a tensor: "
                f"{_listed(done.missing)}. `layerscope points MODEL` lists what can be tapped."
            )
        if self._strict and (done.missing or done.dropped):
            lost = [*done.missing, *done.dropped]
            raise Incomplete(f"not everything asked for was recorded: {_listed(lost)}.")

    def __del__(self) -> None:
        """Take the hooks off the model when the recording is garbage, and say that it was never ended."""
        with suppress(Exception):
            if (
                self._destination is not None
                and not self._options.owned
                and self.completeness is None
                and self._process == os.getpid()
                and not sys.is_finalizing()
            ):
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
        self._sink.note = note
        self._sink.clock.set(epoch=epoch, step=step, batch=batch)

    def flush(self) -> None:
        """Wait until everything recorded so far is safe: on disk and acknowledged, or arrived in memory."""
        if self._sink.writer is not None:
            self._sink.writer.flush()
        self._sink.settle()

    def take(self, *, leave: int = 0) -> MemoryRun:
        """Return what was recorded in memory until now as a run of its own, and let go of it.

        Called after each step, this keeps a long recording's memory at a few steps. The copies of the last step may
        still be on their way from a device: `leave=1` leaves that step for the next call, and does not wait for it.
        """
        if not isinstance(leave, int) or isinstance(leave, bool) or leave < 0:
            raise ValueError(f"leave={leave!r} is not a number of steps; give how many of the last to leave.")
        run = self._sink.memory
        if run is None:
            raise RuntimeError("there is nothing to take: the recording is not in memory, or has not begun.")
        self._sink.settle(leave=leave)
        self._sink.memory = run.following()
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
        self._sink.add(point, moment, tensor, summary)

    # Reading back -------------------------------------------------------------------------------

    def __getitem__(self, name: str) -> torch.Tensor:
        return self.run.tensor(name)

    def _repr_html_(self) -> str:
        if self._destination is None:
            return "<p>nothing is recorded before the block begins</p>"
        return self.run._repr_html_()

    @property
    def run(self) -> Run | MemoryRun:
        """What has been recorded so far, with the verbs of an opened run."""
        if self._destination is None:
            raise RuntimeError("nothing is recorded before the block begins: `with record(...) as rec:`.")
        self.flush()
        memory = self._sink.memory
        if memory is not None:
            memory._floors = self._floors
            return memory
        return open_run(self.to)  # type: ignore[arg-type]

    @property
    def missing(self) -> list[Missing]:
        """What was asked for and has no record, with the reason; known once the block has ended."""
        return [] if self.completeness is None else list(self.completeness.missing)

    # The end ------------------------------------------------------------------------------------

    @property
    def _destination(self) -> Writer | MemoryRun | None:
        """Where records go, once the block has begun."""
        return self._sink.memory if self._sink.writer is None else self._sink.writer

    @property
    def _remote(self) -> bool:
        """Whether the run can be read only once it is closed."""
        return self.to is not None and not isinstance(folder(self.to), LocalFolder)

    def _measure_floors(self) -> None:
        """Measure what others are judged by; what goes wrong is said in the run, which is as good without."""
        if not self._asks_floors or not self._coverage.any_recorded:
            return
        destination = self._destination
        assert destination is not None
        try:
            if self._first is None:
                way = "ls.measure_floors(model, inputs, run) measures those of its own arithmetic"
                floors = Floors(left_out=(f"{self._runtime.NAME} is not asked what it was given; {way}",))
            elif isinstance(self._watched, torch.nn.Module):
                weights = self._asks_floors is True
                floors = measure(self._first, self.run, weights=weights, progress=self._options.progress)
            else:
                given = self._first.args, self._first.kwargs
                floors = measure_program(self._watched, *given, self.run, self._options.progress)
            if self.to is None:
                self._floors = floors
            else:
                write_floors(self.to, floors)
        except Exception as error:
            floors = Floors(left_out=(f"{type(error).__name__}: {error}",))
        if not floors.points:
            log.warning("floors were not measured: %s", "; ".join(floors.left_out))
        _add_settings(destination, {"floors": floors.sentences()})

    def _finish(self, *, state: str) -> Completeness:
        if self.completeness is None:
            destination = self._destination
            assert destination is not None
            self._capture.close()
            self._sink.settle()
            if not self._coverage.forwards and state == "complete":
                log.warning("no forward of %s ran while recording: %s", type(self._watched).__name__, _SILENT_BLOCK)
            if notes := self._runtime.notes(self._watched):
                _add_settings(destination, notes)
            self.completeness = destination.close(
                state=state,
                forwards=self._coverage.forwards,
                failed=self._coverage.failed_forwards,
                points=len(self._plan.expected) + sum(map(len, self._plan.ops)),
                recomputed=self._coverage.recomputed,
                missing=[
                    *self._coverage.missing(self._plan, partial(self._runtime.why_silent, self._watched)),
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


def _add_settings(destination: Writer | MemoryRun, said: Mapping[str, Any]) -> None:
    """Have the run say more of how it was made."""
    destination.manifest = replace(destination.manifest, settings={**destination.manifest.settings, **said})


def _default(keep: Any, statistics: str, *, on_disk: bool) -> Want:
    level, axis = level_of(statistics)
    if callable(keep):
        return Want(summary=on_disk, level=level, function=keep, axis=axis)
    keep = keep or ("both" if on_disk or axis is not None else "tensor")
    if keep not in ("tensor", "summary", "both"):
        raise ValueError(f"keep={keep!r} is not known; use 'tensor', 'summary', 'both' or a function of a tensor.")
    return Want(keep in ("tensor", "both"), keep in ("summary", "both"), level, axis=axis)


def _names(model: Any) -> set[str]:
    """Return the names of the modules of a model, where it is made of them."""
    return {unwrapped_name(name) for name, _ in model.named_modules()} if isinstance(model, torch.nn.Module) else set()


def _listed(problems: list[Any]) -> str:
    shown = "; ".join(f"{p.point}: {p.reason}" for p in problems[:5])
    return f"{shown}; and {len(problems) - 5} more" if len(problems) > 5 else shown
