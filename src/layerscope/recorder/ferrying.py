"""Many small tensors to the host in one launch: a kernel writes them straight to page-locked memory (Triton).

    ferry = ferrying(device)(stream)
    ferry(0, 0, address_of_entries, programs_to_each, how_many * programs_to_each)

An entry is where the bytes lie, where they go to, and how many they are; both places on a border of 16 bytes.
"""

from __future__ import annotations

from functools import cache

import torch

from layerscope.stats.launching import ANY, Launching, jit, launching, tl

__all__ = ["BLOCK", "ferrying"]

BLOCK = 4096  # bytes that a program takes


@cache
def ferrying(device: torch.device) -> Launching:
    """Compile the kernel now, or load it; the call that is returned makes a stream's launches of it."""
    return launching(_ferry, device, torch.int32, torch.uint8, torch.int64, ANY, BLOCK // 4, num_warps=4)


@jit
def _ferry(words: tl.tensor, octets: tl.tensor, entries: tl.tensor, most: tl.tensor, block: tl.constexpr) -> None:
    """Copy a block of one entry, `most` programs to each; `words` and `octets` are there for their types alone."""
    program = tl.program_id(0).to(tl.int64)
    index, part = program // most, program % most
    entry = entries + index * 3
    source, target, size = tl.load(entry), tl.load(entry + 1), tl.load(entry + 2)
    at = part * block + tl.arange(0, block)
    there = at < size // 4
    tl.store(target.to(words.dtype) + at, tl.load(source.to(words.dtype) + at, mask=there), mask=there)
    if part == 0:
        rest = size // 4 * 4 + tl.arange(0, 4)
        left = rest < size
        tl.store(target.to(octets.dtype) + rest, tl.load(source.to(octets.dtype) + rest, mask=left), mask=left)
