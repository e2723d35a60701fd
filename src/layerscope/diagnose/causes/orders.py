"""Find the order that turns one tensor's slices into another's, and say what kind of order it is.

    order_of(weight, weight[[1, 0, 2]], axis=0)      # Order: "with 0 and 1 exchanged"

Slices are matched by sorting one number each, so that fifty thousand of them cost no more than a pass, and the match is
verified by undoing it.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch

from layerscope.diagnose.causes.closeness import coarser
from layerscope.diagnose.causes.sums import same

_PIECE = 1 << 20
_NEAREST = 2048  # slices that are compared each with each


@dataclass(frozen=True, slots=True)
class Order:
    """Place i holds what stood at `places[i]`: in words, how many moved, how large the blocks are that move as one."""

    places: tuple[int, ...]
    because: str
    moved: int
    block: int = 1

    def __str__(self) -> str:
        return self.because

    @property
    def evidence(self) -> dict[str, object]:
        """The order as plain values, cut short where it is long."""
        return {"moved": self.moved, "block": self.block, "places": self.places[:256]}


def order_of(reference: torch.Tensor, candidate: torch.Tensor, *, axis: int) -> Order | None:
    """Return the order of slices along an axis that makes the candidate of the reference, exactly but for a cast."""
    if reference.shape[axis] < 2:
        return None
    dtype = coarser(reference.dtype, candidate.dtype)
    wanted, got = _signatures(reference, axis, dtype), _signatures(candidate, axis, dtype).to(reference.device)
    ranks, theirs = wanted.sort(stable=True), got.sort(stable=True)
    if not torch.allclose(ranks.values, theirs.values, rtol=1e-9, atol=1e-12 * float(wanted.abs().max())):
        return None
    places = torch.empty_like(ranks.indices)
    places[theirs.indices] = ranks.indices
    if not same(reference.index_select(axis, places), candidate):
        return None
    return described(places)


def nearest_order(wanted: torch.Tensor, got: torch.Tensor, *, axis: int) -> torch.Tensor | None:
    """Return which slice each of the candidate's is nearest to; None where two are nearest to the same."""
    one, two = (side.movedim(axis, 0).reshape(side.shape[axis], -1) for side in (wanted, got))
    if not 2 <= len(one) <= _NEAREST:
        return None
    apart = one.square().sum(1)[None] - 2 * (two @ one.T)
    places = apart.argmin(1)
    return places if len(set(places.tolist())) == len(places) else None


def described(places: torch.Tensor) -> Order | None:
    """Put an order into words; None where nothing moved."""
    count = len(places)
    plain = torch.arange(count, device=places.device)
    off = (places != plain).nonzero().flatten().tolist()
    if not off:
        return None
    found = tuple(int(place) for place in places)
    if len(off) == 2:
        return Order(found, f"with {off[0]} and {off[1]} exchanged", 2)
    if torch.equal(places, plain.flip(0)):
        return Order(found, "in reverse order", len(off))
    turn = found[0]
    if torch.equal(places, plain.roll(-turn)):
        return Order(found, f"rolled by {-turn if turn <= count // 2 else count - turn}", len(off))
    for size in _divisors(count):
        if torch.equal(places, plain.view(size, -1).T.flatten()):
            return Order(found, f"interleaved, as of {size} blocks read one value at a time", len(off))
    for size in _divisors(count):
        blocks = places.view(-1, size)
        if torch.equal(blocks, blocks[:, :1] + plain[:size]) and bool((blocks[:, 0] % size == 0).all()):
            return Order(found, f"in another order of blocks of {size}", len(off), size)
    for size in _divisors(count):
        inside = plain[:size].view(2, -1).T.flatten() if size % 2 == 0 else plain[:size]
        for pattern in (inside, inside.argsort()):
            if torch.equal(places.view(-1, size), plain.view(-1, size)[:, pattern]):
                return Order(
                    found, f"interleaved by halves within blocks of {size}, as the other rotary layout", len(off)
                )
    return Order(found, f"in another order ({len(off):,} of {count:,} stand elsewhere)", len(off))


def _divisors(count: int) -> Iterator[int]:
    """The sizes that blocks can have, large ones first."""
    return (size for size in range(count // 2, 1, -1) if count % size == 0)


def _signatures(tensor: torch.Tensor, axis: int, dtype: torch.dtype) -> torch.Tensor:
    """One number per slice that no other slice has, but by chance."""
    slices = tensor.movedim(axis, 0)
    width = slices[0].numel()
    weights = torch.randn(width, generator=torch.Generator().manual_seed(7), dtype=torch.float64).to(tensor.device)
    step = max(1, _PIECE // max(1, width))
    pieces = (slices[at : at + step].to(dtype).to(torch.float64) for at in range(0, len(slices), step))
    return torch.cat([(piece.reshape(len(piece), -1) * weights).sum(1) for piece in pieces])
