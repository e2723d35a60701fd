"""Many tensors to the host in one launch: kernels that write straight to page-locked memory, or to berths (Triton).

    ferry = ferrying(device)(stream)
    ferry(0, 0, address_of_entries, programs_to_each, how_many * programs_to_each)

An entry is where the bytes lie, where they go to, and how many they are; both places on a border of 16 bytes.

    carry = carrying(device)(stream)
    carry(source, target, size // 64, CARRIERS)

A few programs carry a large piece: enough for all that the way to the host takes, and the model has the rest.
"""

from __future__ import annotations

from functools import cache

import torch

from layerscope.stats.launching import ANY, Launching, jit, launching, tl

__all__ = ["BLOCK", "CARRIERS", "carrying", "ferrying"]

BLOCK = 4096  # bytes that a program takes
CARRIERS = 2  # programs
_LOAD = 16384  # bytes that a carrier takes at a time


@cache
def ferrying(device: torch.device) -> Launching:
    """Compile the kernel now, or load it; the call that is returned makes a stream's launches of it."""
    return launching(_ferry, device, torch.int32, torch.uint8, torch.int64, ANY, BLOCK // 4, num_warps=4)


@cache
def carrying(device: torch.device) -> Launching:
    """Compile the kernel that carries one piece, or load it, as above."""
    return launching(_carry, device, torch.int32, torch.int32, ANY, _LOAD // 4, num_warps=4)


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


@jit
def _carry(source: tl.tensor, target: tl.tensor, lines: tl.tensor, load: tl.constexpr) -> None:
    """Copy so many times 64 bytes, all programs in turn."""
    words = lines * 16  # so that Triton knows where they end
    for first in range(tl.program_id(0) * load, words, tl.num_programs(0) * load):
        at = first + tl.arange(0, load)
        tl.store(target + at, tl.load(source + at, mask=at < words), mask=at < words)
