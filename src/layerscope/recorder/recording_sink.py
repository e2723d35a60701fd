"""What a runtime tells a recording: forwards that begin and end, and each tensor that passes.

    sink = RecordingSink(plan, capture, coverage, listener)
    with runtime.watch(model, plan.sides, sink): ...

One tensor's way is in `seen`: what the taps that are due want of it, what `capture.py` takes of it, where that goes.
Nothing here raises into the model's run: a failure costs its record and is listed under `missing`.
"""

from __future__ import annotations

import errno
import threading
from collections import defaultdict
from collections.abc import Callable, Mapping
from dataclasses import replace
from itertools import count
from typing import Any, Protocol

import torch

from layerscope.points import Moment, Point
from layerscope.recorder.capture import Capture, Shared
from layerscope.recorder.clock import Clock
from layerscope.recorder.coverage import Coverage
from layerscope.recorder.gpu.batches import Lost
from layerscope.recorder.pending import Pending
from layerscope.recorder.taps import Request, TapPlan, Want
from layerscope.recorder.tensors import undisturbed, unwrapped
from layerscope.runtimes.sink import Step
from layerscope.stats import Summary
from layerscope.store import MemoryRun, Writer

# Whether the user listens to tensor operations, or changes what they make.
_dispatch_modes = torch._C._len_torch_dispatch_stack
_function_modes = torch._C._len_torch_function_stack
_transform = torch._C._functorch.peek_interpreter_stack  # of vmap, grad and their kind


class Listener(Protocol):
    """A follower of a recording while it is made; its methods are called in the middle of a forward.

    One that has a method `whole(point, moment, value)` is also told each value as the module gave it, tensors first.
    """

    def wants(self) -> bool:
        """Tell whether the forward that is about to begin counts; otherwise it is neither recorded nor numbered."""

    def seen(
        self, point: Point, moment: Moment, tensor: torch.Tensor, summary: Summary | Callable[[], Summary] | None
    ) -> None:
        """Take note of a record; the tensor is the model's own, and only for now."""


class RecordingStep(Step):
    """A step with the taps that are due in it, and the copies that its points may share.

    One is made for every forward that is recorded: by hand, because a model may be waiting for Python.
    """

    __slots__ = ("due", "moments", "requests", "shared")

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
        self.shared: dict[int, Shared] = {}
        self.moments: dict[int, Moment] = {}  # of each call

    def at(self, call: int) -> Moment:
        """Return the moment of a call within the step."""
        when = self.moment
        moment = self.moments.get(call)
        if moment is None:
            moment = when if call == when.call else Moment(when.epoch, when.step, when.batch, call, when.rank)
            self.moments[call] = moment
        return moment


class RecordingSink:
    """Takes what the taps want of what a runtime sees, and hands it to the store: to `writer`, or to `memory`."""

    def __init__(self, plan: TapPlan, capture: Capture, coverage: Coverage, listener: Listener | None) -> None:
        self.clock = Clock()
        self.note: Mapping[str, Any] | None = None  # the caller's, beside every record
        self.memory: MemoryRun | None = None
        self.writer: Writer | None = None
        self.pending = Pending()
        self._plan = plan
        self._capture = capture
        self._coverage = coverage
        self._listener = listener
        self._lock = threading.RLock()  # a schedule is the user's function, which may run the model
        self._step: RecordingStep | None = None
        self._idle = RecordingStep(Moment())  # every step in which nothing is due
        self._tell_whole: Callable[[Point, Moment, object], None] | None = getattr(listener, "whole", None)
        self._whole = None if self._tell_whole is None else self._on_whole

    def begin(self) -> Step:
        """Start a step, or go on with the one the caller has named."""
        if self._listener is not None and not self._listener.wants():
            return self._idle
        moment = self.clock.begin()
        with self._lock:
            step = self._step
            if step is None or step.moment is not moment:
                step = self._step = self._begun(moment)
            self._coverage.forwards += 1
        return step

    def _begun(self, moment: Moment) -> RecordingStep:
        plan, coverage = self._plan, self._coverage
        due = plan.due(moment, coverage.unscheduled)
        if True not in due:
            self._idle.moment = moment
            return self._idle
        if due is not coverage.last:
            coverage.are_due(due)
        return RecordingStep(moment, due, plan.requests(due), self._whole)

    def end(self, step: Step, *, failed: bool) -> None:
        """Forget the tensors of the step; they are the model's again."""
        assert isinstance(step, RecordingStep)
        self._capture.end_step()
        if not step.idle:
            step.shared.clear()
            if not self._coverage.called.issuperset(step.calls):
                self._coverage.were_called(step.calls)
        if failed:
            self._coverage.forward_failed()

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
        want = request.want
        if want is None:
            self._coverage.passed(point)
            return
        try:
            transformed = _transform() is not None
            if not (want.asks_user or transformed or _dispatch_modes() or _function_modes()):
                self._keep(step, request, want, tensor, call, note)
                return
            with undisturbed():
                if transformed:
                    tensor, said = unwrapped(tensor)
                    note = {**(note or {}), **said} or None
                want = want.of(tensor.detach())
                if not want:
                    self._coverage.declined(point)
                    return
                if want.function is not None:
                    tensor = _as_tensor(want.function(tensor.detach()))
                    want = replace(want, tensor=True, function=None)
                self._keep(step, request, want, tensor, call, note)
        except Exception as error:
            self.lost(point, step.at(call), error)

    def _keep(
        self,
        step: RecordingStep,
        request: Request,
        want: Want,
        tensor: torch.Tensor,
        call: int,
        note: Mapping[str, str] | None,
    ) -> None:
        copy, blob, summary, said = self._capture.take(step.shared, tensor, want)
        if not want.summary:
            summary = None  # another point's, with whom it shares its copy
        if note or self.note:
            said = {**(self.note or {}), **(note or {}), **(said or {})}
        point, moment = request.point, step.moments.get(call) or step.at(call)
        if self._listener is not None:
            self._listener.seen(point, moment, tensor, summary)
        if self.writer is not None:
            self.writer.write(point, moment, blob=blob, summary=summary, note=said)
        elif want.tensor or self._listener is None:
            self.pending.add((point, moment, copy, summary, said))
        if not request.recorded:
            request.recorded = True
            self._coverage.recorded(point)

    def add(
        self, point: Point, moment: Moment, tensor: torch.Tensor, summary: Summary | Callable[[], Summary] | None
    ) -> None:
        """Keep a tensor that a listener held back."""
        with undisturbed():
            copy, blob, _, note = self._capture.take({}, tensor, Want(tensor=True))
        if self.writer is not None:
            self.writer.write(point, moment, blob=blob, summary=summary, note=note)
        else:
            self.pending.add((point, moment, copy, summary, note))
        self._coverage.recorded(point)

    def settle(self, *, leave: int = 0) -> None:
        """Wait for what is on its way into memory, but for that of the last `leave` steps."""
        if self.memory is not None:
            self.pending.settle(self.memory, self.lost, leave=leave)

    def _on_whole(self, step: Step, point: Point, value: object, call: int) -> None:
        assert isinstance(step, RecordingStep)
        assert self._tell_whole is not None
        with undisturbed():
            self._tell_whole(point, step.at(call), value)

    def empty(self, point: Point, *, because: str) -> None:
        """Remember why a side that was asked for has no record."""
        self._coverage.empty(point, because)

    def recomputed(self, name: str) -> None:
        """Count a repeated call."""
        self._coverage.repeated()

    def failed(self, point: Point, error: Exception) -> None:
        """List a failure under `missing`, and say it once; the model's run goes on."""
        self._coverage.failed(point, error)

    def lost(self, point: Point, moment: Moment, error: Exception) -> None:
        """Count a record that was too much, this once; any other failure is the point's."""
        if not _is_loss(error):
            self.failed(point, error)
            return
        destination = self.writer or self.memory
        assert destination is not None
        why = str(error) if isinstance(error, Lost) else f"there was no memory for it: {error}"
        destination.lose(point, moment, why)

    def op_named(self, qualified: str) -> str | None:
        """Return the name under which an operation that ran is recorded, None when no tap wants it."""
        self._coverage.ran(qualified)
        return self._plan.op_named(qualified)


def _is_loss(error: Exception) -> bool:
    """Tell whether an error is this record's alone, and not the point's."""
    if isinstance(error, (Lost, MemoryError, torch.OutOfMemoryError)):
        return True
    return "can't allocate memory" in str(error) or getattr(error, "errno", None) == errno.ENOMEM


def _as_tensor(value: Any) -> torch.Tensor:
    return value if isinstance(value, torch.Tensor) else torch.as_tensor(value)
