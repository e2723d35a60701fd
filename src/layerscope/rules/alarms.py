"""What a rule is, and what it says when it fires.

class Loud:
    name, action, needs = "loud", "warn", frozenset()

    def look(self, frame):
        return [Alarm("loud", r.point, frame.moment, r.summary.rms, 10.0, "it is loud")
                for r in frame.readings if r.summary.rms > 10.0]
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal, Protocol, get_args

from layerscope.points import Moment, Point
from layerscope.rules.frames import Frame

Action = Literal["warn", "snapshot", "stop"]
ACTIONS: tuple[Action, ...] = get_args(Action)

# What a rule has to see beside the outputs: watch() looks at it when a rule says so, and not otherwise.
Need = Literal["inputs", "gradients", "parameters", "units"]


@dataclass(frozen=True, slots=True)
class Alarm:
    """One thing that a rule found: where, when, which value crossed which threshold, and why that matters.

    `parameter` is the full name of the parameter it is about, if it is about one; `point` is then its module's output.
    `frames` are the last frames before it, oldest first, where the rule keeps them.
    """

    rule: str
    point: Point
    moment: Moment
    value: float
    threshold: float
    because: str
    action: Action = "warn"
    parameter: str | None = None
    frames: tuple[Frame, ...] = field(default=(), repr=False, compare=False)

    @property
    def where(self) -> str:
        """The place in words: a point's text, or the parameter's name."""
        return str(self.point) if self.parameter is None else f"parameter {self.parameter}"

    def __str__(self) -> str:
        return (
            f"{self.rule}: {self.where} at {self.moment}: {self.because} (value {self.value:.4g}, "
            f"threshold {self.threshold:.4g})"
        )


class Rule(Protocol):
    """Something to watch for. A rule may remember: `watch` works on a copy of its own.

    Asked once for each frame, it returns an alarm for everything that is wrong in it; the caller says each place once.
    """

    @property
    def name(self) -> str:
        """The word it is known by."""

    @property
    def action(self) -> Action:
        """What to do when it fires."""

    @property
    def needs(self) -> frozenset[Need]:
        """What it has to see beside the outputs."""

    def look(self, frame: Frame) -> list[Alarm]:
        """Say what is wrong in this frame."""
