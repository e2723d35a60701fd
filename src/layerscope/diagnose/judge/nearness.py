"""How near one tensor is to another, in the few numbers that a diagnosis asks for (Triton).

    if takes(wanted, got):
        near(wanted, got, masked=-6e4).errors

Both are read once on the GPU that holds them: one launch, and one copy of a few numbers. What stands for minus infinity
in a mask, and what is not finite, is left out of the sums and counted where only one side has it.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from functools import cache
from typing import Any, Literal, NamedTuple

import numpy as np
import torch

from layerscope.stats.launching import ANY, Launching, constant, jit, launching, tl, why_not
from layerscope.stats.tensor_views import byte_values

__all__ = ["Near", "near", "takes"]

_MOST = 1 << 31  # elements: the counters are 32 bits wide
_WORDS = 16
_TAIL = 8  # bytes after the last whole word of eight, in a row of their own
_COLUMNS, _LAST = constant(_WORDS), constant(_TAIL)
_WEIGHT = constant(0x9E3779B1)
_THREADS = 128  # of one program


class _Read(NamedTuple):
    """How one dtype is read: as which numbers, from items of which type, and whether float32 holds them exactly."""

    kind: Literal["float32", "bfloat16", "float16", "float64", "byte", "short", "integer"]
    item: torch.dtype
    narrow: bool


_READ = {
    torch.float32: _Read("float32", torch.int32, True),
    torch.bfloat16: _Read("bfloat16", torch.int16, True),
    torch.float16: _Read("float16", torch.int16, True),
    torch.float64: _Read("float64", torch.int64, False),
    **{t: _Read("short", t, True) for t in (torch.int16, torch.uint16)},
    **{t: _Read("integer", t, False) for t in (torch.int32, torch.uint32, torch.int64, torch.uint64)},
    **{
        getattr(torch, name): _Read("byte", torch.uint8, True)
        for name in (
            "bool", "int8", "uint8",
            "float8_e4m3fn", "float8_e4m3fnuz", "float8_e5m2", "float8_e5m2fnuz", "float8_e8m0fnu",
        )
        if hasattr(torch, name)
    },
}  # fmt: skip


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


def takes(wanted: torch.Tensor, got: torch.Tensor) -> bool:
    """Whether the kernel takes this pair: plain tensors, of dtypes it knows, on one device that runs it."""
    return not why_not() and _plain(wanted) and _plain(got) and wanted.device == got.device


def _plain(tensor: torch.Tensor) -> bool:
    if type(tensor) not in (torch.Tensor, torch.nn.Parameter) or not _there(tensor):
        return False
    return tensor.layout is torch.strided and tensor.dtype in _READ and tensor.numel() < _MOST


def _there(tensor: torch.Tensor) -> bool:
    return tensor.is_cuda


def near(wanted: torch.Tensor, got: torch.Tensor, *, masked: float) -> Near:
    """Compare two tensors of as many elements on one device; below `masked`, a value stands for minus infinity."""
    device, count = got.device, got.numel()
    sides = (_lying(wanted), _lying(got))
    dtypes = (wanted.dtype, got.dtype)
    programs = min(-(-count // (_THREADS * _vector(*dtypes))), _programs_of(device))
    room = torch.empty((programs + 1, _WORDS), dtype=torch.float64, device=device)
    with _on(device):
        launch = _launching(device, *dtypes)(_stream_of(device))
        launch(
            *(side.data_ptr() for side in sides), count, int(np.float64(masked).view(np.int64)),
            *(_worth(device, dtype).data_ptr() for dtype in dtypes), room.data_ptr(), programs,
        )  # fmt: skip
    rows = room.cpu().numpy()
    rest, rows = rows[-1, : count * got.dtype.itemsize % _TAIL], rows[:-1]
    sums, ends, counts = rows[:, :3].sum(axis=0), rows[:, 3:5].max(axis=0), rows[:, 5:8].sum(axis=0)
    words = int(rows[:, 8].view(np.int64).sum())  # which wraps, as in the kernel
    return Near._make((*sums.tolist(), *ends.tolist(), *map(int, counts), words, bytes(rest.astype(np.uint8))))


@cache
def _launching(device: torch.device, wanted: torch.dtype, got: torch.dtype) -> Launching:
    sides = _READ[wanted], _READ[got]
    narrow = sides[0].narrow and sides[1].narrow
    return launching(
        _compare, device,
        sides[0].item, sides[1].item, ANY, ANY, torch.float32, torch.float32, torch.float64,
        sides[0].kind, sides[1].kind, narrow, _THREADS, _vector(wanted, got), got.itemsize,
        num_warps=_THREADS // 32, maxnreg=80,
    )  # fmt: skip


def _vector(*dtypes: torch.dtype) -> int:
    """How many elements a thread takes at a time: 16 bytes of the widest, and not more than eight."""
    return min(16 // max(dtype.itemsize for dtype in dtypes), 8)


@cache
def _worth(device: torch.device, dtype: torch.dtype) -> torch.Tensor:
    """What each byte of a dtype is worth, in the memory of a device; of wider ones, nothing."""
    known = byte_values(str(dtype)[6:]) if _READ[dtype].kind == "byte" else [0.0, 0.0]
    return torch.tensor(known, dtype=torch.float32).to(device)


def _programs_of(device: torch.device) -> int:
    """How many programs run at once."""
    if device.type != "cuda":
        return 2  # of an interpreter, which runs them one by one
    return 4 * torch.cuda.get_device_properties(device).multi_processor_count


def _on(device: torch.device) -> AbstractContextManager[Any]:
    """Make a device the current one, as launches need it."""
    return torch.cuda.device(device) if device.type == "cuda" else nullcontext()


def _stream_of(device: torch.device) -> int:
    """The stream that this thread's work on a device goes to."""
    return torch.cuda.current_stream(device).cuda_stream if device.type == "cuda" else 0


def _lying(tensor: torch.Tensor) -> torch.Tensor:
    """Return a tensor's values in order, where sixteen bytes can be read at once."""
    tensor = tensor.detach().resolve_neg().contiguous()
    return tensor.clone() if tensor.data_ptr() % 16 else tensor


# Kernels ----------------------------------------------------------------------------------------


@jit
def _values(raw: tl.tensor, worth: tl.tensor, kind: tl.constexpr) -> Any:
    """What items are worth: in float32 where that holds them exactly, else in float64."""
    if kind == "bfloat16":
        return (raw.to(tl.uint16, bitcast=True).to(tl.uint32) << 16).to(tl.float32, bitcast=True)
    elif kind == "float16":  # noqa: RET505  a branch that is not taken must not be compiled
        return raw.to(tl.float16, bitcast=True).to(tl.float32)
    elif kind == "byte":
        return tl.load(worth + raw.to(tl.int32))
    elif kind == "short":
        return raw.to(tl.float32)
    elif kind == "integer":
        return raw.to(tl.float64)
    elif kind == "float32":
        return raw.to(tl.float32, bitcast=True)
    else:
        return raw.to(tl.float64, bitcast=True)


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
        a = _values(tl.load(wanted + at + lanes), worth_a, kind_a).to(real)
        b = _values(tl.load(got + at + lanes), worth_b, kind_b).to(real)
        squares, errors, dot, worst, peak, differing, nonfinite, apart = _taken(
            a, b, limit, squares, errors, dot, worst, peak, differing, nonfinite, apart
        )
        index = at // 8 * width + lane
        words += tl.load(memory + index) * ((index * 2 + 1).to(tl.uint64) * _WEIGHT)
    for at in tl.range(whole, stop, tile):
        within = at + lanes < stop
        a = _values(tl.load(wanted + at + lanes, mask=within, other=0), worth_a, kind_a)
        b = _values(tl.load(got + at + lanes, mask=within, other=0), worth_b, kind_b)
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
