"""Page-locked memory of the host, which a device copies to while the model goes on.

    room = Pinned().room(tensor.nbytes)      # None where there is none free: `grow` gets more, when it does no harm

To get it costs 0.2 ms per MiB (H200) and holds up every launch of the process meanwhile, so it comes in chunks that are
used again. A chunk is free when no tensor or array looks into it any more.
"""

from __future__ import annotations

import os
import weakref
from collections import deque
from collections.abc import Callable
from typing import Any, TypeAlias

import numpy as np
import torch

__all__ = ["Pinned", "Room"]

Bytes = np.ndarray[Any, np.dtype[np.uint8]]

_CHUNK = 64 << 20
_BUDGET = 4 << 30  # if a quarter of the machine's memory is not less


Room: TypeAlias = tuple[Bytes, int, int]  # a chunk, where in it there is room, and the address of that


def _locked(size: int) -> torch.Tensor:
    return torch.empty(size, dtype=torch.uint8, device="cpu", pin_memory=True)


class Pinned:
    """Chunks of page-locked memory, `budget` bytes in all, handed out front to back, to one thread at a time."""

    def __init__(self, budget: int | None = None, *, allocate: Callable[[int], torch.Tensor] = _locked) -> None:
        self._budget = _default_budget() if budget is None else budget
        self._allocate = allocate
        self._idle: deque[torch.Tensor] = deque()
        self._large: deque[torch.Tensor] = deque()  # for one tensor each
        self._chunk: Bytes | None = None
        self._base = self._at = self._end = 0
        self._missed: deque[int] = deque()
        self._total = 0

    @property
    def total(self) -> int:
        """How many bytes are page-locked."""
        return self._total

    def room(self, size: int) -> Room | None:
        """Return room for so many bytes; None when none is free, which is remembered."""
        at = self._at
        if self._chunk is None or at + size > self._end:
            chunk = self._next(size)
            if chunk is None:
                self._missed.append(size)
                return None
            if size > _CHUNK:
                return chunk, 0, chunk.ctypes.data
            self._chunk, self._base, self._end = chunk, chunk.ctypes.data, chunk.size
            at = 0
        self._at = at + size + 63 & -64
        return self._chunk, at, self._base + at

    def grow(self) -> None:
        """Get as much as was missing since the last time, within the budget; in any thread, and this takes a while."""
        small = 0
        while self._missed:
            size = self._missed.popleft()
            if size > _CHUNK:
                self._get(-(-size // _CHUNK) * _CHUNK, self._large)
            else:
                small += size
        for _ in range(-(-small // _CHUNK)):
            self._get(_CHUNK, self._idle)

    def _get(self, size: int, home: deque[torch.Tensor]) -> None:
        if self._total + size <= self._budget:
            home.append(self._allocate(size))
            self._total += size

    def _next(self, size: int) -> Bytes | None:
        """Return a chunk that is free, and large enough."""
        if size > _CHUNK:
            for memory in list(self._large):
                if size <= memory.numel() <= 2 * size:
                    self._large.remove(memory)
                    return _watched(memory, self._large)
            return None
        self._chunk, self._end = None, 0  # free as soon as nobody looks into it
        return _watched(self._idle.popleft(), self._idle) if self._idle else None


def _watched(memory: torch.Tensor, home: deque[torch.Tensor]) -> Bytes:
    """Return memory as an array that goes home when nothing is left that looks into it.

    Whatever does holds the array made here. A finaliser can come at any allocation, in any thread: a deque needs no
    lock.
    """
    chunk: Bytes = memory.numpy()
    weakref.finalize(chunk, home.append, memory).atexit = False
    return chunk


def _default_budget() -> int:
    try:
        there = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    except (AttributeError, ValueError, OSError):
        return _BUDGET
    return min(_BUDGET, there // 4)
