"""The seam between a runtime and what records what it saw.

A runtime calls `begin` when an outermost forward starts, `seen` for each tensor and `end` when the forward is over.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from itertools import count
from typing import TYPE_CHECKING, Protocol

from layerscope.points import Moment, Point

if TYPE_CHECKING:
    import torch


@dataclass(slots=True, eq=False)
class Step:
    """One step under way: its moment, and how often each module has been called in it, as far as its hooks know.

    `idle` is set when no tap is due, so that hooks can return at once. `whole`, where it is set, is told each value
    that passes a wanted side, with its structure, once its tensors have been seen.
    """

    moment: Moment
    idle: bool = False
    calls: defaultdict[str, count[int]] = field(default_factory=lambda: defaultdict(count))
    whole: Callable[[Step, Point, object, int], None] | None = None

    def call(self, name: str) -> int:
        """Return the number of this call of `name`; threads that share the step get different ones."""
        return next(self.calls[name])


class RuntimeSink(Protocol):
    """What a runtime needs from its listener; none of these may raise into the model's run."""

    def begin(self) -> Step:
        """Start a step on this thread: an outermost forward is about to run."""

    def end(self, step: Step, *, failed: bool) -> None:
        """Finish the forward that `begin` started; `failed` when it raised."""

    def seen(
        self,
        step: Step,
        point: Point,
        tensor: torch.Tensor,
        *,
        call: int,
        note: Mapping[str, str] | None = None,
    ) -> None:
        """Take one tensor; the model may change it as soon as this returns."""

    def empty(self, point: Point, *, because: str) -> None:
        """Learn that a module ran and a side of it held no tensor."""

    def recomputed(self, name: str) -> None:
        """Count a call that activation checkpointing repeated; it is not recorded twice."""

    def failed(self, point: Point, error: Exception) -> None:
        """Learn that a point could not be told; the model's run goes on."""
