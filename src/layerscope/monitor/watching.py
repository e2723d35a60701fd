"""Watch a model train: the statistics of every layer, step by step, with rules that say when something is wrong.

    with watch(model, optimizer, rules=[nonfinite(action="stop"), exploding()]) as watching:
        for epoch in range(epochs):
            watching.moment(epoch=epoch)
            train(model, optimizer)
    watching.alarms

It is a listener of `record` and keeps nothing but the frame under way: what is to stay goes to `sinks`, or to the run
that `to` names.
"""

from __future__ import annotations

import copy
import logging
import os
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import replace
from operator import index
from types import TracebackType
from typing import Any, TypeVar

import torch

from layerscope import ranks
from layerscope.errors import NothingRecorded, Stopped, Unsupported
from layerscope.monitor.frames import Frame, Gathering, Sink
from layerscope.monitor.updates import Updates
from layerscope.patterns import Pattern, select
from layerscope.points import Moment, Point, Side
from layerscope.recorder import Recording, Tap, record
from layerscope.recorder.taps import Level, schedule_of
from layerscope.rules import Alarm, Rule, parse_rule
from layerscope.runtimes import eager
from layerscope.schedules import ALWAYS, Schedule, when
from layerscope.schedules import every as every_nth
from layerscope.stats import Summary
from layerscope.store import MemoryRun, Run

__all__ = ["Watch", "watch"]

_log = logging.getLogger("layerscope")

_T = TypeVar("_T")

_SNAPSHOTS = 3  # of each rule: one holds every tapped tensor of a step


def watch(
    model: torch.nn.Module,
    optimizer: torch.optim.Optimizer | None = None,
    *,
    to: str | os.PathLike[str] | None = None,
    every: int | Schedule | str = 1,
    taps: str | Sequence[str] = "**",
    statistics: Level = "moments",
    gradients: bool = False,
    parameters: bool = False,
    attention: str | Sequence[str] | Tap = (),
    rules: Sequence[Rule | str] = (),
    sinks: Sequence[Sink] = (),
    on_alarm: Callable[[Alarm], None] | None = None,
) -> Watch:
    """Watch `model` until the block ends: a frame of readings every `every` steps, for the rules and the sinks.

    With an `optimizer`, a step is one of its steps, whatever the number of forwards it takes, and evaluation (eval mode
    without gradients) is passed over; a step that a gradient scaler leaves out becomes part of the next. Without one,
    every forward is a step, whose frame is whole when the next begins.

    `taps` are patterns; `statistics="full"` adds histograms. `gradients` adds the gradients of the tapped outputs;
    `parameters` adds, for each trainable parameter, its gradient and its update-to-weight ratio, for a copy of the
    parameters during the optimizer's step. `attention` names attention modules that return their weights beside their
    output (`nn.MultiheadAttention` called with `need_weights`, transformers with eager attention): the maps of the
    first sample go to the sinks, whole ones to the run; a `Tap` gives them a schedule of their own. A rule turns on
    what it needs.

    Every alarm is logged and handed to the sinks and to `on_alarm`, once for each rule and place, then counted. An
    alarm that asks for a snapshot has the tensors of the *next* step recorded, in the run (at most three times for a
    rule): those of its own step are gone by the time the rule has looked. One that says stop raises `Stopped` out of
    `optimizer.step()`; without an optimizer, out of `moment`, `flush` or the end of the block.

    With `to`, the statistics, the attention maps and the snapshots are recorded on disk; without it, the snapshots
    alone, in memory. Nothing of this changes a result or, unless a rule says stop, ends the training.
    """
    wanted = [copy.deepcopy(parse_rule(rule) if isinstance(rule, str) else rule) for rule in rules]
    needs = frozenset().union(*(rule.needs for rule in wanted))
    if optimizer is None and (parameters or "parameters" in needs):
        who = next((f"the rule {rule.name}" for rule in wanted if "parameters" in rule.needs), "parameters=True")
        raise ValueError(
            f"{who} needs the optimizer, around whose steps parameters are looked at: watch(model, optimizer)."
        )
    return Watch(
        model,
        None if optimizer is None else _innermost(optimizer),
        to=to,
        schedule=every_nth(every) if isinstance(every, int) else schedule_of(every),
        patterns=(taps,) if isinstance(taps, str) else tuple(taps),
        statistics=statistics,
        gradients=gradients or "gradients" in needs,
        inputs="inputs" in needs,
        units="units" in needs,
        parameters=parameters or "parameters" in needs,
        attention=_maps((attention,) if isinstance(attention, str) else attention),
        rules=wanted,
        sinks=tuple(sinks),
        on_alarm=on_alarm,
    )


class Watch:
    """What `watch` returns: a context manager that looks on.

    `alarms` has the first alarm of each rule and place, in order, and `counts` how often each came; `run` is what was
    recorded.
    """

    def __init__(
        self,
        model: torch.nn.Module,
        optimizer: torch.optim.Optimizer | None,
        *,
        to: str | os.PathLike[str] | None,
        schedule: Schedule | None,
        patterns: tuple[str, ...],
        statistics: Level,
        gradients: bool,
        inputs: bool,
        units: bool,
        parameters: bool,
        attention: Tap | None,
        rules: Sequence[Rule],
        sinks: Sequence[Sink],
        on_alarm: Callable[[Alarm], None] | None,
    ) -> None:
        self.alarms: list[Alarm] = []
        self.counts: Counter[tuple[str, str]] = Counter()
        self._model = model
        self._optimizer = optimizer
        self._schedule = schedule = ALWAYS if schedule is None else schedule
        self._rules = rules
        self._sinks = sinks
        self._on_alarm = on_alarm
        self._updates = Updates(model, level=statistics) if parameters else None
        self._moment = Moment(rank=ranks.rank())
        self._snapshots: Counter[str] = Counter()
        self._snapshot = False
        self._stop: Alarm | None = None
        self._failures: Counter[str] = Counter()
        self._stack = ExitStack()
        maps = attention
        looks = [Tap(patterns, "summary", schedule)]
        if gradients:
            looks.append(Tap(_sides(patterns, "grad_output"), "summary", schedule))
        if inputs:
            looks.append(Tap(_sides(patterns, "input"), "summary", schedule))
        if maps is not None:
            maps = replace(
                maps, when=schedule if maps.when is None else maps.when, keep="summary" if to is None else "both"
            )
            looks.append(maps)
        if any(rule.action == "snapshot" for rule in rules):
            whole = tuple(pattern for look in looks if look is not maps for pattern in look.patterns)
            looks.append(Tap(whole, "tensor", when(self._snapshot_due, name="snapshot")))
        images = set() if maps is None else _points(maps, model)
        self._maps = frozenset(map(str, images))
        self._gathering = Gathering(
            ended=self._look,
            units=units,
            images=images,
            look=None if maps is None else maps.schedule,
            bounds=_bounds(model),
        )
        self._recording = record(model, looks, to=to, keep="summary", statistics=statistics, listener=self)

    # The block ----------------------------------------------------------------------------------

    def __enter__(self) -> Watch:
        self._stack.enter_context(self._recording)
        if self._optimizer is not None:
            self._stack.callback(self._optimizer.register_step_pre_hook(self._before_step).remove)
            self._stack.callback(self._optimizer.register_step_post_hook(self._after_step).remove)
            self._name(self._moment)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._quietly("the end of a step", self._end_frame)
        if self._updates is not None:
            self._quietly("looking at the parameters", self._updates.close)
        for sink in self._sinks:
            self._quietly(f"{type(sink).__name__}.close", sink.close)
        try:
            self._stack.__exit__(kind, error, trace)
        except NothingRecorded as nothing:
            _log.warning("nothing was watched: %s", nothing)
        for missing in self._recording.missing:
            if missing.point in self._maps:
                _log.warning("no attention map came from %s: %s", missing.point, missing.reason)
        if error is None:
            self._raise_if_stopped()

    def moment(self, *, epoch: int | None = None, step: int | None = None, batch: int | None = None) -> None:
        """Name the moment of what comes next; with an optimizer, steps and batches go on counting from there."""
        if self._optimizer is None:
            self._recording.moment(epoch=epoch, step=step, batch=batch)
        else:
            now = self._moment
            anew = epoch is not None and epoch != now.epoch
            self._name(
                replace(
                    now,
                    epoch=now.epoch if epoch is None else index(epoch),
                    step=now.step if step is None else index(step),
                    batch=(0 if anew else now.batch) if batch is None else index(batch),
                )
            )
        self._raise_if_stopped()

    def flush(self) -> None:
        """Take the step under way for whole, and wait until everything recorded is safe."""
        self._end_frame()
        self._recording.flush()
        self._raise_if_stopped()

    @property
    def run(self) -> Run | MemoryRun:
        """What was recorded: statistics, maps and snapshots in the run that `to` named; in memory, snapshots."""
        return self._recording.run

    @property
    def recording(self) -> Recording:
        """The recording underneath, which knows what is missing and why."""
        return self._recording

    # What the recording tells (the listener) ----------------------------------------------------

    def wants(self) -> bool:
        """Pass over evaluation, when there is an optimizer to tell training from it."""
        return self._optimizer is None or self._model.training or torch.is_grad_enabled()

    def seen(
        self, point: Point, moment: Moment, tensor: torch.Tensor, summary: Summary | Callable[[], Summary] | None
    ) -> None:
        """Add a record to the frame under way."""
        self._gathering.seen(point, moment, tensor, summary)

    # What the optimizer tells -------------------------------------------------------------------

    def _before_step(self, *_: object) -> None:
        if self._updates is not None:
            self._updates.forget()
            if self._quietly("the schedule", self._schedule, self._moment):
                self._quietly("looking at the parameters", self._updates.before)

    def _after_step(self, *_: object) -> None:
        self._quietly("the end of a step", self._end_step)
        self._raise_if_stopped()

    def _end_step(self) -> None:
        now = self._moment
        self._name(replace(now, step=now.step + 1, batch=now.batch + 1))
        parameters = None
        if self._updates is not None:
            parameters = self._quietly("looking at the parameters", self._updates.after)
        frame = self._gathering.whole(parameters or (), at=now)
        if frame is not None:
            self._look(frame)

    def _name(self, moment: Moment) -> None:
        self._recording.moment(epoch=moment.epoch, step=moment.step, batch=moment.batch)
        self._moment = moment

    # What comes of a frame ----------------------------------------------------------------------

    def _end_frame(self) -> None:
        frame = self._gathering.whole()
        if frame is not None:
            self._look(frame)

    def _look(self, frame: Frame) -> None:
        for sink in self._sinks:
            self._quietly(f"{type(sink).__name__}.write", sink.write, frame)
        for rule in self._rules:
            self._quietly(f"the rule {rule.name}", self._judge, rule, frame)

    def _judge(self, rule: Rule, frame: Frame) -> None:
        for alarm in rule.look(frame):
            self.counts[alarm.rule, alarm.where] += 1
            if self.counts[alarm.rule, alarm.where] == 1:
                self._raised(alarm)

    def _raised(self, alarm: Alarm) -> None:
        self.alarms.append(alarm)
        _log.warning("%s", alarm)
        if alarm.action == "stop":
            self._stop = self._stop or alarm
        elif alarm.action == "snapshot" and not self._snapshot and self._snapshots[alarm.rule] < _SNAPSHOTS:
            self._snapshots[alarm.rule] += 1
            self._snapshot = True
        for sink in self._sinks:
            self._quietly(f"{type(sink).__name__}.alarm", sink.alarm, alarm)
        if self._on_alarm is not None:
            self._quietly("on_alarm", self._on_alarm, alarm)

    def _snapshot_due(self, moment: Moment) -> bool:
        due, self._snapshot = self._snapshot, False
        return due

    def _raise_if_stopped(self) -> None:
        alarm, self._stop = self._stop, None
        if alarm is not None:
            raise Stopped(f"{alarm}; the rule {alarm.rule} was told to stop the training.")

    def _quietly(self, what: str, function: Callable[..., _T], *given: Any) -> _T | None:
        """Call something that must not end the training; what it raises is said the first time."""
        try:
            return function(*given)
        except Exception as error:
            self._failures[what] += 1
            if self._failures[what] == 1:
                _log.warning("%s raised %s: %s; the training goes on", what, type(error).__name__, error)
            return None


# What was asked for, in the recorder's words ----------------------------------------------------


def _innermost(optimizer: torch.optim.Optimizer) -> torch.optim.Optimizer:
    """Return the optimizer that steps: Accelerate's and Lightning's are wrappers of it."""
    inside = getattr(optimizer, "optimizer", None)
    if isinstance(inside, torch.optim.Optimizer):
        return _innermost(inside)
    if not isinstance(optimizer, torch.optim.Optimizer):
        raise Unsupported(
            f"a {type(optimizer).__name__} is no torch.optim.Optimizer, and does not tell when it steps; without one, "
            "every forward is a step: watch(model)."
        )
    return optimizer


def _sides(patterns: Sequence[str], side: Side) -> tuple[str, ...]:
    """Return the same modules seen from another side."""
    parsed = [Pattern.parse(pattern) for pattern in patterns]
    return tuple(
        str(each if each.exclude else replace(each, sides=(side,), leaf=each.leaf if side != "input" else ()))
        for each in parsed
        if each.kind != "op"
    )


def _maps(attention: Tap | Sequence[str]) -> Tap | None:
    """Return a tap for what attention modules return beside their output, which stands second."""
    if not attention:
        return None
    tap = attention if isinstance(attention, Tap) else Tap(tuple(attention))
    parsed = [Pattern.parse(pattern) for pattern in tap.patterns]
    return replace(tap, patterns=tuple(str(p if p.exclude or p.leaf else replace(p, leaf=(1,))) for p in parsed))


def _points(tap: Tap, model: torch.nn.Module) -> set[Point]:
    shared = eager.modules_of(model).shared
    found = select(tap.patterns, eager.points(model))
    return {replace(point, name=shared.get(point.name, point.name)) for point in found}


def _bounds(model: torch.nn.Module) -> dict[str, tuple[float, float]]:
    """Return the ranges of the modules whose function is bounded at both ends, and flat there."""
    found: dict[str, tuple[float, float]] = {}
    for name, module in eager.modules_of(model).by_name.items():
        if isinstance(module, torch.nn.Hardtanh) and not isinstance(module, torch.nn.ReLU6):
            found[name] = (module.min_val, module.max_val)
        elif isinstance(module, (torch.nn.Sigmoid, torch.nn.Hardsigmoid)):
            found[name] = (0.0, 1.0)
        elif isinstance(module, (torch.nn.Tanh, torch.nn.Softsign)):
            found[name] = (-1.0, 1.0)
    return found
