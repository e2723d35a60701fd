"""Parameters that the optimizer does not move.

watch(model, optimizer, rules=[stuck(window=5)])
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import ClassVar

from layerscope.rules.alarms import Action, Alarm, Need
from layerscope.rules.frames import Frame, ParameterReading
from layerscope.rules.stating import Stated, refuse_unless


def stuck(*, limit: float = 0.0, window: int = 5, action: Action = "warn") -> Stuck:
    """Fire for a trainable parameter whose update-to-weight ratio was `limit` or less for `window` frames on end.

    It finds what the optimizer was never given, what no gradient reaches, and updates that rounding swallows.
    """
    return Stuck(action=action, limit=limit, window=window)


@dataclass
class Stuck(Stated):
    """A parameter that stays as it is."""

    name: ClassVar[str] = "stuck"
    needs: ClassVar[frozenset[Need]] = frozenset({"parameters"})

    action: Action = "warn"
    limit: float = 0.0
    window: int = 5
    _still: Counter[str] = field(init=False, repr=False, compare=False, default_factory=Counter)

    def __post_init__(self) -> None:
        super().__post_init__()
        refuse_unless(self.limit >= 0, self.name, "limit", self.limit, "a ratio from 0 on")
        refuse_unless(self.window >= 1, self.name, "window", self.window, "how many frames, from 1 on")

    def look(self, frame: Frame) -> list[Alarm]:
        """Count for how many frames each parameter has stayed."""
        alarms = []
        for parameter in frame.parameters:
            ratio = parameter.update_ratio
            if ratio is None or not ratio <= self.limit:
                self._still[parameter.name] = 0
                continue
            self._still[parameter.name] += 1
            if self._still[parameter.name] >= self.window:
                because = f"it did not move for {self._still[parameter.name]} frames on end{_why(parameter)}"
                alarms.append(
                    Alarm(
                        self.name, parameter.point, frame.moment, ratio, self.limit, because, self.action,
                        parameter.name,
                    )
                )  # fmt: skip
        return alarms


def _why(parameter: ParameterReading) -> str:
    if parameter.gradient is None:
        return ": no gradient reaches it"
    if parameter.gradient.rms == 0:
        return ": its gradient is zero"
    return (
        f", though its gradient is not zero (root mean square {parameter.gradient.rms:.3g}): the optimizer was not "
        "given it, the learning rate is zero, or rounding swallows the update"
    )
