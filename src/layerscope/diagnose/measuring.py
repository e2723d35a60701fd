"""How far one value is from another that it should equal, in a few numbers that add no bias.

    measured(wanted, got).error

A tensor is read two or three times in float32 (in float64 where it is float64 itself), wherever it lies. Values that
stand for minus infinity in a mask are compared as a pattern, since beside them every other number would vanish.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

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
    digest = bits(got)
    if not count or (wanted.dtype == dtype and torch.equal(wanted, got)):
        return Measured(0.0, digest=digest, count=count, dtype=dtype, rounding=coarse)
    if wanted.is_complex() or got.is_complex():
        wanted, got = (torch.view_as_real(t) if t.is_complex() else t for t in (wanted, got))
        if wanted.shape != got.shape:
            return Measured(math.inf, shape=False, count=count, dtype=dtype, rounding=coarse)
    if not (wanted.is_floating_point() and got.is_floating_point()):
        changed = float((wanted.to(torch.float64) != got.to(torch.float64)).sum()) / count
        return Measured(changed, changed=changed, digest=digest, count=count, dtype=dtype, rounding=coarse)
    wide = torch.float64 if torch.float64 in (wanted.dtype, got.dtype) else torch.float32
    a, b = wanted.to(wide), got.to(wide)
    changed, nonfinite = 0.0, 0
    low, high = torch.stack([*torch.aminmax(a), *torch.aminmax(b)]).view(2, 2).t().tolist()
    if not all(map(math.isfinite, (*low, *high))) or min(low) < MASKED:
        masks = [t < MASKED for t in (a, b)]  # minus infinity too
        fine = [t.isfinite() | mask for t, mask in zip((a, b), masks, strict=True)]
        nonfinite = int((fine[0] != fine[1]).sum())
        changed = float((masks[0] != masks[1]).sum()) / count
        use = fine[0] & fine[1] & ~masks[0] & ~masks[1]
        a, b = (torch.where(use, t, 0.0) for t in (a, b))
    flat, d = a.reshape(-1), (b - a).reshape(-1)
    # A dot product reads as fast as memory gives; torch's norms take several times as long.
    sums = [torch.dot(flat, flat), torch.dot(d, d), torch.dot(flat, d), *torch.aminmax(d), *torch.aminmax(flat)]
    squares, errors, dot, *ends = torch.stack(sums).tolist()
    norm, off = math.sqrt(squares), math.sqrt(errors)
    worst, peak = max(-ends[0], ends[1]), max(-ends[2], ends[3])
    if not norm:
        lost = math.inf if off else 0.0
        return Measured(
            lost,
            worst=lost,
            changed=changed,
            nonfinite=nonfinite,
            digest=digest,
            count=count,
            dtype=dtype,
            rounding=coarse,
        )
    return Measured(
        error=off / norm,
        scale=1 + dot / (norm * norm),
        worst=worst / norm * math.sqrt(count),
        peak=peak / norm * math.sqrt(count),
        changed=changed,
        nonfinite=nonfinite,
        digest=digest,
        count=count,
        dtype=dtype,
        rounding=coarse,
    )


def rounding(dtype: torch.dtype) -> float:
    """Return how far off a dtype's values are by being rounded to it, relatively and in the root mean square."""
    return torch.finfo(dtype).eps / 4 if dtype.is_floating_point or dtype.is_complex else 0.0


def bits(tensor: torch.Tensor) -> int:
    """Return a number that stands for a tensor's bits and their order."""
    if not tensor.numel():
        return 0
    octets = tensor.detach().contiguous().reshape(-1).view(torch.uint8)
    whole = octets.numel() // 8 * 8
    rest = hash(bytes(octets[whole:].tolist()))
    if not whole:
        return rest
    words = octets[:whole].view(torch.int64)
    odd = torch.arange(1, 2 * words.numel(), 2, device=words.device)
    return int((words * (odd * 0x9E3779B1)).sum()) ^ rest
