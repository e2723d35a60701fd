"""Page-locked memory of the host, which a device copies to while the model goes on.

    pinned = PinnedPool()
    pinned.prepare()                         # before the first step
    room = pinned.room(tensor.nbytes)        # None where there is none free: `grow` gets more, when it does no harm

To get it costs 0.2 ms per MiB (H200) and holds up every launch of the process meanwhile, so it comes in chunks that are
used again. A chunk is free when no tensor or array looks into it any more. The last free one is not taken without
asking for another.
"""

from __future__ import annotations

import os
import threading
import weakref
from collections import deque
from collections.abc import Callable
from typing import Any, TypeAlias

import numpy as np
import torch

Bytes = np.ndarray[Any, np.dtype[np.uint8]]

_CHUNK = 64 << 20
_FIRST = 2  # chunks: one to fill, and one to follow it
_BUDGET = 4 << 30  # if a quarter of the machine's memory is not less

Room: TypeAlias = tuple[Bytes, int, int]  # a chunk, where in it there is room, and the address of that


def _locked(size: int) -> torch.Tensor:
    return torch.empty(size, dtype=torch.uint8, device="cpu", pin_memory=True)


class PinnedPool:
    """Chunks of page-locked memory, `budget` bytes in all, handed out front to back, to one thread at a time.

    Where they run short, `let_go` is called, to let go of chunks that are done with, and then `ask`, to have `grow`
    called soon: both by `room`, which does not wait for it.
    """

    def __init__(
        self,
        budget: int | None = None,
        *,
        allocate: Callable[[int], torch.Tensor] = _locked,
        let_go: Callable[[], None] = lambda: None,
        ask: Callable[[], None] = lambda: None,
    ) -> None:
        self._budget = _default_budget() if budget is None else budget
        self._allocate = allocate
        self._let_go = let_go
        self._ask = ask
        self._growing = threading.Lock()
        self._idle: deque[torch.Tensor] = deque()
        self._large: deque[torch.Tensor] = deque()  # for one tensor each
        self._chunk: Bytes | None = None
        self._base = self._at = self._end = 0
        self._missed: deque[int] = deque()
        self._is_low = False  # whether the last free chunk was taken since it grew
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
                if len(self._missed) == 1:
                    self._ask_for_more()
                return None
            if size > _CHUNK:
                return chunk, 0, chunk.ctypes.data
            self._chunk, self._base, self._end = chunk, chunk.ctypes.data, chunk.size
            at = 0
        self._at = at + size + 63 & -64
        return self._chunk, at, self._base + at

    def prepare(self) -> None:
        """Get the first chunks, if there are none; this takes a while."""
        with self._growing:
            if not self._total:
                for _ in range(_FIRST):
                    self._get(_CHUNK, self._idle)

    def grow(self) -> None:
        """Get as much as was missing since the last time, and a chunk to follow the last one, within the budget.

        In any thread, and this takes a while.
        """
        with self._growing:
            small, large = 0, []
            while self._missed:
                size = self._missed.popleft()
                if size > _CHUNK:
                    large.append(size)
                else:
                    small += size
            is_low, self._is_low = self._is_low, False
            for size in large:
                self._get(-(-size // _CHUNK) * _CHUNK, self._large)
            for _ in range(-(-small // _CHUNK)):
                self._get(_CHUNK, self._idle)
            if is_low and not self._idle:  # none has come back meanwhile
                self._get(_CHUNK, self._idle)

    def _get(self, size: int, home: deque[torch.Tensor]) -> None:
        if self._total + size <= self._budget:
            try:
                memory = self._allocate(size)
            except Exception:
                self._budget = self._total + size - 1  # so much is not tried again
                raise
            self._total += size
            home.append(memory)

    def _ask_for_more(self) -> None:
        if self._total + _CHUNK <= self._budget:
            self._ask()

    def _next(self, size: int) -> Bytes | None:
        """Return a chunk that is free, and large enough."""
        if size > _CHUNK:
            for memory in list(self._large):
                if size <= memory.numel() <= 2 * size:
                    self._large.remove(memory)
                    return _watched(memory, self._large)
            return None
        self._chunk, self._end = None, 0  # free as soon as no view of it is left
        if len(self._idle) < 2:
            self._let_go()
        if not self._idle:
            return None
        memory = self._idle.popleft()
        if not self._idle:
            self._is_low = True
            self._ask_for_more()
        return _watched(memory, self._idle)


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
