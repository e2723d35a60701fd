"""How near one tensor is to another, in the few numbers that a diagnosis asks for (Triton).

    near(wanted, got).errors

One launch and one copy of a few numbers. What stands for minus infinity in a mask, and what is not finite, is left out
of the sums and counted where only one side has it.
"""

from __future__ import annotations

from functools import cache
from typing import Any, NamedTuple

import numpy as np
import torch

from layerscope.compare.device.pairs import lying, on, programs_of, stream_of
from layerscope.compare.device.reading import READ, THREADS, values, vector, worth
from layerscope.stats.launching import ANY, Launching, constant, jit, launching, tl

__all__ = ["Near", "near"]

_WORDS = 16
_TAIL = 8  # bytes after the last whole word of eight, in a row of their own
_COLUMNS, _LAST = constant(_WORDS), constant(_TAIL)
_WEIGHT = constant(0x9E3779B1)


class Near(NamedTuple):
    """Sums over the elements that are finite and not masked on both sides, and counts of the others.

    `squares` of what was wanted, `errors` the squares of d, `dot` the product of both; `worst` and `peak` the largest
    |d| and |wanted|. `differing` counts elements of unequal value, a NaN being equal to nothing, `nonfinite` and
    `masked` those that are NaN or plus infinity, or masked, on one side only. `words` is the sum of the eight-byte
    words of `got`, each times an odd multiple of a constant, and `rest` its last bytes.
    """

    squares: float
    errors: float
    dot: float
    worst: float
    peak: float
    differing: int
    nonfinite: int
    masked: int
    words: int
    rest: bytes


def near(wanted: torch.Tensor, got: torch.Tensor, *, masked: float) -> Near:
    """Compare two tensors of as many elements on one device; below `masked`, a value stands for minus infinity."""
    device, count = got.device, got.numel()
    sides = (lying(wanted), lying(got))
    dtypes = (wanted.dtype, got.dtype)
    programs = min(-(-count // (THREADS * vector(*dtypes))), programs_of(device))
    room = torch.empty((programs + 1, _WORDS), dtype=torch.float64, device=device)
    with on(device):
        launch = _launching(device, *dtypes)(stream_of(device))
        launch(
            *(side.data_ptr() for side in sides), count, int(np.float64(masked).view(np.int64)),
            *(worth(device, dtype).data_ptr() for dtype in dtypes), room.data_ptr(), programs,
        )  # fmt: skip
    rows = room.cpu().numpy()
    rest, rows = rows[-1, : count * got.dtype.itemsize % _TAIL], rows[:-1]
    sums, ends, counts = rows[:, :3].sum(axis=0), rows[:, 3:5].max(axis=0), rows[:, 5:8].sum(axis=0)
    words = int(rows[:, 8].view(np.int64).sum())  # which wraps, as in the kernel
    return Near._make((*sums.tolist(), *ends.tolist(), *map(int, counts), words, bytes(rest.astype(np.uint8))))


@cache
def _launching(device: torch.device, wanted: torch.dtype, got: torch.dtype) -> Launching:
    sides = READ[wanted], READ[got]
    narrow = sides[0].narrow and sides[1].narrow
    return launching(
        _compare, device,
        sides[0].item, sides[1].item, ANY, ANY, torch.float32, torch.float32, torch.float64,
        sides[0].kind, sides[1].kind, narrow, THREADS, vector(wanted, got), got.itemsize,
        num_warps=THREADS // 32, maxnreg=80,
    )  # fmt: skip


@jit
def _number(condition: tl.tensor) -> Any:
    return tl.sum(condition.to(tl.int32), 1)


@jit
def _taken(
    a: tl.tensor, b: tl.tensor, limit: tl.tensor,
    squares: tl.tensor, errors: tl.tensor, dot: tl.tensor, worst: tl.tensor, peak: tl.tensor,
    differing: tl.tensor, nonfinite: tl.tensor, masked: tl.tensor,
) -> Any:  # fmt: skip
    """Take one tile in; zeros on both sides change nothing."""
    differing += _number(a != b)
    fine_a, fine_b = a < float("inf"), b < float("inf")  # minus infinity is a mask's
    mask_a, mask_b = a < limit, b < limit
    nonfinite += _number(fine_a != fine_b)
    masked += _number(mask_a != mask_b)
    use = fine_a & fine_b & ~mask_a & ~mask_b
    x, y = tl.where(use, a, 0.0), tl.where(use, b, 0.0)
    peak = tl.maximum(peak, tl.max(tl.abs(x), 1))
    worst = tl.maximum(worst, tl.max(tl.abs(y - x), 1))
    x, y = x.to(tl.float64), y.to(tl.float64)
    d = y - x
    squares += tl.sum(x * x, 1)
    errors += tl.sum(d * d, 1)
    dot += tl.sum(x * d, 1)
    return squares, errors, dot, worst, peak, differing, nonfinite, masked


@jit
def _compare(
    wanted: tl.tensor, got: tl.tensor, count: tl.tensor, masked: tl.tensor,
    worth_a: tl.tensor, worth_b: tl.tensor, rows: tl.tensor,
    kind_a: tl.constexpr, kind_b: tl.constexpr, narrow: tl.constexpr,
    threads: tl.constexpr, vector: tl.constexpr, width: tl.constexpr,
) -> None:  # fmt: skip
    """A row per program: 0 squares, 1 errors, 2 dot, 3 worst, 4 peak, 5 differing, 6 nonfinite, 7 masked, 8 words."""
    real: tl.constexpr = tl.float32 if narrow else tl.float64
    tile: tl.constexpr = threads * vector
    each: tl.constexpr = tile * width // 8  # words of eight bytes in a tile
    program = tl.program_id(0).to(tl.int64)
    programs = tl.num_programs(0)
    size = count.to(tl.int64)
    tiles = (size + tile - 1) // tile
    start = program * tiles // programs * tile
    stop = tl.minimum((program + 1) * tiles // programs * tile, size)
    whole = start + (stop - start) // tile * tile
    lanes = tl.arange(0, threads)[:, None] * vector + tl.arange(0, vector)[None, :]
    lane = tl.arange(0, each).to(tl.int64)
    memory = got.to(tl.pointer_type(tl.uint64))
    total = size * width // 8
    limit = masked.to(tl.int64).to(tl.float64, bitcast=True).to(real)

    squares = tl.zeros([threads], tl.float64)
    errors = tl.zeros([threads], tl.float64)
    dot = tl.zeros([threads], tl.float64)
    worst = tl.zeros([threads], real)
    peak = tl.zeros([threads], real)
    differing = tl.zeros([threads], tl.int32)
    nonfinite = tl.zeros([threads], tl.int32)
    apart = tl.zeros([threads], tl.int32)
    words = tl.zeros([each], tl.uint64)
    for at in tl.range(start, whole, tile, loop_unroll_factor=2):  # two loads under way instead of one
        a = values(tl.load(wanted + at + lanes), worth_a, kind_a).to(real)
        b = values(tl.load(got + at + lanes), worth_b, kind_b).to(real)
        squares, errors, dot, worst, peak, differing, nonfinite, apart = _taken(
            a, b, limit, squares, errors, dot, worst, peak, differing, nonfinite, apart
        )
        index = at // 8 * width + lane
        words += tl.load(memory + index) * ((index * 2 + 1).to(tl.uint64) * _WEIGHT)
    for at in tl.range(whole, stop, tile):
        within = at + lanes < stop
        a = values(tl.load(wanted + at + lanes, mask=within, other=0), worth_a, kind_a)
        b = values(tl.load(got + at + lanes, mask=within, other=0), worth_b, kind_b)
        a, b = tl.where(within, a, 0.0).to(real), tl.where(within, b, 0.0).to(real)
        squares, errors, dot, worst, peak, differing, nonfinite, apart = _taken(
            a, b, limit, squares, errors, dot, worst, peak, differing, nonfinite, apart
        )
        index = at // 8 * width + lane
        words += tl.load(memory + index, mask=index < total, other=0) * ((index * 2 + 1).to(tl.uint64) * _WEIGHT)

    row = rows + program * _COLUMNS
    tl.store(row, tl.sum(squares, 0))
    tl.store(row + 1, tl.sum(errors, 0))
    tl.store(row + 2, tl.sum(dot, 0))
    tl.store(row + 3, tl.max(worst, 0).to(tl.float64))
    tl.store(row + 4, tl.max(peak, 0).to(tl.float64))
    tl.store(row + 5, tl.sum(differing.to(tl.int64), 0).to(tl.float64))
    tl.store(row + 6, tl.sum(nonfinite.to(tl.int64), 0).to(tl.float64))
    tl.store(row + 7, tl.sum(apart.to(tl.int64), 0).to(tl.float64))
    tl.store(row + 8, tl.sum(words, 0).to(tl.float64, bitcast=True))
    if program == 0:
        rest = tl.arange(0, _LAST)
        octets = got.to(tl.pointer_type(tl.uint8)) + total * 8 + rest
        left = tl.load(octets, mask=total * 8 + rest < size * width, other=0)
        tl.store(rows + programs * _COLUMNS + rest, left.to(tl.float64))
