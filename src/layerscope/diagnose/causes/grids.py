"""Find the grid that quantised values lie on: its step and its bits, for the whole tensor, each row, column or group.

    grid_of(torch.round(x / 0.1) * 0.1)      # Grid(step=(0.1, 0.1), bits=6, per='tensor')

A grid is told from chance by odds: each different value that falls next to a multiple of the step makes it less likely
that they lie there by accident. More than 256 different values are on no grid of eight bits.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

from layerscope.diagnose.causes.closeness import precision

_BITS = 8
_LEVELS = 2**_BITS - 1
_SURE = 16.0  # the logarithm of the odds against chance, in a row
_SHORTEST = 8  # a row
_NEAR = 0.02  # of a step: how far off a multiple may be, rounding apart
_TELLING = 0.1  # of a step: values that rounding moves further tell nothing
# What absmax and min-max quantisation divide their range by.
_DIVISORS = (127, 128, 255, 254, 7, 8, 15, 14, 31, 63)
_GROUPS = (256, 128, 64, 32)
_MOST = 0.9  # of the rows
_ROWS, _WIDTH = 16, 256  # looked at


@dataclass(frozen=True, slots=True)
class Grid:
    """The smallest and largest step, the bits that the levels take, and what shares one step."""

    step: tuple[float, float]
    bits: int
    per: str

    def __str__(self) -> str:
        low, high = self.step
        steps = f"step {low:.3g}" if high <= 1.001 * low else f"steps {low:.3g} to {high:.3g}"
        own = "" if self.per == "tensor" else f", one per {self.per}"
        return f"a grid of {steps} ({self.bits} bits{own})"


def grid_of(tensor: torch.Tensor, *, rounded: torch.dtype | None = None) -> Grid | None:
    """Return the coarsest grid that all values lie on, or None; `rounded` is the dtype that they went through last."""
    unit = max(precision(rounded or tensor.dtype), precision(tensor.dtype))
    found: Grid | None = None
    for per, rows in _readings(tensor.detach()) if tensor.numel() else ():
        grid = _grid(per, _Rows.of(rows), unit)
        # Whatever lies on a grid of its own also lies on a finer one of all: only a coarser one is news.
        if grid is not None and (found is None or grid.step[0] > 1.2 * found.step[0]):
            found = grid
    return found


@dataclass(frozen=True, slots=True)
class _Rows:
    """Rows that may have a step each: a part of their values, sorted, and the ends of all of them."""

    values: torch.Tensor
    low: torch.Tensor
    high: torch.Tensor

    @classmethod
    def of(cls, rows: torch.Tensor) -> _Rows:
        rows = rows[:: -(-len(rows) // _ROWS)]
        low, high = rows.amin(1).to(torch.float64), rows.amax(1).to(torch.float64)
        several = (high > low) & low.isfinite() & high.isfinite()
        width = _WIDTH * max(1, _ROWS // len(rows) // 4)
        part = rows[:, :: -(-rows.shape[1] // width)].to(torch.float64)
        return cls(part[several].sort(1).values, low[several], high[several])


def _readings(tensor: torch.Tensor) -> list[tuple[str, torch.Tensor]]:
    """The tensor as rows, by what may share a step."""
    wide = tensor.reshape(-1, tensor.shape[-1]) if tensor.ndim > 1 else tensor.reshape(1, -1)
    readings = [("tensor", tensor.reshape(1, -1))]
    if len(wide) > 1:
        rows = tensor.reshape(tensor.shape[0], -1) if tensor.ndim == 4 else wide  # a convolution's output channels
        readings += [("row", rows), ("column", wide.T)]
        readings += [
            (f"group of {n}", wide.reshape(-1, n)) for n in _GROUPS if wide.shape[1] % n == 0 < wide.shape[1] - n
        ]
    return [(per, rows) for per, rows in readings if rows.shape[1] >= _SHORTEST]


def _grid(per: str, rows: _Rows, unit: float) -> Grid | None:
    step = _steps(rows, unit) if len(rows.values) else rows.low
    found = step.isfinite()
    if not len(step) or int(found.sum()) < _MOST * len(step):
        return None
    levels = float(((rows.high - rows.low)[found] / step[found]).max())
    return Grid((float(step[found].min()), float(step[found].max())), math.ceil(math.log2(round(levels) + 1)), per)


def _steps(rows: _Rows, unit: float) -> torch.Tensor:
    """Return the largest step whose multiples each row consists of; NaN where there is none."""
    top, span = torch.maximum(rows.low.abs(), rows.high.abs()), rows.high - rows.low
    gaps = rows.values.diff(dim=1)
    if bool(((gaps > 0).sum(1) > _LEVELS).all()):
        return torch.full_like(top, math.nan)
    smallest = gaps.masked_fill(gaps <= 2 * unit * top[:, None], math.inf).amin(1)
    least = rows.values.abs().masked_fill(rows.values == 0, math.inf).amin(1)
    guesses = torch.stack([smallest, least, *(top / n for n in _DIVISORS), *(span / n for n in _DIVISORS)], 1)
    fitted = torch.cat([_fitted(rows, origin, guesses, unit) for origin in (torch.zeros_like(top), rows.low)], 1)
    largest = fitted.nan_to_num(nan=0.0).amax(1)
    return largest.masked_fill(largest == 0, math.nan)


def _fitted(rows: _Rows, origin: torch.Tensor, guesses: torch.Tensor, unit: float) -> torch.Tensor:
    """Return the step that fits best near each guess, where all values that can tell agree with it; NaN elsewhere."""
    moved = (rows.values - origin[:, None])[:, None]
    off = unit * (rows.values.abs() + origin.abs()[:, None])[:, None]
    new = (rows.values.diff(dim=1, prepend=rows.values[:, :1] - 1) > 0)[:, None]
    step = guesses
    for _ in range(2):
        whole = (moved / step[..., None]).round()
        telling = new & (off < _TELLING * step[..., None]) & (whole != 0)
        weight = whole * telling
        step = (moved * weight).sum(2) / (weight * whole).sum(2).clamp(min=1e-300)
    allowed = _NEAR + off / step[..., None]
    agree = (((moved / step[..., None] - whole).abs() <= allowed) | ~telling).all(2)
    odds = torch.where(telling, -(2 * allowed).log(), 0).sum(2)
    # Short rows tell together what none tells alone, when the same guess fits nearly all of them.
    together = (agree.to(torch.float64).mean(0) >= _MOST) & (odds.sum(0) >= 4 * _SURE)
    several = torch.where(telling, whole.abs(), 0).amax(2) >= 2
    few = (rows.high - rows.low)[:, None] <= (_LEVELS + 0.5) * step
    return step.masked_fill(~(agree & ((odds >= _SURE) | together) & several & few & (step > 0)), math.nan)
