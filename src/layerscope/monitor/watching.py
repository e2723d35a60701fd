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
import os
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from operator import index
from types import TracebackType
from typing import Any, TypeVar

import torch

from layerscope import ranks
from layerscope.errors import NothingRecorded, Stopped
from layerscope.log import log
from layerscope.monitor.alarm_frames import FrameSink, Gathering
from layerscope.monitor.alarm_taps import bounds_of, innermost, maps_of, other_side, points_of
from layerscope.monitor.leaving import leave_on_sigterm
from layerscope.monitor.outlets import Outlet
from layerscope.monitor.page import page, record_of
from layerscope.monitor.units import unit_axes
from layerscope.monitor.updates import Updates
from layerscope.pages.alarm_timeline import keep
from layerscope.points import Moment, Point
from layerscope.recorder import Recording, RecordOptions, Tap, record
from layerscope.recorder.taps import level_of, schedule_of
from layerscope.report import html
from layerscope.rules import Alarm, ParameterReading, Rule, parse_rule
from layerscope.rules.frames import Frame
from layerscope.schedules import ALWAYS, Schedule
from layerscope.schedules import every as every_nth
from layerscope.stats import Summary
from layerscope.store import MemoryRun, Run

_T = TypeVar("_T")

_SNAPSHOTS = 3  # of each rule: one holds every tapped tensor of a step


class Watch:
    """Watch `model` until the block ends: a frame of readings every `every` steps, for the rules and the sinks.

    With an `optimizer`, a step is one of its steps, whatever the number of forwards it takes, and evaluation (eval mode
    without gradients) is passed over; a step that a gradient scaler leaves out becomes part of the next. Without one,
    every forward is a step, whose frame is whole when the next begins.

    `taps` are patterns; `statistics="full"` adds histograms, `"channels"` the statistics of each channel.
    `gradients` adds the gradients of the tapped outputs;
    `parameters` adds, for each trainable parameter, its gradient and its update-to-weight ratio, for a copy of the
    parameters during the optimizer's step. `attention` names attention modules that return their weights beside their
    output (`nn.MultiheadAttention` called with `need_weights`, transformers with eager attention): the maps of the
    first sample go to the sinks, whole ones to the run; a `Tap` gives them a schedule of their own. A rule turns on
    what it needs.

    Every alarm is logged and handed to the sinks and to `on_alarm`, once for each rule and place, then counted.

    An alarm that asks for a snapshot has every tapped tensor of its step recorded whole, at most three times for a
    rule; what was changed in place since it was seen is left out and said. As long as a rule may still ask for one, the
    tapped tensors of a step stay in memory until its rules have looked.

    One that says stop raises `Stopped` out of `optimizer.step()`, before anything is moved, so that the weights are
    those from before the bad step. Rules that need the update itself (`stuck`), and all rules where `step` is given a
    closure, can only look after it; without an optimizer `Stopped` comes out of `moment`, `flush` or the end of the
    block.

    With `to`, the statistics, the attention maps and the snapshots are recorded on disk; without it, the snapshots
    alone, in memory. Nothing of this changes a result or, unless a rule says stop, ends the training. SIGTERM ends the
    block in order, unless the program has a handler of its own.

    `alarms` has the first alarm of each rule and place, in order, and `counts` how often each came; `run` is what was
    recorded.
    """

    def __init__(
        self,
        model: torch.nn.Module,
        optimizer: torch.optim.Optimizer | None = None,
        *,
        to: str | os.PathLike[str] | None = None,
        every: int | Schedule | str = 1,
        taps: str | Sequence[str] = "**",
        statistics: str = "moments",
        gradients: bool = False,
        parameters: bool = False,
        attention: str | Sequence[str] | Tap = (),
        rules: Sequence[Rule | str] = (),
        sinks: Sequence[FrameSink] = (),
        on_alarm: Callable[[Alarm], None] | None = None,
    ) -> None:
        wanted = [copy.deepcopy(parse_rule(rule) if isinstance(rule, str) else rule) for rule in rules]
        needs = frozenset().union(*(rule.needs for rule in wanted))
        parameters = parameters or "parameters" in needs
        if optimizer is None and parameters:
            who = next((f"the rule {rule.name}" for rule in wanted if "parameters" in rule.needs), "parameters=True")
            raise ValueError(
                f"{who} needs the optimizer, around whose steps parameters are looked at: watch(model, optimizer)."
            )
        self.alarms: list[Alarm] = []
        self.counts: Counter[tuple[str, str]] = Counter()
        self._model = model
        self._optimizer = None if optimizer is None else innermost(optimizer)
        self._to = None if to is None else os.fspath(to)
        patterns = (taps,) if isinstance(taps, str) else tuple(taps)
        schedule = every_nth(every) if isinstance(every, int) else schedule_of(every)
        self._schedule = schedule = ALWAYS if schedule is None else schedule

        def before_step(rule: Rule) -> bool:
            return optimizer is not None and rule.action == "stop" and "parameters" not in rule.needs

        self._early = [rule for rule in wanted if before_step(rule)]
        self._late = [rule for rule in wanted if not before_step(rule)]
        self._outlets = [Outlet(sink) for sink in sinks]
        self._on_alarm = on_alarm
        self._updates = Updates(model, level=level_of(statistics)[0]) if parameters else None
        self._moment = Moment(rank=ranks.rank())
        self._paused = False
        self._snapshots: Counter[str] = Counter()
        self._judged: Frame | None = None  # by the early rules, in the step of the optimizer that is under way
        self._stop: Alarm | None = None
        self._said: set[tuple[int, str]] = set()  # each rule's places
        self._failures: Counter[str] = Counter()
        self._stack = ExitStack()
        maps = maps_of((attention,) if isinstance(attention, str) else attention)
        looks = [Tap(patterns, "summary", schedule)]
        if gradients or "gradients" in needs:
            looks.append(Tap(other_side(patterns, "grad_output"), "summary", schedule))
        if "inputs" in needs:
            looks.append(Tap(other_side(patterns, "input"), "summary", schedule))
        if maps is not None:
            maps = replace(
                maps, when=schedule if maps.when is None else maps.when, keep="summary" if to is None else "both"
            )
            looks.append(maps)
        images = set() if maps is None else points_of(maps, model)
        self._maps = frozenset(map(str, images))
        self._gathering = Gathering(
            ended=self._look,
            units=unit_axes(model) if "units" in needs else None,
            images=images,
            look=None if maps is None else maps.schedule,
            bounds=bounds_of(model),
            holds=any(rule.action == "snapshot" for rule in wanted),
        )
        options = RecordOptions(listener=self)
        self._recording = record(model, looks, to=to, keep="summary", statistics=statistics, options=options)

    # The block ----------------------------------------------------------------------------------

    def __enter__(self) -> Watch:
        self._stack.callback(leave_on_sigterm())
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
        for outlet in self._outlets:
            outlet.close()
        try:
            self._stack.__exit__(kind, error, trace)
        except NothingRecorded as nothing:
            log.warning("nothing was watched: %s", nothing)
        for missing in self._recording.missing:
            if missing.point in self._maps:
                log.warning("no attention map came from %s: %s", missing.point, missing.reason)
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

    def pause(self) -> None:
        """Let forwards pass, neither seen nor counted, until `resume`: an evaluation in the middle of training."""
        self._paused = True

    def resume(self) -> None:
        """Look and count again."""
        self._paused = False

    def flush(self) -> None:
        """Take the step under way for whole, and wait until everything recorded is safe."""
        self._end_frame()
        self._recording.flush()
        self._raise_if_stopped()

    @property
    def run(self) -> Run | MemoryRun:
        """What was recorded: statistics, maps and snapshots in the run that `to` named; in memory, snapshots."""
        return self._recording.run

    def to_html(self, path: str | os.PathLike[str]) -> None:
        """Write the report to look at: one file, which needs nothing else."""
        html.save(page(self.alarms, self.run, self._name_of_run), path)

    def _repr_html_(self) -> str:
        parts = page(self.alarms, self.run, self._name_of_run)
        return html.fragment(parts)

    @property
    def _name_of_run(self) -> str:
        return "a watched training" if self._to is None else self._to

    @property
    def recording(self) -> Recording:
        """The recording underneath, which knows what is missing and why."""
        return self._recording

    # What the recording tells (the listener) ----------------------------------------------------

    def wants(self) -> bool:
        """Pass over evaluation, when there is an optimizer to tell training from it."""
        return not self._paused and (self._optimizer is None or self._model.training or torch.is_grad_enabled())

    def seen(
        self, point: Point, moment: Moment, tensor: torch.Tensor, summary: Summary | Callable[[], Summary] | None
    ) -> None:
        """Add a record to the frame under way."""
        self._gathering.seen(point, moment, tensor, summary)

    # What the optimizer tells -------------------------------------------------------------------

    def judge(self) -> None:
        """Have the rules that say stop look at the step so far, before the optimizer takes it; raises Stopped.

        It comes by itself, unless the optimizer is given a closure: then the closure may call it at its end.
        """
        if self._early and self._judged is None:
            self._judged = self._quietly("the end of a step", self._judge_early)
        if self._stop is not None:
            self._judged = None
        self._raise_if_stopped()

    def _before_step(self, optimizer: object, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        closure = kwargs.get("closure", args[1] if len(args) > 1 else None) is not None
        if self._updates is not None:
            self._updates.forget()
            if self._quietly("the schedule", self._schedule, self._moment):
                self._quietly("looking at the parameters", partial(self._updates.before, gradients=not closure))
        if not closure:
            self.judge()

    def _judge_early(self) -> Frame | None:
        parameters = () if self._updates is None else self._updates.now()
        frame = self._gathering.whole(parameters, at=self._moment)
        if frame is not None:
            self._judge(self._early, frame)
            if self._stop is not None:
                self._hand_out(frame)
        return frame

    def _after_step(self, *_: object) -> None:
        self._quietly("the end of a step", self._end_step)
        self._raise_if_stopped()

    def _end_step(self) -> None:
        now, judged = self._moment, self._judged
        self._judged = None
        self._name(replace(now, step=now.step + 1, batch=now.batch + 1))
        parameters: tuple[ParameterReading, ...] = ()
        if self._updates is not None:
            parameters = self._quietly("looking at the parameters", self._updates.after) or ()
        if judged is not None:
            self._hand_out(replace(judged, parameters=parameters))
            self._gathering.whole()  # a closure that went on after it had been judged
            self._gathering.sights = []
            return
        frame = self._gathering.whole(parameters, at=now)
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
        """Take a frame that is not judged yet."""
        self._judge(self._early, frame)
        self._hand_out(frame)

    def _hand_out(self, frame: Frame) -> None:
        """Give a frame to the sinks and to the rules that are left, and let go of its tensors."""
        for outlet in self._outlets:
            outlet.write(frame)
        self._judge(self._late, frame)
        self._gathering.sights = []

    def _judge(self, rules: Sequence[Rule], frame: Frame) -> None:
        for rule in rules:
            self._quietly(f"the rule {rule.name}", self._ask, rule, frame)

    def _ask(self, rule: Rule, frame: Frame) -> None:
        for alarm in rule.look(frame):
            self.counts[alarm.rule, alarm.where] += 1
            # Two rules may share a name: one that stops, and one that takes a snapshot.
            if (id(rule), alarm.where) not in self._said:
                self._said.add((id(rule), alarm.where))
                self._raised(alarm)

    def _raised(self, alarm: Alarm) -> None:
        self.alarms.append(alarm)
        log.warning("%s", alarm)
        if alarm.action == "stop":
            self._stop = self._stop or alarm
        elif alarm.action == "snapshot":
            self._quietly("a snapshot", self._take_snapshot, alarm)
        if self._to is not None and "://" not in self._to:
            self._quietly("keeping an alarm", keep, self._to, record_of(alarm))
        for outlet in self._outlets:
            outlet.alarm(alarm)
        if self._on_alarm is not None:
            self._quietly("on_alarm", self._on_alarm, alarm)

    def _take_snapshot(self, alarm: Alarm) -> None:
        """Record the tensors of the frame that is being judged, once, whichever rules ask for it."""
        sights, self._gathering.sights = self._gathering.sights, []
        if not sights or self._snapshots[alarm.rule] >= _SNAPSHOTS:
            return
        self._snapshots[alarm.rule] += 1
        asking = {rule.name for rule in self._late if rule.action == "snapshot"}
        self._gathering.holds = any(self._snapshots[name] < _SNAPSHOTS for name in asking)
        changed = [str(sight.point) for sight in sights if not sight.intact]
        for sight in sights:
            if sight.intact:
                self._recording.add(sight.point, sight.moment, sight.tensor, summary=sight.summary)
        if changed:
            log.warning(
                "the snapshot at %s is without %s: changed in place since",
                alarm.moment,
                ", ".join(sorted(set(changed))),
            )

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
                log.warning("%s raised %s: %s; the training goes on", what, type(error).__name__, error)
            return None


watch = Watch  # as it is called: with watch(model) as watching
