"""How far one value is from another that it should equal, in a few numbers that add no bias.

    measured(wanted, got).error

A tensor is read two or three times in float32 (in float64 where it is float64 itself), or once, in float64, on the GPU
where it lies. Values that stand for minus infinity in a mask are compared as a pattern, since beside them every other
number would vanish.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, NamedTuple

import torch

from layerscope.compare.measure.operands import elsewhere

if TYPE_CHECKING:
    from layerscope.diagnose.judge.nearness import Near

__all__ = ["MASKED", "Measured", "bits", "measured", "rounding"]

MASKED = -6e4  # nothing a model computes is that small on purpose, and float16 can still say it


@dataclass(frozen=True, slots=True)
class Measured:
    """One value against another.

    `error` is the relative L2 error, `scale` the factor that fits best; `worst` is the largest single error and `peak`
    the largest value that was wanted, both over the root mean square of what was wanted. `changed` is the share of
    elements that differ, for integers; `nonfinite` counts the elements that are finite where the other's are not.
    `shape` is False when the shapes cannot be compared. `digest` stands for the bits of what was got, in `dtype`;
    `rounding` is how far off the coarser of the two dtypes is by itself.
    """

    error: float
    scale: float = 1.0
    worst: float = 0.0
    peak: float = 1.0
    changed: float = 0.0
    nonfinite: int = 0
    shape: bool = True
    digest: int = 0
    count: int = 0
    dtype: torch.dtype = torch.float32
    rounding: float = 0.0

    @property
    def equal(self) -> bool:
        """Whether nothing differs at all."""
        return self.shape and not (self.error or self.changed or self.nonfinite)


def measured(wanted: torch.Tensor, got: torch.Tensor) -> Measured:
    """Measure `got` against `wanted`, on the device where `got` lies."""
    count, dtype = got.numel(), got.dtype
    coarse = max(rounding(wanted.dtype), rounding(dtype))
    if wanted.numel() != count:
        return Measured(math.inf, shape=False, count=count, dtype=dtype, rounding=coarse)
    wanted = wanted.detach().reshape(got.shape)
    got = got.detach()
    if wanted.device != got.device:
        wanted = wanted.to(got.device)
    there = _there(wanted, got)
    digest = bits(got) if there is None else _digest(there)
    found = partial(Measured, digest=digest, count=count, dtype=dtype, rounding=coarse)
    if not count or (wanted.dtype == dtype and (torch.equal(wanted, got) if there is None else not there.differing)):
        return found(0.0)
    if wanted.is_complex() or got.is_complex():
        wanted, got = (torch.view_as_real(t) if t.is_complex() else t for t in (wanted, got))
        if wanted.shape != got.shape:
            return Measured(math.inf, shape=False, count=count, dtype=dtype, rounding=coarse)
    if not (wanted.is_floating_point() and got.is_floating_point()):
        differing = (wanted.to(torch.float64) != got.to(torch.float64)).sum() if there is None else there.differing
        changed = float(differing) / count
        return found(changed, changed=changed)
    sums = _sums(wanted, got) if there is None else _Sums(*there[:5], there.nonfinite, there.masked)
    norm, off = math.sqrt(sums.squares), math.sqrt(sums.errors)
    found = partial(found, changed=sums.masked / count, nonfinite=sums.nonfinite)
    if not norm:
        lost = math.inf if off else 0.0
        return found(lost, worst=lost)
    return found(
        off / norm,
        scale=1 + sums.dot / (norm * norm),
        worst=sums.worst / norm * math.sqrt(count),
        peak=sums.peak / norm * math.sqrt(count),
    )


class _Sums(NamedTuple):
    """What is added up: squares of what was wanted, of d, and their product; the largest of d and of what was wanted.

    `nonfinite` and `masked` count the elements that are so on one side only.
    """

    squares: float
    errors: float
    dot: float
    worst: float
    peak: float
    nonfinite: int
    masked: int


def _sums(wanted: torch.Tensor, got: torch.Tensor) -> _Sums:
    wide = torch.float64 if torch.float64 in (wanted.dtype, got.dtype) else torch.float32
    a, b = wanted.to(wide), got.to(wide)
    nonfinite = masked = 0
    low, high = torch.stack([*torch.aminmax(a), *torch.aminmax(b)]).view(2, 2).t().tolist()
    if not all(map(math.isfinite, (*low, *high))) or min(low) < MASKED:
        masks = [t < MASKED for t in (a, b)]  # minus infinity too
        fine = [t.isfinite() | mask for t, mask in zip((a, b), masks, strict=True)]
        nonfinite, masked = int((fine[0] != fine[1]).sum()), int((masks[0] != masks[1]).sum())
        use = fine[0] & fine[1] & ~masks[0] & ~masks[1]
        a, b = (torch.where(use, t, 0.0) for t in (a, b))
    flat, d = a.reshape(-1), (b - a).reshape(-1)
    # A dot product reads as fast as memory gives; torch's norms take several times as long.
    sums = [torch.dot(flat, flat), torch.dot(d, d), torch.dot(flat, d), *torch.aminmax(d), *torch.aminmax(flat)]
    squares, errors, dot, *ends = torch.stack(sums).tolist()
    return _Sums(squares, errors, dot, max(-ends[0], ends[1]), max(-ends[2], ends[3]), nonfinite, masked)


def _there(wanted: torch.Tensor, got: torch.Tensor) -> Near | None:
    """Go through both on the GPU that holds them, where there is one and kernels that take them."""
    if not got.numel() or not elsewhere(got):
        return None
    from layerscope.diagnose.judge import nearness

    if wanted.is_complex() and got.is_complex():
        wanted, got = (torch.view_as_real(t.resolve_conj()) for t in (wanted, got))
    return nearness.near(wanted, got, masked=MASKED) if nearness.takes(wanted, got) else None


def _digest(there: Near) -> int:
    return there.words ^ hash(there.rest)


def rounding(dtype: torch.dtype) -> float:
    """Return how far off a dtype's values are by being rounded to it, relatively and in the root mean square."""
    return torch.finfo(dtype).eps / 4 if dtype.is_floating_point or dtype.is_complex else 0.0


def bits(tensor: torch.Tensor) -> int:
    """Return a number that stands for a tensor's bits and their order."""
    if not tensor.numel():
        return 0
    there = _there(tensor.detach(), tensor.detach())
    if there is not None:
        return _digest(there)
    octets = tensor.detach().contiguous().reshape(-1).view(torch.uint8)
    whole = octets.numel() // 8 * 8
    rest = hash(bytes(octets[whole:].tolist()))
    if not whole:
        return rest
    words = octets[:whole].view(torch.int64)
    odd = torch.arange(1, 2 * words.numel(), 2, device=words.device)
    return int((words * (odd * 0x9E3779B1)).sum()) ^ rest
