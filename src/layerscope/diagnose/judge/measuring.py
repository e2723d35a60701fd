"""How far one value is from another that it should equal, in a few numbers that add no bias.

    measured(wanted, got).error

A tensor is read two or three times in float32 (in float64 where it is float64 itself), piece by piece, where it lies.
Values that stand for minus infinity in a mask are compared as a pattern, since beside them every other number would
vanish.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial

import torch

MASKED = -6e4  # nothing a model computes is that small on purpose, and float16 can still say it
PIECE = 1 << 22  # elements


@dataclass(frozen=True, slots=True)
class Measured:
    """One value against another.

    `error` is the relative L2 error, `scale` the factor that fits best; `worst` is the largest single error and `peak`
    the largest value that was wanted, both over the root mean square of what was wanted. `changed` is the share of
    elements that differ, for integers; `nonfinite` counts the elements that are finite where the other's are not.
    `shape` is False when the shapes cannot be compared, `there` when nothing was got at all. `digest` stands for the
    bits of what was got, in `dtype`; `rounding` is how far off the coarser of the two dtypes is by itself.
    """

    error: float
    scale: float = 1.0
    worst: float = 0.0
    peak: float = 1.0
    changed: float = 0.0
    nonfinite: int = 0
    shape: bool = True
    there: bool = True
    digest: int = 0
    count: int = 0
    dtype: torch.dtype = torch.float32
    rounding: float = 0.0

    @property
    def equal(self) -> bool:
        """Whether nothing differs at all."""
        return self.shape and not (self.error or self.changed or self.nonfinite)


def measured(wanted: torch.Tensor, got: torch.Tensor, *, broadcast: bool = False) -> Measured:
    """Measure `got` against `wanted`, on the device where `got` lies; `broadcast` lets an axis of one stand for all."""
    count, dtype = got.numel(), got.dtype
    coarse = max(rounding(wanted.dtype), rounding(dtype))
    other_shape = Measured(math.inf, shape=False, count=count, dtype=dtype, rounding=coarse)
    wanted, got = wanted.detach().to(got.device), got.detach()
    found = partial(Measured, digest=bits(got), count=count, dtype=dtype, rounding=coarse)
    if wanted.numel() != count:
        if not (broadcast and _stretches(wanted.shape, got.shape)):
            return other_shape
        wanted, got = torch.broadcast_tensors(wanted, got)  # type: ignore[no-untyped-call]
    wanted = wanted.reshape(got.shape)
    if not count or (wanted.dtype == dtype and torch.equal(wanted, got)):
        return found(0.0)
    if wanted.is_complex() or got.is_complex():
        wanted, got = (torch.view_as_real(t) if t.is_complex() else t for t in (wanted, got))
        if wanted.shape != got.shape:
            return other_shape
    size = got.numel()
    if not (wanted.is_floating_point() and got.is_floating_point()):
        changed = sum(int((a.double() != b.double()).sum()) for a, b in _pieces(wanted, got)) / size
        return found(changed, changed=changed)
    sums = [_sums(*pair) for pair in _pieces(wanted, got)]
    squares, errors, dot, nonfinite, masked = map(sum, zip(*(s[:5] for s in sums), strict=True))
    worst, peak = (max(s[at] for s in sums) for at in (5, 6))
    found = partial(found, changed=masked / size, nonfinite=int(nonfinite))
    if not squares:
        lost = math.inf if errors else 0.0
        return found(lost, worst=lost)
    norm = math.sqrt(squares)
    return found(
        math.sqrt(errors) / norm,
        scale=1 + dot / squares,
        worst=worst / norm * math.sqrt(size),
        peak=peak / norm * math.sqrt(size),
    )


def _stretches(one: torch.Size, two: torch.Size) -> bool:
    """Tell whether two shapes differ in axes alone of which one side has a single slice."""
    return len(one) == len(two) and all(
        a == b or (1 in (a, b) and 0 not in (a, b)) for a, b in zip(one, two, strict=True)
    )


def _pieces(*tensors: torch.Tensor) -> Iterator[tuple[torch.Tensor, ...]]:
    """Cut flat tensors into pieces, so that wide copies of large ones are never whole."""
    return zip(*(torch.split(tensor.reshape(-1), PIECE) for tensor in tensors), strict=True)


def _sums(wanted: torch.Tensor, got: torch.Tensor) -> tuple[float, ...]:
    """Sum squares of what was wanted, of d, and their product; count what one side alone has not finite, or masked.

    The last two are the largest of d and of what was wanted.
    """
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
    d = b - a
    # A dot product reads as fast as memory gives; torch's norms take several times as long.
    sums = [torch.dot(a, a), torch.dot(d, d), torch.dot(a, d), *torch.aminmax(d), *torch.aminmax(a)]
    squares, errors, dot, *ends = torch.stack(sums).tolist()
    return squares, errors, dot, nonfinite, masked, max(-ends[0], ends[1]), max(-ends[2], ends[3])


def rounding(dtype: torch.dtype) -> float:
    """Return how far off a dtype's values are by being rounded to it, relatively and in the root mean square."""
    return torch.finfo(dtype).eps / 4 if dtype.is_floating_point or dtype.is_complex else 0.0


def bits(tensor: torch.Tensor) -> int:
    """Return a number that stands for a tensor's bits and their order."""
    if not tensor.numel():
        return 0
    octets = tensor.detach().contiguous().reshape(-1).view(torch.uint8)
    whole = octets.numel() // 8 * 8
    found = hash(bytes(octets[whole:].tolist()))
    total = first = 0
    for (words,) in _pieces(octets[:whole].view(torch.int64)) if whole else ():
        odd = torch.arange(2 * first + 1, 2 * (first + words.numel()), 2, device=words.device)
        total += int((words * (odd * 0x9E3779B1)).sum())
        first += words.numel()
    return total ^ found
