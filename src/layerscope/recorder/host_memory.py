"""Memory of the host for the tensors that a recording copies.

    copy = Arena().copy(tensor)               # taken now; copy() is a CPU tensor of its own

Copies run on one thread: with torch's intra-op threads on a busy machine the same copy was 24 times slower. Memory
comes in huge pages, because the first touch of fresh 4 KiB pages costs five times the copy itself, and is used again
when no tensor or array looks into it any more. What lies on a GPU is `gpu/transfer.py`'s.
"""

from __future__ import annotations

import ctypes
import mmap
import threading
import weakref
from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from layerscope.recorder.gpu.batches import as_tensor
from layerscope.recorder.gpu.pinned_pool import Bytes
from layerscope.recorder.gpu.transfer import to_host
from layerscope.stats.tensor_views import lying

_HUGE_PAGE = 2 << 20
_CHUNK = 32 << 20
_SMALL = 256 << 10  # below this, ordinary allocation: a kept tensor must not hold a whole chunk
_IDLE = 64 << 20
_WORDS = (1, 2, 4, 8)  # bytes of what numpy copies and compares bit by bit


class _Idle:
    """Mapped memory that nothing looks into, up to `most` bytes: a fresh mapping costs as much as the copies into it.

    A finaliser gives it back, at any allocation and in any thread: a lock could be held by the thread it comes in.
    """

    def __init__(self, most: int) -> None:
        self.mapped: list[mmap.mmap] = []
        self._most = most

    def take(self, size: int) -> mmap.mmap:
        """Return memory for `size` bytes, and at most twice as much."""
        for memory in self.mapped.copy():
            if size <= len(memory) <= 2 * size:
                try:
                    self.mapped.remove(memory)
                except ValueError:  # another thread was quicker
                    continue
                return memory
        return _mapped(size)

    def give(self, memory: mmap.mmap) -> None:
        """Keep memory for the next one, where there is not enough of it."""
        if sum(map(len, self.mapped.copy())) + len(memory) <= self._most:
            self.mapped.append(memory)


_idle = _Idle(_IDLE)  # of arenas whose copies stay


class Arena:
    """Chunks of huge pages, filled one copy after the other; a chunk lives as long as any copy in it.

    `budget` is for copies that pass through, to the disk: so many bytes are kept to be used again, and a chunk, which
    one late copy holds whole, is an eighth of them at most.
    """

    def __init__(self, *, budget: int | None = None) -> None:
        self._lock = threading.Lock()
        self._idle = _idle if budget is None else _Idle(budget)
        self._most = _CHUNK if budget is None else min(_CHUNK, budget // 8)
        self._chunk = np.empty(0, np.uint8)
        self._at = 0

    def copy(self, tensor: torch.Tensor) -> Callable[[], torch.Tensor]:
        """Copy a plain tensor; the result is called for when it is needed, and may then wait for a device."""
        if not tensor.is_cpu:
            return to_host(tensor, self.room)
        kept = as_tensor(self.room(tensor.nbytes), tensor.dtype, tensor.shape)
        _copy(kept, tensor)
        return lambda: kept

    def room(self, size: int) -> Bytes:
        """Return so many bytes for a copy."""
        if size < _SMALL:
            return np.empty(size, np.uint8)
        if size > self._most:
            return self._mapped(size)[:size]
        with self._lock:
            if self._at + size > len(self._chunk):
                self._chunk, self._at = self._mapped(self._most), 0
            start = self._at
            self._at = -(-(start + size) // 64) * 64
            return self._chunk[start : start + size]

    def _mapped(self, size: int) -> Bytes:
        """Return memory that becomes idle when nothing is left that looks into it: all that does holds this array."""
        memory = self._idle.take(size)
        array: Bytes = np.frombuffer(memory, np.uint8)
        weakref.finalize(array, self._idle.give, memory).atexit = False
        return array


def _copy(kept: torch.Tensor, tensor: torch.Tensor) -> None:
    """Copy the values of a CPU tensor to contiguous memory, past torch where they lie in order."""
    lies = lying(tensor)
    if lies is None:
        np.copyto(_bits(kept), _bits(tensor))
    else:
        ctypes.memmove(kept.data_ptr(), lies[1], tensor.nbytes)


def same_bits(kept: torch.Tensor, tensor: torch.Tensor) -> bool:
    """Tell whether a CPU tensor has the values that were kept of it; False also where that cannot be told at once."""
    if kept.dtype is not tensor.dtype or kept.shape != tensor.shape or tensor.itemsize not in _WORDS:
        return False
    if lying(tensor) is None and (tensor.is_conj() or tensor.is_neg()):
        return False
    return np.array_equal(_bits(kept), _bits(tensor.detach()))


class _Lying:
    """A CPU tensor's values as numpy is told of them; `tensor.numpy()` would keep its owner from resizing it."""

    def __init__(self, tensor: torch.Tensor) -> None:
        width = tensor.itemsize
        self.tensor = tensor  # which must live as long as the array
        self.__array_interface__ = {
            "version": 3,
            "data": (tensor.data_ptr(), False),
            "shape": tuple(tensor.shape),
            "strides": tuple(step * width for step in tensor.stride()),
            "typestr": np.dtype(f"i{width}" if width in _WORDS else "c16").str,
        }


def _bits(tensor: torch.Tensor) -> np.ndarray[Any, Any]:
    """View a CPU tensor's values as words, whatever its dtype: numpy has no bfloat16."""
    return np.asarray(_Lying(tensor)) if tensor.numel() else np.empty(tuple(tensor.shape), np.uint8)


def _mapped(size: int) -> mmap.mmap:
    """Map fresh memory in huge pages where the system has them."""
    whole = -(-max(size, 1) // _HUGE_PAGE) * _HUGE_PAGE
    private = {"flags": mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS} if hasattr(mmap, "MAP_PRIVATE") else {}
    memory = mmap.mmap(-1, whole, **private)
    if hasattr(mmap, "MADV_HUGEPAGE"):
        memory.madvise(mmap.MADV_HUGEPAGE)
    return memory
