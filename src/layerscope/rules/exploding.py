"""Values that grow without bound, while they are still finite.

watch(model, optimizer, gradients=True, rules=[exploding(limit=1e3, growth=50)])
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from statistics import median
from typing import ClassVar

from layerscope.points import Point
from layerscope.rules.alarms import Action, Alarm
from layerscope.rules.frames import Frame
from layerscope.rules.stating import Stated, refuse_unless
from layerscope.stats import Summary

# An output that grows from nearly nothing (a branch that starts at zero) is no explosion before it is of size one.
_ORDINARY = 1.0


def exploding(*, limit: float = 1e4, growth: float = 100.0, window: int = 10, action: Action = "warn") -> Exploding:
    """Fire when the root mean square of an output or gradient passes `limit`, or `growth` times its recent median.

    Recent are the last `window` frames, and growth is judged once there are that many. Outputs must also be larger than
    one for growth to count; gradients need not.
    """
    return Exploding(action=action, limit=limit, growth=growth, window=window)


@dataclass
class Exploding(Stated):
    """A root mean square beyond a limit, or far beyond what it lately was."""

    name: ClassVar[str] = "exploding"

    action: Action = "warn"
    limit: float = 1e4
    growth: float = 100.0
    window: int = 10
    _recent: dict[Point | str, deque[float]] = field(init=False, repr=False, compare=False, default_factory=dict)

    def __post_init__(self) -> None:
        super().__post_init__()
        refuse_unless(self.limit > 0, self.name, "limit", self.limit, "a number above 0")
        refuse_unless(self.growth > 1, self.name, "growth", self.growth, "a number above 1")
        refuse_unless(self.window >= 1, self.name, "window", self.window, "how many frames, from 1 on")

    def look(self, frame: Frame) -> list[Alarm]:
        """Judge every floating-point output and gradient."""
        alarms = []
        for reading in frame.readings:
            point = reading.point
            if point.side != "input":
                small = _ORDINARY if point.side == "output" else 0.0
                found = self._judge(point, reading.summary, small)
                if found is not None:
                    alarms.append(Alarm(self.name, point, frame.moment, *found, self.action))
        for parameter in frame.parameters:
            if parameter.gradient is not None:
                found = self._judge(parameter.name, parameter.gradient, 0.0)
                if found is not None:
                    alarms.append(Alarm(self.name, parameter.point, frame.moment, *found, self.action, parameter.name))
        return alarms

    def _judge(self, place: Point | str, summary: Summary, small: float) -> tuple[float, float, str] | None:
        if "float" not in summary.dtype or not summary.finite:
            return None
        size = summary.rms
        recent = self._recent.get(place)
        if recent is None:
            recent = self._recent[place] = deque(maxlen=self.window)
        known = len(recent) == self.window
        usual = median(recent) if known and size > small else 0.0
        recent.append(size)
        if size > self.limit:
            return size, self.limit, f"its root mean square is beyond {self.limit:g}"
        if usual and size > self.growth * usual:
            because = f"its root mean square grew {size / usual:.3g} times beyond the {usual:.3g} of the frames before"
            return size, self.growth * usual, because
        return None
