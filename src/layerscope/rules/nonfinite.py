"""NaN or infinity: which layer was finite going in and not coming out.

watch(model, optimizer, rules=[nonfinite(frames=8, action="stop")])
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from typing import ClassVar

from layerscope.points import Point
from layerscope.rules.alarms import Action, Alarm, Need
from layerscope.rules.frames import Frame, Reading
from layerscope.rules.stating import Stated, refuse_unless
from layerscope.stats import Summary


def nonfinite(*, frames: int = 8, action: Action = "warn") -> Nonfinite:
    """Fire at the first value of a step that is NaN or infinite, with the last `frames` frames before it.

    One alarm a step: what comes after the source is not finite either, and is only counted. It looks at the inputs of
    modules too, so that code between two modules is not taken for the second one. An argument that holds -inf is taken
    for a mask.
    """
    return Nonfinite(action=action, frames=frames)


@dataclass
class Nonfinite(Stated):
    """The first place in a step where values stop being finite."""

    name: ClassVar[str] = "nonfinite"
    needs: ClassVar[frozenset[Need]] = frozenset({"inputs"})

    action: Action = "warn"
    frames: int = 8
    _before: deque[Frame] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        super().__post_init__()
        refuse_unless(self.frames >= 0, self.name, "frames", self.frames, "how many frames to keep, from 0 on")
        self._before = deque(maxlen=self.frames)

    def look(self, frame: Frame) -> list[Alarm]:
        """Find the source, in the order things ran: points, then parameters."""
        alarm = self._source(frame)
        self._before.append(frame)
        return [] if alarm is None else [alarm]

    def _source(self, frame: Frame) -> Alarm | None:
        for at, reading in enumerate(frame.readings):
            if not reading.finite and not _may_be_a_mask(reading):
                because = self._story(frame, at)
                return self._alarm(frame, reading.point, reading.summary, because)
        for parameter in frame.parameters:
            gradient = parameter.gradient
            if gradient is not None and gradient.finite < gradient.count:
                because = f"its gradient holds {_told(gradient)}, though every point that was looked at is finite"
                return self._alarm(frame, parameter.point, gradient, because, parameter=parameter.name)
        return None

    def _alarm(
        self, frame: Frame, point: Point, summary: Summary, because: str, *, parameter: str | None = None
    ) -> Alarm:
        bad = summary.count - summary.finite
        return Alarm(self.name, point, frame.moment, bad, 0, because, self.action, parameter, tuple(self._before))

    def _story(self, frame: Frame, at: int) -> str:
        source, before = frame.readings[at], frame.readings[:at]
        others = sum(not reading.finite for reading in frame.readings[at + 1 :])
        after = f"; {others} more in this step, after it" if others else ""
        return f"{_told(source.summary)} {_where(source, before)}{self._past(source.point)}{after}"

    def _past(self, point: Point) -> str:
        """Tell the way there, from the frames before."""
        values = [r.summary.absmax for f in self._before for r in f.readings if r.point == point]
        return f"; largest magnitude in the frames before: {', '.join(f'{v:.3g}' for v in values)}" if values else ""


def _told(summary: Summary) -> str:
    kinds = (("NaN", summary.nan), ("+inf", summary.posinf), ("-inf", summary.neginf))
    return f"{' and '.join(f'{count} {kind}' for kind, count in kinds if count)} of {summary.count} values"


def _where(source: Reading, before: tuple[Reading, ...]) -> str:
    point = source.point
    if point.side.startswith("grad"):
        return "in the gradient that came back to it; the forward was finite"
    last = next((str(r.point) for r in reversed(before) if r.point.side == "output"), None)
    if point.side == "input":
        since = f"between {last} and it" if last else "in the model's own inputs, or before the first module"
        return f"come in already, and everything before is finite: made {since}"
    came_in = [r for r in before if r.point.name == point.name and r.point.side == "input"]
    if any(not r.finite for r in came_in):
        return "come out, and of what went in only -inf is not finite, as in a mask"
    return "come out, and what went in is finite" if came_in else "come out, and everything that ran before is finite"


def _may_be_a_mask(reading: Reading) -> bool:
    """Whether it is an argument with no other such values than -inf: what an additive attention mask is made of."""
    return reading.point.side == "input" and not reading.summary.nan and not reading.summary.posinf
