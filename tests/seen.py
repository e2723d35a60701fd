"""A sink that keeps what a runtime tells it, in order."""

from __future__ import annotations

import threading
from collections.abc import Mapping
from dataclasses import dataclass, field

import torch

from layerscope.points import Moment, Point
from layerscope.runtimes.sink import Step

_counting = threading.Lock()


@dataclass(slots=True)
class Seen:
    """Everything that was told."""

    records: list[tuple[Moment, Point, torch.Tensor]] = field(default_factory=list)
    notes: list[Mapping[str, str] | None] = field(default_factory=list)
    empties: list[tuple[Point, str]] = field(default_factory=list)
    repeats: list[str] = field(default_factory=list)
    failures: list[tuple[Point, Exception]] = field(default_factory=list)
    forwards: list[bool] = field(default_factory=list)
    begun: int = 0

    def begin(self) -> Step:
        """Number the steps in the order they begin."""
        with _counting:
            step = Step(Moment(step=self.begun, batch=self.begun))
            self.begun += 1
        return step

    def end(self, step: Step, *, failed: bool) -> None:
        """Remember how the forward went."""
        self.forwards.append(failed)

    def seen(
        self,
        step: Step,
        point: Point,
        tensor: torch.Tensor,
        *,
        call: int,
        note: Mapping[str, str] | None = None,
    ) -> None:
        """Keep a copy of the tensor."""
        moment = step.moment
        when = Moment(moment.epoch, moment.step, moment.batch, call, moment.rank)
        self.records.append((when, point, tensor.detach().clone()))
        self.notes.append(note)

    def empty(self, point: Point, *, because: str) -> None:
        """Keep the reason."""
        self.empties.append((point, because))

    def recomputed(self, name: str) -> None:
        """Keep the name."""
        self.repeats.append(name)

    def failed(self, point: Point, error: Exception) -> None:
        """Keep the error."""
        self.failures.append((point, error))
