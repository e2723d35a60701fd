"""The sums of each channel of many tensors, made on the GPU that holds them (Triton).

    laid = [Laid.of(tensor, axis) for tensor in tensors]        # of one dtype
    sums = ChannelSums().start(torch.bfloat16, laid)            # one launch on the current stream, or two
    laid[0].channels(sums[: laid[0].size].cpu().numpy())

A program takes a block of channels over a group of rows, in float64; a second launch adds up the groups of tensors that
have several, in their order: the same tensor gives the same bits each time.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import cache
from typing import NamedTuple

import numpy as np
import torch

from layerscope.stats.channels import ROWS, Channels, Layout, folded
from layerscope.stats.device.slots import KINDS, on, worth_on
from layerscope.stats.device.sweeping import bits_of
from layerscope.stats.driver import Launch
from layerscope.stats.launching import ANY, Launching, constant, jit, launching, tl
from layerscope.stats.tensor_views import Array

_AT_ONCE, _COLUMNS = 8, 128  # rows and channels of a tile
_GROUP = 512  # rows that one program takes, unless there are too many of them
_GROUPS = 512  # of a tensor, at most
_FIELDS = 6  # of an entry: address, rows, channels, groups, where the groups' sums go, where all go

_TABLE, _WIDTH = constant(len(ROWS)), constant(_FIELDS)


class Laid(NamedTuple):
    """A tensor as rows of channels that lie in order; several rows are taken as one where channels are few."""

    values: torch.Tensor  # which holds the memory until the launch
    layout: Layout
    rows: int
    width: int

    @classmethod
    def of(cls, tensor: torch.Tensor, axis: int) -> Laid:
        """Lay out the channels along an axis: a copy on the device, unless it is the last one and lies in order."""
        layout = Layout.of(tensor.shape, axis)
        values = tensor if layout.axis is None else tensor.movedim(axis, -1)
        rows, width = tensor.numel() // layout.width, layout.width
        while width < _COLUMNS and rows % 2 == 0:
            rows, width = rows // 2, width * 2
        return cls(values.contiguous(), layout, rows, width)

    @property
    def size(self) -> int:
        """How many numbers there are of it."""
        return len(ROWS) * self.width

    def channels(self, sums: Array) -> Channels:
        """Read the numbers that were made of it."""
        return folded(self.layout, sums.reshape(len(ROWS), self.width))


class ChannelSums:
    """The launches of one thread at a time."""

    def __init__(self) -> None:
        self._launches: dict[tuple[torch.device, torch.dtype, bool, int], tuple[Launch, Launch]] = {}
        self._worth: dict[tuple[torch.device, torch.dtype], torch.Tensor] = {}

    def start(self, dtype: torch.dtype, tensors: Sequence[Laid]) -> torch.Tensor:
        """Launch the sums of tensors of one dtype and device; return where they will lie, one tensor after another.

        The memory of the tensors may be changed or given back at once, on this stream.
        """
        device = tensors[0].values.device
        entries = np.array([(t.values.data_ptr(), t.rows, t.width, 0, 0, 0) for t in tensors], np.int64)
        address, rows, width = entries.T[:3]
        groups = np.clip(-(-rows // _GROUP), 1, _GROUPS)
        sums = torch.empty(len(ROWS) * int(width.sum()), dtype=torch.float64, device=device)
        several = np.where(groups > 1, groups * width, 0) * len(ROWS)
        parts = torch.empty(int(several.sum()), dtype=torch.float64, device=device)
        to = sums.data_ptr() + 8 * len(ROWS) * (np.cumsum(width) - width)
        entries[:, 3], entries[:, 5] = groups, to
        entries[:, 4] = np.where(groups > 1, parts.data_ptr() + 8 * (np.cumsum(several) - several), to)
        table = on(device, entries)
        blocks = -(-width // _COLUMNS)
        aligned = bool((address % 16 == 0).all() and (width % 16 == 0).all())
        add, join = self._launching(device, dtype, aligned)
        most = int((blocks * groups).max())
        add(0, table.data_ptr(), most, self._worth_of(device, dtype).data_ptr(), len(tensors) * most)
        if several.any():
            most = int(blocks.max())
            join(table.data_ptr(), most, sums.data_ptr(), len(tensors) * most)
        return sums

    def _launching(self, device: torch.device, dtype: torch.dtype, aligned: bool) -> tuple[Launch, Launch]:
        stream = torch.cuda.current_stream(device).cuda_stream if device.type == "cuda" else 0
        key = device, dtype, aligned, stream
        known = self._launches.get(key)
        if known is None:
            known = self._launches[key] = _adding(device, dtype, aligned)(stream), _joining(device)(stream)
        return known

    def _worth_of(self, device: torch.device, dtype: torch.dtype) -> torch.Tensor:
        worth = self._worth.get((device, dtype))
        if worth is None:
            worth = self._worth[device, dtype] = worth_on(device, dtype)
        return worth


def prepare_channels(device: torch.device, dtypes: Iterable[torch.dtype]) -> None:
    """Compile the kernels for these dtypes now, or load them from Triton's cache."""
    for dtype in dtypes:
        if dtype in KINDS:
            _adding(device, dtype, True)
            _joining(device)


@cache
def _adding(device: torch.device, dtype: torch.dtype, aligned: bool) -> Launching:
    kind = KINDS[dtype]
    return launching(
        add_channels, device,
        kind.item, torch.int64, ANY, torch.float64,
        kind.name, aligned, _AT_ONCE, _COLUMNS, num_warps=4,
    )  # fmt: skip


@cache
def _joining(device: torch.device) -> Launching:
    return launching(join_channels, device, torch.int64, ANY, torch.float64, _COLUMNS, num_warps=4)


@jit
def add_channels(
    like: tl.tensor, entries: tl.tensor, most: tl.tensor, worth: tl.tensor,
    kind: tl.constexpr, aligned: tl.constexpr, at_once: tl.constexpr, columns: tl.constexpr,
) -> None:  # fmt: skip
    """Add up a block of channels of one tensor, over one group of its rows; `most` programs to each tensor.

    `like` is a pointer to such items, and nothing lies there. `aligned` says that 16 divides where rows begin.
    """
    program = tl.program_id(0).to(tl.int64)
    entry, part = entries + program // most * _WIDTH, program % most
    rows, width, groups = tl.load(entry + 1), tl.load(entry + 2), tl.load(entry + 3)
    items = tl.load(entry).to(like.dtype)
    if aligned:
        items = tl.multiple_of(items, 16)
        width = tl.multiple_of(width, 16)
    blocks = tl.cdiv(width, columns)
    if part < blocks * groups:
        group = part // blocks
        column = part % blocks * columns + tl.arange(0, columns)
        here = column < width
        each = tl.cdiv(tl.cdiv(rows, at_once), groups) * at_once
        start = group * each
        stop = tl.minimum(start + each, rows)
        tile = tl.arange(0, at_once)
        finite = tl.zeros([at_once, columns], tl.int32)
        absmax = tl.zeros([at_once, columns], tl.float64)
        one = tl.zeros([at_once, columns], tl.float64)
        two = tl.zeros([at_once, columns], tl.float64)
        three = tl.zeros([at_once, columns], tl.float64)
        four = tl.zeros([at_once, columns], tl.float64)
        for at in tl.range(start, stop, at_once):
            row = at + tile
            within = (row < stop)[:, None] & here[None, :]
            raw = tl.load(items + row[:, None] * width + column[None, :], mask=within, other=0)
            bits = bits_of(raw, worth, kind)
            if bits.dtype == tl.uint64:
                value = bits.to(tl.float64, bitcast=True)
            else:
                value = bits.to(tl.float32, bitcast=True).to(tl.float64)
            counts = within & (tl.abs(value) < float("inf"))
            value = tl.where(counts, value, 0.0)
            square = value * value
            finite += counts.to(tl.int32)
            absmax = tl.maximum(absmax, tl.abs(value))
            one += value
            two += square
            three += square * value
            four += square * square
        to = tl.load(entry + 4).to(worth.dtype) + group * _TABLE * width + column
        tl.store(to, tl.sum(finite, 0).to(tl.float64), mask=here)
        tl.store(to + width, tl.max(absmax, 0), mask=here)
        tl.store(to + 2 * width, tl.sum(one, 0), mask=here)
        tl.store(to + 3 * width, tl.sum(two, 0), mask=here)
        tl.store(to + 4 * width, tl.sum(three, 0), mask=here)
        tl.store(to + 5 * width, tl.sum(four, 0), mask=here)


@jit
def join_channels(entries: tl.tensor, most: tl.tensor, like: tl.tensor, columns: tl.constexpr) -> None:
    """Add up the groups of one tensor's rows, for a block of its channels."""
    program = tl.program_id(0).to(tl.int64)
    entry, part = entries + program // most * _WIDTH, program % most
    width, groups = tl.load(entry + 2), tl.load(entry + 3)
    if (groups > 1) & (part * columns < width):
        column = part * columns + tl.arange(0, columns)
        here = column < width
        parts = tl.load(entry + 4).to(like.dtype) + column
        to = tl.load(entry + 5).to(like.dtype) + column
        for index in tl.static_range(_TABLE):
            total = tl.zeros([columns], tl.float64)
            for group in tl.range(0, groups):
                number = tl.load(parts + (group * _TABLE + index) * width, mask=here, other=0.0)
                total = tl.maximum(total, number) if index == 1 else total + number
            tl.store(to + index * width, total, mask=here)
