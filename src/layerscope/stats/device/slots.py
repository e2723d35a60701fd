"""Room on a device for the numbers of several tensors, and the launches that fill and empty it.

slots = Slots(device, "full", stream)      # room for the numbers of several tensors
slots.start(0, tensor)                     # one launch on the model's stream
sheet = slots.gather(1)                    # one more, for all of them
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import cache
from typing import Literal, NamedTuple

import numpy as np
import torch

from layerscope.stats.bits import Array, byte_values
from layerscope.stats.device.sweeping import PROGRAMS, WORDS, gather, peak, sweep
from layerscope.stats.launching import ANY, Launch, launching
from layerscope.stats.prints import WEIGHTS

__all__ = ["KINDS", "Level", "Sheet", "Slots", "prepare", "takes"]


class _Kind(NamedTuple):
    """How a kernel reads one dtype: as which numbers, from items of which width, how many threads take how many."""

    name: Literal["float32", "bfloat16", "float16", "float64", "integer", "byte"]
    item: torch.dtype
    threads: int
    vector: int


KINDS = {
    torch.float32: _Kind("float32", torch.int32, 256, 4),
    torch.bfloat16: _Kind("bfloat16", torch.int16, 128, 8),
    torch.float16: _Kind("float16", torch.int16, 128, 8),
    torch.float64: _Kind("float64", torch.int64, 256, 4),
    **{t: _Kind("integer", t, 128, 8) for t in (torch.int16, torch.uint16)},
    **{t: _Kind("integer", t, 256, 4) for t in (torch.int32, torch.uint32, torch.int64, torch.uint64)},
    **{
        getattr(torch, name): _Kind("byte", torch.int8, 128, 8)
        for name in (
            "bool", "int8", "uint8",
            "float8_e4m3fn", "float8_e4m3fnuz", "float8_e5m2", "float8_e5m2fnuz", "float8_e8m0fnu",
        )
        if hasattr(torch, name)
    },
}  # fmt: skip

Level = Literal["moments", "full"]

_MOST = 1 << 31  # items of one tensor: the bucket counters are 32 bits wide


def takes(tensor: torch.Tensor) -> bool:
    """Whether the kernels know this tensor's dtype, and have counters wide enough."""
    return tensor.dtype in KINDS and tensor.numel() < _MOST


def prepare(device: torch.device, dtypes: Iterable[torch.dtype], level: Level) -> None:
    """Compile the kernels for these dtypes now, or load them from Triton's cache, lest the first tensor wait for it."""
    for dtype in dtypes:
        if dtype in KINDS:
            _sweeping(device, dtype, level == "full")
            _gathering(device, _buckets(level, wide=dtype is torch.float64))


class Sheet(NamedTuple):
    """What a gathering leaves on the device: a head for each tensor, and one list of all their buckets."""

    heads: torch.Tensor
    lists: torch.Tensor  # places, and how often each


class Slots:
    """Room on one stream of one device for the numbers of `size` tensors of one level; float64's buckets take more.

    Whoever calls sees to it that a slot is started once between two calls of `gather`, which empties them all: what is
    launched later on one stream runs later.
    """

    def __init__(self, device: torch.device, level: Level, stream: int, *, wide: bool = False) -> None:
        self.size = 8 if wide else 128 if level == "full" else 512
        self._full = level == "full"
        self._buckets = _buckets(level, wide=wide)
        self._device = device
        self._stream = stream
        self._rows = torch.zeros((self.size, (PROGRAMS + 1) * WORDS), dtype=torch.int64, device=device)
        self._tables = torch.zeros((self.size, max(self._buckets, 4)), dtype=torch.int32, device=device)
        self._cursors = torch.zeros((2, 4), dtype=torch.int32, device=device)
        self._turn = 0
        self._weights = _on(device, WEIGHTS.view(np.int64))
        self._worth: dict[torch.dtype, torch.Tensor] = {}
        self._programs = _most_programs(device)
        self._sweeps: dict[torch.dtype, Callable[[int, int, int], None]] = {}

    def start(self, index: int, tensor: torch.Tensor) -> None:
        """Launch the sweep of a contiguous tensor; on this stream, its memory may be changed or given back at once."""
        launch = self._sweeps.get(tensor.dtype)
        if launch is None:
            launch = self._sweeps[tensor.dtype] = self._sweep_of(tensor.dtype)
        launch(index, tensor.data_ptr(), tensor.numel())

    def gather(self, used: int) -> Sheet:
        """Launch the gathering of the first `used` slots."""
        sheet = Sheet(
            torch.empty((used, 32), dtype=torch.int64, device=self._device),
            torch.empty((2, used * self._buckets), dtype=torch.int32, device=self._device),
        )
        cursor, other = self._cursors[self._turn].data_ptr(), self._cursors[1 - self._turn].data_ptr()
        self._turn = 1 - self._turn
        _gathering(self._device, self._buckets)(
            used, self._stream,
            self._rows.data_ptr(), self._tables.data_ptr(), cursor, other,
            sheet.heads.data_ptr(), sheet.lists[0].data_ptr(), sheet.lists[1].data_ptr(), self._buckets,
        )  # fmt: skip
        return sheet

    def _sweep_of(self, dtype: torch.dtype) -> Callable[[int, int, int], None]:
        """Return a launch with as little as possible left to do in it."""
        kind = KINDS[dtype]
        sweeps = _sweeping(self._device, dtype, self._full)
        peaks = _peaking(self._device) if dtype is torch.float64 else None
        worth = _on(self._device, byte_values(str(dtype)[6:]) if kind.name == "byte" else np.zeros(2))
        self._worth[dtype] = worth
        rows, row = self._rows.data_ptr(), self._rows.stride(0) * 8
        tables, table = self._tables.data_ptr(), self._tables.stride(0) * 4
        known = (self._weights.data_ptr(), worth.data_ptr(), kind.name, self._full, kind.threads, kind.vector)
        tile, most, stream = kind.threads * kind.vector, self._programs, self._stream

        def launch(index: int, items: int, count: int) -> None:
            tiles = -(-count // tile)
            each = -(-tiles // most)
            slot = rows + index * row
            if peaks is not None:
                peaks(-(-count // 4096), stream, items, count, slot, 4096)
            sweeps(-(-tiles // each), stream, items, count, each, slot, tables + index * table, *known)

        return launch


def _buckets(level: Level, *, wide: bool) -> int:
    return 0 if level == "moments" else 1 << (18 if wide else 15)


@cache
def _sweeping(device: torch.device, dtype: torch.dtype, full: bool) -> Launch:
    kind = KINDS[dtype]
    return launching(
        sweep, device,
        kind.item, ANY, ANY, torch.int64, torch.int32, torch.uint64, torch.float64,
        kind.name, full, kind.threads, kind.vector,
        num_warps=kind.threads // 32, maxnreg=128 if full else 96,
    )  # fmt: skip


@cache
def _peaking(device: torch.device) -> Launch:
    return launching(peak, device, torch.int64, ANY, torch.int64, 4096, num_warps=8)


@cache
def _gathering(device: torch.device, buckets: int) -> Launch:
    word, number = torch.int64, torch.int32
    return launching(
        gather, device, word, number, number, number, word, number, number, buckets, num_warps=16 if buckets else 4
    )


def _most_programs(device: torch.device) -> int:
    if device.type != "cuda":
        return 4  # of an interpreter, which runs them one by one
    return min(PROGRAMS, 4 * torch.cuda.get_device_properties(device).multi_processor_count)


def _on(device: torch.device, numbers: Array) -> torch.Tensor:
    """Send numbers to a device without waiting for them to arrive."""
    there = torch.from_numpy(numbers)
    return there if device.type == "cpu" else there.pin_memory().to(device, non_blocking=True)
