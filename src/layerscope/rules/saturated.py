"""Activations that sit at the ends of their range, where nothing is learnt.

watch(model, rules=[saturated(limit=0.9)])
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from layerscope.rules.alarms import Action, Alarm
from layerscope.rules.frames import Frame, Reading
from layerscope.rules.stating import Stated, refuse_unless

_EDGE = 0.05  # how near to an end of the range counts as being there, as a share of the range


def saturated(*, limit: float = 0.9, action: Action = "warn") -> Saturated:
    """Fire when at least `limit` of the values of a bounded activation lie in the outer 5 % of its range.

    Bounded are the modules Sigmoid, Tanh, Hardsigmoid, Hardtanh and Softsign. The share is the least that mean and
    standard deviation leave possible, so it costs nothing more, and it is never overstated.
    """
    return Saturated(action=action, limit=limit)


@dataclass
class Saturated(Stated):
    """A sigmoid or tanh that is nearly always at one end or the other."""

    name: ClassVar[str] = "saturated"

    action: Action = "warn"
    limit: float = 0.9

    def __post_init__(self) -> None:
        super().__post_init__()
        refuse_unless(0 < self.limit < 1, self.name, "limit", self.limit, "a share between 0 and 1")

    def look(self, frame: Frame) -> list[Alarm]:
        """Judge the modules whose range is known."""
        alarms = []
        for reading in frame.readings:
            if reading.bounds is not None and reading.summary.finite:
                share = _share(reading, *reading.bounds)
                if share >= self.limit:
                    low, high = reading.bounds
                    because = f"at least {share:.1%} of its values lie within 5 % of an end of [{low:g}, {high:g}]"
                    alarms.append(
                        Alarm(self.name, reading.point, frame.moment, share, self.limit, because, self.action)
                    )
        return alarms


def _share(reading: Reading, low: float, high: float) -> float:
    """Return the least share of values near an end that the moments allow.

    With y the value's place in the range, 0 to 1, y(1 - y) is at least e(1 - e) everywhere but within e of an end. Its
    mean, m - m^2 - s^2, therefore bounds the share of what is not there.
    """
    mean = (reading.summary.mean - low) / (high - low)
    std = reading.summary.std / (high - low)
    inside = max(mean - mean**2 - std**2, 0.0) / (_EDGE * (1 - _EDGE))
    return max(1.0 - inside, 0.0)
