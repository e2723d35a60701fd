"""How far apart two tensors are, in the seven numbers that floors are made of.

    numbers = numbers_of(reference, candidate)
    numbers.relative_l2, numbers.median

A row is what lies along the last axis (along axis 1 of images), a column what lies across the rows.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    import torch

NAMES = ("relative_l2", "median", "p90", "worst", "column", "factor")

_SMALL = 0.1  # of the median row's norm: a smaller row counts as that large
_MASKED = 1e8  # beyond it stands no activation; float16 is masked with its lowest number
_MASKED_HALF = 6e4
_PART = 1 << 22  # values at a time, in float64


class ErrorNumbers(NamedTuple):
    """How far apart two tensors are.

    Relative L2 error; median, 90th percentile and worst of the errors of rows; the worst column; the best-fitting
    factor's distance from 1; and the largest |d|, for where the reference is all zero. What a tensor is too small for
    is NaN. `rows` and `values` say how many the numbers are of.
    """

    relative_l2: float
    median: float
    p90: float
    worst: float
    column: float
    factor: float
    largest: float
    rows: int
    values: int

    @property
    def zero(self) -> bool:
        """Whether the reference is zero where the other side is not."""
        return math.isnan(self.relative_l2) and self.largest > 0


def numbers_of(
    reference: torch.Tensor, other: torch.Tensor, *, axis: int = -1, kept: torch.Tensor | None = None
) -> ErrorNumbers:
    """Measure `other` against `reference`, in float64; only the rows that `kept` is true for.

    What is not finite, or a mask's lowest number, on either side is left out.
    """
    import torch

    one, two = _rows(reference, axis), _rows(other, axis)
    beyond = _MASKED_HALF if torch.float16 in (one.dtype, two.dtype) else _MASKED
    if kept is not None:
        one, two = one[kept], two[kept]
    rows, width = one.shape
    if not rows or not width:
        return _flat(math.nan, 0.0, rows, 0)
    errors, powers = one.new_zeros(rows, dtype=torch.float64), one.new_zeros(rows, dtype=torch.float64)
    down, across = one.new_zeros(width, dtype=torch.float64), one.new_zeros(width, dtype=torch.float64)
    inner = largest = 0.0
    values = 0
    step = max(1, _PART // width)
    for at in range(0, rows, step):
        r, c = one[at : at + step].double(), two[at : at + step].double()
        left_out = ~((r.abs() < beyond) & (c.abs() < beyond))
        if bool(left_out.any()):
            r, c = r.masked_fill(left_out, 0.0), c.masked_fill(left_out, 0.0)
        values += r.numel() - int(left_out.sum())
        d = c - r
        squared, own = d.square(), r.square()
        errors[at : at + step], powers[at : at + step] = squared.sum(1), own.sum(1)
        down += squared.sum(0)
        across += own.sum(0)
        inner += float((d * r).sum())
        largest = max(largest, float(d.abs().max()))
    whole, power = float(errors.sum()), float(powers.sum())
    if not power:
        return _flat(math.nan if whole else 0.0, largest, rows, values)
    if not whole:
        return ErrorNumbers(0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, rows, values)
    each = _relative(errors, powers)
    columns = _relative(down, across)
    median, p90 = torch.quantile(each if rows <= 1 << 20 else each[: 1 << 20], each.new_tensor([0.5, 0.9])).tolist()
    return ErrorNumbers(
        math.sqrt(whole / power),
        median,
        p90,
        float(each.max()),
        float(columns.max()) if rows >= 4 else math.nan,
        abs(inner / power),
        largest,
        rows,
        values,
    )


def _relative(errors: torch.Tensor, powers: torch.Tensor) -> torch.Tensor:
    norms = powers.sqrt()
    least = _SMALL * float(norms[norms > 0].median())
    return errors.sqrt() / norms.clamp_min(least)


def largest_of(several: Iterable[ErrorNumbers]) -> ErrorNumbers:
    """Return the largest of each number; a NaN is none."""
    every = list(several)
    worst = [max((n[at] for n in every if not math.isnan(n[at])), default=math.nan) for at in range(7)]
    return ErrorNumbers._make([*worst, every[0].rows, every[0].values])


def _flat(number: float, largest: float, rows: int, values: int) -> ErrorNumbers:
    return ErrorNumbers(number, number, number, number, number, number, largest, rows, values)


def _rows(tensor: torch.Tensor, axis: int) -> torch.Tensor:
    import torch

    value = tensor.detach()
    if value.is_complex():
        value = torch.view_as_real(value.resolve_conj()).flatten(-2)
    if value.ndim == 0:
        return value.reshape(1, 1)
    if axis != -1 and value.ndim > 2:
        value = value.movedim(axis, -1)
    return value.reshape(-1, value.shape[-1])
