"""How far two tensors are apart, and how far rounding alone takes them.

values = Values.of(case)
values.explained(by=2 * values.wanted)     # whether that is what the candidate has, up to rounding
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from layerscope.diagnose.causes.cause import Case

# Tensors with more elements are looked at in part: every n-th value of the last axis.
LARGEST = 1 << 23
# Another kernel in float32 sums in another order: a few units in the last place, in the root mean square.
_LEAST = 1e-6
# A pattern explains a difference when what it leaves is rounding's, and a third of what it was at most.
_LEFT = 2.0
_SHARE = 1 / 3


@dataclass(frozen=True, slots=True)
class Values:
    """A pair of results in float64, all finite and of one shape, with the error that rounding explains."""

    wanted: torch.Tensor
    got: torch.Tensor
    floor: torch.Tensor | None
    dtype: torch.dtype  # the candidate's
    rounded: torch.dtype  # the coarser of both
    level: float
    error: float

    @classmethod
    def of(cls, case: Case) -> Values | None:
        """Return the pair in a form that patterns can be sought in; None where there is none."""
        if case.wanted is None or case.got is None or case.wanted.shape != case.got.shape or not case.got.numel():
            return None
        if not (case.wanted.is_floating_point() and case.got.is_floating_point()):
            return None
        wanted, got = wide(case.wanted), wide(case.got).to(case.wanted.device)
        if not (wanted.isfinite().all() and got.isfinite().all()):
            return None
        floor = wide(case.floor).to(wanted.device) if case.floor is not None else None
        floor = floor if floor is not None and floor.shape == wanted.shape and floor.isfinite().all() else None
        rounded = coarser(case.wanted.dtype, case.got.dtype)
        unit = precision(rounded)
        level = max(_LEAST, unit / 4, away(floor, wanted)) if floor is not None else max(_LEAST, 4 * unit)
        return cls(wanted, got, floor, case.got.dtype, rounded, level, away(got, wanted))

    @property
    def differ(self) -> bool:
        """Whether there is anything for a pattern to explain."""
        return self.error > self.level

    def explained(self, by: torch.Tensor, got: torch.Tensor | None = None) -> bool:
        """Whether this is what the candidate has (or a part of it), up to rounding."""
        left = away(self.got if got is None else got, by)
        return left <= _LEFT * self.level and left <= _SHARE * self.error


def wide(tensor: torch.Tensor) -> torch.Tensor:
    """Return a tensor's values in float64, thinned out where there are too many."""
    tensor = tensor.detach()
    if tensor.numel() > LARGEST and tensor.ndim:
        tensor = tensor[..., :: -(-tensor.numel() // LARGEST)]
    return tensor.to(torch.float64)


def away(one: torch.Tensor, other: torch.Tensor) -> float:
    """Return the relative L2 distance of one tensor from the other; infinite from all zeros."""
    size = float(torch.linalg.vector_norm(other))
    apart = float(torch.linalg.vector_norm(one - other))
    return apart / size if size else (float("inf") if apart else 0.0)


def precision(dtype: torch.dtype) -> float:
    """Return the distance between 1 and the next number of a dtype; 0 where numbers do not round."""
    return float(torch.finfo(dtype).eps) if dtype.is_floating_point or dtype.is_complex else 0.0


def coarser(one: torch.dtype, other: torch.dtype) -> torch.dtype:
    """Return the dtype that rounds more."""
    return max(one, other, key=precision)
