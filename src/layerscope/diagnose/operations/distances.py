"""How far the results of two operations are apart, and whether their numbers are the same.

apart(candidate.outputs, reference.outputs)      # the largest relative L2 distance
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch

BLOCKED = -9999.0  # no score is as low: a mask's value, whichever dtype's lowest number it is


def apart(got: Sequence[torch.Tensor], wanted: Sequence[torch.Tensor]) -> float:
    """Return the largest relative L2 distance; infinite where shapes, choices or masks differ."""
    return max((_distance(one, two) for one, two in zip(got, wanted, strict=False)), default=0.0)


def same_value(one: object, two: object) -> bool:
    """Whether two arguments say the same; two dtypes do where one is not given, two masks' values always."""
    if isinstance(one, torch.dtype) or isinstance(two, torch.dtype):
        return one == two or None in (one, two)
    if isinstance(one, float | int) and isinstance(two, float | int):
        return math.isclose(one, two, rel_tol=1e-6) or max(one, two) <= BLOCKED
    return one == two


def _distance(got: torch.Tensor, wanted: torch.Tensor) -> float:
    if got.shape != wanted.shape:
        return math.inf
    one, two = got.detach(), wanted.detach().to(got.device)
    if not (one.is_floating_point() and two.is_floating_point()):
        return 0.0 if torch.equal(one, two.to(one.dtype)) else math.inf
    one, two = one.to(torch.float64), two.to(torch.float64)
    out, wanted_out = ((side <= BLOCKED) | ~side.isfinite() for side in (one, two))
    if not torch.equal(out, wanted_out):
        return math.inf
    one, two = one.masked_fill(out, 0.0), two.masked_fill(out, 0.0)
    size, off = float(torch.linalg.vector_norm(two)), float(torch.linalg.vector_norm(one - two))
    return off / size if size else (math.inf if off else 0.0)
