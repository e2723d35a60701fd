"""Room on a device for the numbers of several tensors, and the launches that fill and empty it.

slots = Slots(device, "full", stream)          # room for the numbers of several tensors
start = slots.starting(tensor.dtype)
start(0, tensor.data_ptr(), tensor.numel())    # one launch on the model's stream
buffer = slots.buffer(1)
slots.gather(buffer)                            # one more, for all of them, straight to the host
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import cache
from typing import Literal, NamedTuple, TypeAlias

import numpy as np
import torch

from layerscope.stats.device.sweeping import HEAD, PROGRAMS, WORDS, gather, peak, sweep, sweep_all
from layerscope.stats.fingerprints import WEIGHTS
from layerscope.stats.launching import ANY, Launching, launching
from layerscope.stats.tensor_views import Array, byte_values


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
Start: TypeAlias = Callable[[int, int, int], None]  # slot, address, number of items
StartAll: TypeAlias = Callable[[int, int, int, int], None]  # first slot, address of entries, how many, programs to each

MOST = 1 << 31  # items of one tensor: the bucket counters are 32 bits wide


def takes(tensor: torch.Tensor) -> bool:
    """Whether the kernels know this tensor's dtype, and have counters wide enough."""
    return tensor.dtype in KINDS and tensor.numel() < MOST


def prepare(device: torch.device, dtypes: Iterable[torch.dtype], level: Level) -> None:
    """Compile the kernels for these dtypes now, or load them from Triton's cache, lest the first tensor wait for it."""
    for dtype in dtypes:
        if dtype in KINDS:
            _sweeping(device, dtype, level == "full")
            if dtype is not torch.float64:
                _sweeping_all(device, dtype, level == "full")
            _gathering(device, _buckets(level, wide=dtype is torch.float64))


class ResultBuffer(NamedTuple):
    """What a gathering leaves on the host: a head for each tensor and, behind them, one list of all their buckets.

    It is as long as the list can be, though most of that is hardly ever written to.
    """

    words: torch.Tensor  # page-locked
    used: int  # how many tensors
    buckets: int  # that one of them has at most: none where they were not asked for
    address: int  # of the words


class Slots:
    """Room on one stream of one device for the numbers of `size` tensors of one level; float64's buckets take more.

    The caller starts a slot once between two calls of `gather`, which empties them all: what is
    launched later on one stream runs later. A buffer is a little less than 32 MiB with sketches, 16 with those of
    float64, and 128 KiB without: page-locked memory comes in powers of two.
    """

    def __init__(self, device: torch.device, level: Level, stream: int, *, wide: bool = False) -> None:
        self.size = 7 if wide else 120 if level == "full" else 448
        self._full = level == "full"
        self._buckets = _buckets(level, wide=wide)
        self._device = device
        self._stream = stream
        self._rows = torch.zeros((self.size, (PROGRAMS + 1) * WORDS), dtype=torch.int64, device=device)
        self._tables = torch.zeros((self.size, max(self._buckets, 4)), dtype=torch.int32, device=device)
        self._cursors = torch.zeros((2, 4), dtype=torch.int32, device=device)
        self._lying = self._rows.data_ptr(), self._tables.data_ptr()
        self._turns = self._cursors.data_ptr(), self._cursors.data_ptr() + 16  # this gathering's, and the next one's
        self._weights = on(device, WEIGHTS.view(np.int64))
        self._worth: dict[torch.dtype, torch.Tensor] = {}
        self._programs = _most_programs(device)
        self._gather = _gathering(device, self._buckets)(stream)

    def buffer(self, used: int) -> ResultBuffer:
        """Return a buffer for the first `used` slots, in memory that is got now."""
        size, is_locked = self.size * (HEAD + self._buckets), self._device.type == "cuda"
        words = torch.empty(size, dtype=torch.int64, device="cpu", pin_memory=is_locked)
        return ResultBuffer(words, used, self._buckets, words.data_ptr())

    def gather(self, buffer: ResultBuffer) -> None:
        """Launch the gathering of as many slots as the buffer is for; its memory must live until that has run."""
        turns = self._turns
        self._turns = turns[1], turns[0]
        self._gather(*self._lying, *turns, buffer.address, buffer.used)

    def starting(self, dtype: torch.dtype) -> Start:
        """Return the launch of a sweep, with as little as possible left to do in it: slot, address, number of items.

        The items lie in order from an address that 16 divides. On this stream, their memory may be changed or given
        back at once.
        """
        kind = KINDS[dtype]
        sweeps = _sweeping(self._device, dtype, self._full)(self._stream)
        peaks = _peaking(self._device)(self._stream) if dtype is torch.float64 else None
        worth = self._worth_of(dtype)
        rows, row = self._rows.data_ptr(), self._rows.stride(0) * 8
        tables, table = self._tables.data_ptr(), self._tables.stride(0) * 4
        weights, values = self._weights.data_ptr(), worth.data_ptr()
        tile, most = kind.threads * kind.vector, self._programs

        def start(index: int, items: int, count: int) -> None:
            tiles = -(-count // tile)
            each = -(-tiles // most)
            slot = rows + index * row
            if peaks is not None:
                peaks(items, count, slot, -(-count // 4096))
            sweeps(items, count, each, slot, tables + index * table, weights, values, -(-tiles // each))

        return start

    def starting_all(self, dtype: torch.dtype) -> StartAll:
        """Return the launch of one sweep over many tensors, which are not of float64: those are looked at twice.

        It takes the first slot, where the entries lie, in memory that the device can read, how many there are, and how
        many programs the largest takes. An entry is an address, a number of items, and how many tiles a program takes.
        """
        sweeps = _sweeping_all(self._device, dtype, self._full)(self._stream)
        worth = self._worth_of(dtype)
        known = self._rows.data_ptr(), self._tables.data_ptr(), self._weights.data_ptr(), worth.data_ptr()

        def start(first: int, entries: int, count: int, programs: int) -> None:
            sweeps(0, entries, first, programs, *known, count * programs)

        return start

    def tiling(self, dtype: torch.dtype) -> tuple[int, int]:
        """Return how many items a program takes at a time, and how many programs a tensor gets at most."""
        return KINDS[dtype].threads * KINDS[dtype].vector, self._programs

    def _worth_of(self, dtype: torch.dtype) -> torch.Tensor:
        worth = self._worth.get(dtype)
        if worth is None:
            worth = self._worth[dtype] = worth_on(self._device, dtype)
        return worth


def _buckets(level: Level, *, wide: bool) -> int:
    return 0 if level == "moments" else 1 << (18 if wide else 15)


@cache
def _sweeping(device: torch.device, dtype: torch.dtype, full: bool) -> Launching:
    kind = KINDS[dtype]
    return launching(
        sweep, device,
        kind.item, ANY, ANY, torch.int64, torch.int32, torch.uint64, torch.float64,
        kind.name, full, kind.threads, kind.vector,
        num_warps=kind.threads // 32, maxnreg=128 if full else 96,
    )  # fmt: skip


@cache
def _sweeping_all(device: torch.device, dtype: torch.dtype, full: bool) -> Launching:
    kind = KINDS[dtype]
    return launching(
        sweep_all, device,
        kind.item, torch.int64, ANY, ANY, torch.int64, torch.int32, torch.uint64, torch.float64,
        kind.name, full, kind.threads, kind.vector, max(_buckets("full" if full else "moments", wide=False), 4),
        num_warps=kind.threads // 32, maxnreg=128 if full else 96,
    )  # fmt: skip


@cache
def _peaking(device: torch.device) -> Launching:
    return launching(peak, device, torch.int64, ANY, torch.int64, 4096, num_warps=8)


@cache
def _gathering(device: torch.device, buckets: int) -> Launching:
    word, number = torch.int64, torch.int32
    warps = 16 if buckets else 4
    return launching(gather, device, word, number, number, number, word, buckets, num_warps=warps)


def _most_programs(device: torch.device) -> int:
    if device.type != "cuda":
        return 4  # of an interpreter, which runs them one by one
    return min(PROGRAMS, 4 * torch.cuda.get_device_properties(device).multi_processor_count)


def worth_on(device: torch.device, dtype: torch.dtype) -> torch.Tensor:
    """Send what each byte of a dtype is worth to a device; of a wider one nothing is looked up."""
    return on(device, byte_values(str(dtype)[6:]) if KINDS[dtype].name == "byte" else np.zeros(2))


def on(device: torch.device, numbers: Array) -> torch.Tensor:
    """Send numbers to a device without waiting for them to arrive."""
    there = torch.from_numpy(numbers)
    return there if device.type == "cpu" else there.pin_memory().to(device, non_blocking=True)
