"""Units that are never active.

watch(model, rules=[dead(window=100, limit=0.5)])
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, ClassVar

from layerscope.points import Point
from layerscope.rules.alarms import Action, Alarm, Need
from layerscope.rules.frames import Frame
from layerscope.rules.stating import Stated, refuse_unless

if TYPE_CHECKING:
    import torch


def dead(*, window: int = 100, limit: float = 0.5, action: Action = "warn") -> Dead:
    """Fire when more than `limit` of a layer's units gave nothing but zeros for `window` frames on end.

    A unit is a channel of a convolution or its normalisation, a feature of a linear layer: the module's type tells the
    axis, and an activation has that of what came before it. Where nothing tells, it is the last axis, or the second of
    four and more. It takes one more pass over those outputs alone that hold as many zeros as one dead unit would make.
    """
    return Dead(action=action, window=window, limit=limit)


@dataclass
class Dead(Stated):
    """A layer most of whose units have gone silent."""

    name: ClassVar[str] = "dead"
    needs: ClassVar[frozenset[Need]] = frozenset({"units"})

    action: Action = "warn"
    window: int = 100
    limit: float = 0.5
    _quiet: dict[Point, torch.Tensor] = field(init=False, repr=False, compare=False, default_factory=dict)

    def __post_init__(self) -> None:
        super().__post_init__()
        refuse_unless(self.window >= 1, self.name, "window", self.window, "how many frames, from 1 on")
        refuse_unless(0 <= self.limit < 1, self.name, "limit", self.limit, "a share from 0 to below 1")

    def look(self, frame: Frame) -> list[Alarm]:
        """Count for how many frames each unit has been silent."""
        alarms = []
        for reading in frame.readings:
            if reading.active is None:
                continue
            quiet = self._quiet.get(reading.point)
            if quiet is None or quiet.shape != reading.active.shape:
                quiet = self._quiet[reading.point] = reading.active.long().zero_()
            quiet.add_(1).masked_fill_(reading.active, 0)
            silent = int((quiet >= self.window).sum())
            share = silent / quiet.numel()
            if share > self.limit:
                because = f"{silent} of its {quiet.numel()} units were zero for {self.window} frames on end"
                alarms.append(Alarm(self.name, reading.point, frame.moment, share, self.limit, because, self.action))
        return alarms
