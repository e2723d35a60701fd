"""Gradients that no longer reach a layer.

watch(model, optimizer, rules=[vanishing(limit=1e-6)])
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import ClassVar

from layerscope.points import Point
from layerscope.rules.alarms import Action, Alarm, Need
from layerscope.rules.frames import Frame
from layerscope.rules.stating import Stated, refuse_unless
from layerscope.stats import Summary


def vanishing(*, limit: float = 1e-6, window: int = 5, action: Action = "warn") -> Vanishing:
    """Fire where the gradient has been below `limit` times the step's largest for `window` frames on end.

    The measure is the root mean square, relative to the largest of its kind in the same step (outputs' gradients, or
    parameters'), so that the scale of the loss does not matter. Where all are zero, every one of them is named.
    """
    return Vanishing(action=action, limit=limit, window=window)


@dataclass
class Vanishing(Stated):
    """A gradient that is nothing beside the others."""

    name: ClassVar[str] = "vanishing"
    needs: ClassVar[frozenset[Need]] = frozenset({"gradients"})

    action: Action = "warn"
    limit: float = 1e-6
    window: int = 5
    _small: Counter[Point | str] = field(init=False, repr=False, compare=False, default_factory=Counter)

    def __post_init__(self) -> None:
        super().__post_init__()
        refuse_unless(0 < self.limit < 1, self.name, "limit", self.limit, "a number between 0 and 1")
        refuse_unless(self.window >= 1, self.name, "window", self.window, "how many frames, from 1 on")

    def look(self, frame: Frame) -> list[Alarm]:
        """Judge the gradients of outputs among themselves, and those of parameters."""
        outputs = [(r.point, r.point, r.summary) for r in frame.readings if r.point.side == "grad_output"]
        weights = [(p.name, p.point, p.gradient) for p in frame.parameters if p.gradient is not None]
        return [*self._judge(frame, outputs), *self._judge(frame, weights)]

    def _judge(self, frame: Frame, found: Iterable[tuple[Point | str, Point, Summary]]) -> list[Alarm]:
        sizes = [(place, point, summary.rms) for place, point, summary in found if summary.finite]
        largest = max((size for _, _, size in sizes), default=0.0)
        alarms = []
        for place, point, size in sizes:
            if size > self.limit * largest:
                self._small[place] = 0
                continue
            self._small[place] += 1
            if self._small[place] >= self.window:
                share = f"{size / largest:.3g} of the step's largest" if largest else "zero, as every gradient is"
                because = f"its gradient is {share}, for {self._small[place]} frames on end"
                parameter = place if isinstance(place, str) else None
                threshold = self.limit * largest
                alarms.append(Alarm(self.name, point, frame.moment, size, threshold, because, self.action, parameter))
        return alarms
