"""Gather what a recording tells into frames, one for each step.

    gathering.seen(point, moment, tensor, summary)      # as each record is made
    gathering.whole()                                   # what the step showed

Nothing outlives its frame, so that ten thousand steps take the memory of one.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Collection, Mapping
from dataclasses import replace
from typing import NamedTuple, Protocol

import torch

from layerscope.monitor.units import unit_axis
from layerscope.points import Moment, Point
from layerscope.recorder.tensors import plain
from layerscope.rules import Alarm, Frame, ParameterReading, Reading
from layerscope.schedules import Schedule
from layerscope.stats import Summary

_Statistics = Summary | Callable[[], Summary]


class FrameSink(Protocol):
    """Where frames and alarms go: TensorBoard, a table, a list. What it raises stops nothing: see `Outlet`."""

    def write(self, frame: Frame) -> None:
        """Take a whole frame."""

    def alarm(self, alarm: Alarm) -> None:
        """Take an alarm, the first of its rule and place."""

    def close(self) -> None:
        """Write out what is held back; nothing comes after."""


class Sight(NamedTuple):
    """One tensor as it was seen, while the model may still go on with it."""

    point: Point
    moment: Moment
    tensor: torch.Tensor
    version: int
    summary: _Statistics

    @property
    def intact(self) -> bool:
        """Whether it is unchanged since."""
        return self.tensor._version == self.version


class Gathering:
    """The frame under way. What arrives for a later step makes it whole; what arrives for an earlier one is let go.

    `units`, the axis of each module's units where that is known, asks which of them were active; `images` are the
    points whose maps are kept, when `look` says so; `bounds` are the ranges of modules by name; `ended` is told a frame
    that a later step made whole. As long as `holds` is set, a frame's tensors are kept alive, and are in `sights` once
    it is whole.
    """

    def __init__(
        self,
        *,
        ended: Callable[[Frame], None],
        units: Mapping[str, int] | None = None,
        images: Collection[Point] = (),
        look: Schedule | None = None,
        bounds: Mapping[str, tuple[float, float]] | None = None,
        holds: bool = False,
    ) -> None:
        self.holds = holds
        self.sights: list[Sight] = []
        self._ended = ended
        self._units = units
        self._images = frozenset(images)
        self._look = look
        self._bounds = bounds or {}
        self._lock = threading.Lock()
        self._same: Moment | None = None  # the last moment seen: mostly the very same object
        self._open: _OpenFrame | None = None

    def seen(self, point: Point, moment: Moment, tensor: torch.Tensor, summary: _Statistics | None) -> None:
        """Take note of a record; one without statistics is not part of a frame."""
        if summary is None:
            return
        before = None
        with self._lock:
            if moment is not self._same:
                before = self._turn(moment)
            under_way = self._open
            if under_way is None or moment.step != under_way.moment.step:
                return
            known = under_way.found.get(point)
            if known is None:
                under_way.found[point] = [summary]
            else:
                known.append(summary)
        if before is not None:
            self.sights = before.sights
            self._ended(before.frame(self._bounds))
        if self.holds and not tensor.is_inference():
            under_way.sights.append(Sight(point, moment, tensor.detach(), tensor._version, summary))
        if self._units is not None and point.side == "output":
            under_way.note_active(point, tensor, summary, self._units.get(point.name))
        if point in self._images and (self._look is None or self._look(moment)):
            under_way.images[str(point)] = _first_sample(tensor)

    def whole(self, parameters: tuple[ParameterReading, ...] = (), *, at: Moment | None = None) -> Frame | None:
        """Return the frame under way and start anew; `at` is the moment of one that has parameters alone."""
        with self._lock:
            done, self._open, self._same = self._open, None, None
        if done is not None:
            self.sights = done.sights
            return done.frame(self._bounds, parameters)
        return Frame(at, (), parameters) if parameters and at is not None else None

    def _turn(self, moment: Moment) -> _OpenFrame | None:
        """Turn to another moment; return what was under way when it is over."""
        under_way = self._open
        if under_way is not None:
            if _key(moment) == _key(under_way.moment):
                self._same = moment
                return None
            if moment.step < under_way.moment.step:  # a gradient of a step that is over
                return None
        self._same, self._open = moment, _OpenFrame(replace(moment, call=0))
        return under_way


class _OpenFrame:
    """A frame that is not whole yet; numbers may still have to come from a device."""

    __slots__ = ("_laid", "active", "found", "images", "moment", "sights")

    def __init__(self, moment: Moment) -> None:
        self._laid: tuple[torch.Size, int] | None = None  # the last output's shape, and where its units are
        self.moment = moment
        self.found: dict[Point, list[_Statistics]] = {}
        self.active: dict[Point, torch.Tensor] = {}
        self.images: dict[str, torch.Tensor] = {}
        self.sights: list[Sight] = []

    def frame(self, bounds: Mapping[str, tuple[float, float]], parameters: tuple[ParameterReading, ...] = ()) -> Frame:
        readings = []
        for point, summaries in self.found.items():
            summary, *more = map(_now, summaries)
            for another in more:
                summary += another
            active = self.active.get(point)
            bounded = bounds.get(point.name) if point.side == "output" else None
            readings.append(Reading(point, summary, None if active is None else active.cpu(), bounded))
        return Frame(self.moment, tuple(readings), parameters, self.images)

    def note_active(self, point: Point, tensor: torch.Tensor, summary: _Statistics, told: int | None) -> None:
        """Note which units were other than zero; a tensor with few zeros has no silent unit, and is not read again."""
        if tensor.dim() < 2 or not tensor.is_floating_point() or not tensor.numel():
            return
        axis = unit_axis(tensor.shape, told, self._laid)
        self._laid = tensor.shape, axis
        units = tensor.shape[axis]
        if tensor.device.type == "cpu" and _now(summary).zeros < tensor.numel() // units:
            active = torch.ones(1, dtype=torch.bool).expand(units)
        else:
            active = plain(tensor)[0].ne(0).movedim(axis, -1).flatten(0, -2).any(0)
        known = self.active.get(point)
        self.active[point] = active if known is None or known.shape != active.shape else known | active


def _key(moment: Moment) -> tuple[int | None, int, int]:
    return moment.epoch, moment.step, moment.batch


def _now(summary: _Statistics) -> Summary:
    return summary() if callable(summary) else summary


def _first_sample(tensor: torch.Tensor) -> torch.Tensor:
    values, _ = plain(tensor)
    return (values[0] if values.dim() > 2 else values).to("cpu", copy=True)
