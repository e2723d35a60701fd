"""How far one value is from another that it should equal, in a few numbers that add no bias.

    measured(wanted, got).error

A tensor is read two or three times in float32 (in float64 where it is float64 itself), piece by piece, where it lies.
ResultPair that stand for minus infinity in a mask are compared as a pattern, since beside them every other number would
vanish.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial

import torch

MASKED = -6e4  # nothing a model computes is that small on purpose, and float16 can still say it
PIECE = 1 << 22  # elements


@dataclass(frozen=True, slots=True)
class Distance:
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


def measured(wanted: torch.Tensor, got: torch.Tensor, *, broadcast: bool = False) -> Distance:
    """Measure `got` against `wanted`, on the device where `got` lies; `broadcast` lets an axis of one stand for all."""
    count, dtype = got.numel(), got.dtype
    coarse = max(rounding(wanted.dtype), rounding(dtype))
    other_shape = Distance(math.inf, shape=False, count=count, dtype=dtype, rounding=coarse)
    wanted, got = wanted.detach().to(got.device), got.detach()
    found = partial(Distance, digest=bits(got), count=count, dtype=dtype, rounding=coarse)
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


def relative_l2(got: torch.Tensor, wanted: torch.Tensor) -> float:
    """Return the relative L2 distance of finite values in float64; infinite from all zeros."""
    size, off = (float(torch.linalg.vector_norm(t)) for t in (wanted, got - wanted))
    return off / size if size else (math.inf if off else 0.0)


def precision(dtype: torch.dtype) -> float:
    """Return the distance between 1 and the next number of a dtype; 0 where numbers do not round."""
    return float(torch.finfo(dtype).eps) if dtype.is_floating_point or dtype.is_complex else 0.0


def rounding(dtype: torch.dtype) -> float:
    """Return how far off a dtype's values are by being rounded to it, relatively and in the root mean square."""
    return precision(dtype) / 4


def coarser(one: torch.dtype, other: torch.dtype) -> torch.dtype:
    """Return the dtype that rounds more."""
    return max(one, other, key=precision)


def as_matrix(tensor: torch.Tensor) -> torch.Tensor:
    """Return a tensor as rows of its first axis; a vector is one row."""
    return tensor.reshape(1, -1) if tensor.ndim < 2 else tensor.reshape(tensor.shape[0], -1)


def same(reference: torch.Tensor, candidate: torch.Tensor) -> bool:
    """Whether the candidate's values are the reference's, cast where the dtypes differ."""
    if reference.shape != candidate.shape:
        return False
    dtype = coarser(reference.dtype, candidate.dtype)
    wanted, got = as_matrix(reference), as_matrix(candidate)
    step = max(1, PIECE // max(1, wanted.shape[1]))
    return all(
        torch.equal(
            wanted[at : at + step].to(dtype).to(torch.float64),
            got[at : at + step].to(wanted.device).to(dtype).to(torch.float64),
        )
        for at in range(0, len(wanted), step)
    )


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


BLOCKED = -9999.0  # no score is as low: a mask's value, whichever dtype's lowest number it is


def apart(got: Sequence[torch.Tensor], wanted: Sequence[torch.Tensor]) -> float:
    """Return the largest relative L2 distance; infinite where shapes, choices or masks differ."""
    return max((_distance(one, two) for one, two in zip(got, wanted, strict=False)), default=0.0)


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
    return relative_l2(one.masked_fill(out, 0.0), two.masked_fill(out, 0.0))
