"""What one step of training showed: the values that rules look at and sinks write.

    frame.reading("blocks.3").summary.rms
    frame.parameters[0].update_ratio

A frame holds numbers, not tensors, apart from the attention maps that were asked for.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from layerscope.errors import NoSuchPoint
from layerscope.points import Moment, Point
from layerscope.stats import Summary

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True, slots=True, eq=False)
class Reading:
    """The statistics of one point in one step, over all its calls.

    `active` tells for each unit whether it was other than zero anywhere, where a rule asked for it; `bounds` is the
    range of the module's function, where it has one (a sigmoid's is 0 to 1).
    """

    point: Point
    summary: Summary
    active: torch.Tensor | None = None
    bounds: tuple[float, float] | None = None

    @property
    def finite(self) -> bool:
        """Whether every value is."""
        return self.summary.finite == self.summary.count


@dataclass(frozen=True, slots=True)
class ParameterReading:
    """One parameter at an optimizer's step.

    `weight_rms` is the root mean square before the step. `gradient` is what the optimizer was given (after clipping),
    None when it was given none. `update_ratio` is the norm of the change over the norm before it; a parameter that was
    all zeros is measured by what it became. It is None when no optimizer was given to `watch`.
    """

    name: str
    weight_rms: float
    gradient: Summary | None = None
    update_ratio: float | None = None

    @property
    def point(self) -> Point:
        """The output of the module that owns the parameter."""
        return Point(self.name.rpartition(".")[0])


@dataclass(frozen=True, slots=True, eq=False)
class Frame:
    """What one step showed: points in the order they ran, then gradients in the order they came.

    `images` are attention maps of the first sample, `[heads, queries, keys]` or `[queries, keys]`, on the CPU, by the
    text of their point.
    """

    moment: Moment
    readings: tuple[Reading, ...] = ()
    parameters: tuple[ParameterReading, ...] = ()
    images: Mapping[str, torch.Tensor] = field(default_factory=dict)

    def reading(self, point: Point | str) -> Reading:
        """Return the reading of a point; a bare name means its output."""
        wanted = Point.parse(point) if isinstance(point, str) else point
        for reading in self.readings:
            if reading.point == wanted:
                return reading
        raise NoSuchPoint(f"{wanted} has no reading at {self.moment}; there are {len(self.readings)} others.")
