"""One pass over two tensors on one device: the launches, and what they leave, read as rows of sums.

if takes(reference, candidate):
    found = sweep(reference, candidate, width=4096)
    together(found.swept.together), found.bitwise, found.counts
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from functools import cache
from typing import Any, NamedTuple

import numpy as np
import torch

from layerscope.compare.device.counting import BINS, FIRST_KEY
from layerscope.compare.device.mending import mend
from layerscope.compare.device.reading import READ, THREADS, vector, worth
from layerscope.compare.device.striding import stride
from layerscope.compare.device.taking import WORDS
from layerscope.compare.sums import Alone, Swept, Together
from layerscope.stats.bits import Array
from layerscope.stats.launching import ANY, INTERPRETED, Launching, launching, why_not

__all__ = ["Found", "lying", "on", "programs_of", "stream_of", "sweep", "takes"]

_MOST = 1 << 31  # elements: the counters are 32 bits wide
_LONGEST = 1 << 13  # a token that is longer is taken in several rows
_ROWS = 1 << 10  # elements to a row where there are no tokens


class Found(NamedTuple):
    """What the device leaves of a pair: rows for `sums`, whether all bits agree, how often |d| fell in each bucket."""

    swept: Swept
    bitwise: bool
    counts: Array


def takes(reference: Any, candidate: Any) -> bool:
    """Whether the kernels take this pair: plain tensors, of dtypes they know, on one device that runs them."""
    return not why_not() and _plain(reference) and _plain(candidate) and reference.device == candidate.device


def _plain(tensor: Any) -> bool:
    if type(tensor) not in (torch.Tensor, torch.nn.Parameter) or not _there(tensor):
        return False
    return tensor.layout is torch.strided and tensor.dtype in READ and tensor.numel() < _MOST


def _there(tensor: torch.Tensor) -> bool:
    return tensor.is_cuda


def sweep(
    reference: torch.Tensor, candidate: torch.Tensor, *, exponent: int = 0, epsilon: float = 1e-8, width: int = 0
) -> Found:
    """Sweep two tensors of one shape, divided by a power of two; with a `width`, token by token as well.

    Counts, extremes, the worst element and the buckets are those of the CPU to the bit. Sums are taken in float64 in
    another order, each program's around a centre of its own; relative errors of narrow dtypes are within 1e-12.
    """
    device = reference.device
    sides = (lying(reference), lying(candidate))
    dtypes = (reference.dtype, candidate.dtype)
    narrow = all(READ[dtype].narrow for dtype in dtypes)
    plan = _planned(sides[0].numel(), width, vector(*dtypes))
    programs = min(plan.groups, programs_of(device))
    rows, tokens = 2 * programs * WORDS, 2 * plan.rows if width else 0
    buckets = (1 << 14) + 128 if narrow else (2048 * 64 - FIRST_KEY) + 64
    room = torch.zeros(rows + tokens + buckets // 2, dtype=torch.float64, device=device)
    # Where kernels are interpreted there is no shared memory.
    scratch = torch.zeros(programs * BINS if INTERPRETED else 1, dtype=torch.int32, device=device)
    numbers = (plan.items, plan.span // plan.unit, -exponent, int(np.float64(epsilon).view(np.int64)))
    table, sums = room[rows + tokens :], room[rows if width else 0 :]
    places = (room.data_ptr(), table.data_ptr(), sums.data_ptr(), scratch.data_ptr())
    known = (*dtypes, narrow, exponent != 0, width > 0, plan.unit, plan.columns)
    with on(device):
        for kernel in (stride, mend) if plan.whole else (mend,):
            launch = _launching(kernel, device, *known)(stream_of(device))
            launch(
                *(side.data_ptr() for side in sides), *numbers, *(worth(device, dtype).data_ptr() for dtype in dtypes),
                *places, programs,
            )  # fmt: skip
    brought = room.cpu().numpy()
    found = brought[:rows].reshape(2 * programs, WORDS)
    squares = brought[rows : rows + tokens].reshape(2, -1, width // plan.span if width else 1).sum(axis=2)
    return _read(found, squares, brought[rows + tokens :].view(np.int32), same_dtype=dtypes[0] == dtypes[1])


class _Plan(NamedTuple):
    """How a tensor is laid out in rows of `span` elements: `columns` threads to a row, `groups` of rows abreast."""

    items: int
    span: int
    unit: int
    columns: int
    rows: int
    groups: int
    whole: bool  # whether there is a tile without a rim


def _planned(count: int, width: int, each: int) -> _Plan:
    span = width or _ROWS
    columns = min(max(1 << (span // each).bit_length() - 1, 1), 32) if span >= each else 1
    step = columns * each
    if span > _LONGEST:
        span = next((n * step for n in range(_LONGEST // step, 0, -1) if span % (n * step) == 0), span)
    abreast = THREADS // columns
    rows = -(-count // span)
    unit = each if span % each == 0 else 1
    whole = count // span >= abreast and span >= step
    return _Plan(count, span, unit, columns, rows, -(-rows // abreast), whole)


@cache
def _launching(
    kernel: Any, device: torch.device, reference: torch.dtype, candidate: torch.dtype, narrow: bool, scaled: bool,
    by_token: bool, unit: int, columns: int,
) -> Launching:  # fmt: skip
    sides = READ[reference], READ[candidate]
    word, real = torch.float64, torch.float32
    return launching(
        kernel, device,
        sides[0].item, sides[1].item, ANY, ANY, ANY, ANY, real, real, word, torch.int32, word, torch.int32,
        sides[0].kind, sides[1].kind, reference == candidate, narrow, scaled, by_token, unit,
        THREADS, vector(reference, candidate), columns,
        num_warps=THREADS // 32, maxnreg=128 if kernel is stride else 255,
    )  # fmt: skip


def programs_of(device: torch.device) -> int:
    """How many programs run at once."""
    if device.type != "cuda":
        return 2  # of an interpreter, which runs them one by one
    return 4 * torch.cuda.get_device_properties(device).multi_processor_count


def on(device: torch.device) -> AbstractContextManager[Any]:
    """Make a device the current one, as launches need it."""
    return torch.cuda.device(device) if device.type == "cuda" else nullcontext()


def stream_of(device: torch.device) -> int:
    """The stream that this thread's work on a device goes to."""
    return torch.cuda.current_stream(device).cuda_stream if device.type == "cuda" else 0


def lying(tensor: torch.Tensor) -> torch.Tensor:
    """Return a tensor's values in order, where sixteen bytes can be read at once."""
    tensor = tensor.detach().resolve_neg().contiguous()
    return tensor.clone() if tensor.data_ptr() % 16 else tensor


# Reading what came back -------------------------------------------------------------------------


def _read(rows: Array, squares: Array, table: Array, *, same_dtype: bool) -> Found:
    """Make sums of the distances from a centre into means and spreads."""
    half = len(rows) // 2
    again = rows[:half, 45] != 0
    rows = np.concatenate([rows[:half][~again], rows[half:]])
    rows = rows[rows[:, 0] + rows[:, 20] > 0]
    rows = rows[rows[:, 16].argsort(kind="stable")]  # the first of equal differences comes first
    bitwise = same_dtype and not rows[:, 44].any()
    with np.errstate(all="ignore"):
        pairs = _pairs(rows.T)
        reference, candidate = _own(rows[:, 24:34].T, rows[:, 1]), _own(rows[:, 34:44].T, rows[:, 2])
    if bitwise:
        spread = pairs.reference_spread
        pairs = pairs._replace(candidate=pairs.reference, candidate_spread=spread, product=spread)
        candidate = reference
    counts = table.astype(np.int64)
    counts[0] = int(pairs.count.sum()) - int(counts.sum())
    swept = Swept(np.stack(pairs, axis=1), np.stack(reference, axis=1), np.stack(candidate, axis=1), *squares)
    return Found(swept, bitwise, counts)


def _pairs(column: Array) -> Together:
    number = np.maximum(column[0], 1.0)
    r, c, d = column[4], column[5], column[6]
    none = np.zeros_like(number)
    return Together(
        column[0], column[1] + r / number, none, column[2] + c / number, none, column[3] + d / number,
        np.maximum(column[7] - r * r / number, 0.0), np.maximum(column[8] - c * c / number, 0.0),
        column[9] - r * c / number, np.maximum(column[10] - d * d / number, 0.0),
        column[11], column[12], column[13], column[14], column[15], column[16], column[17], column[18],
        column[19], column[20], column[21], column[22], column[23],
    )  # fmt: skip


def _own(column: Array, centre: Array) -> Alone:
    number = np.maximum(column[0], 1.0)
    spread = np.maximum(column[2] - column[1] * column[1] / number, 0.0)
    return Alone(column[0], centre + column[1] / number, spread, *column[3:])
