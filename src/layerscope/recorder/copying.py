"""Take a tensor's values before the model can change them.

    copy = Arena().copy(tensor)               # in memory: a CPU tensor of its own
    lease = Pool(budget).copy(tensor)         # on its way to disk: a buffer that comes back

Copies run on one thread: with torch's intra-op threads on a busy machine the same copy was 24 times slower. Memory
comes in huge pages, because the first touch of fresh 4 KiB pages costs five times the copy itself. What lies on an
accelerator is `lanes.py`'s.
"""

from __future__ import annotations

import ctypes
import mmap
import threading
import weakref
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any, NamedTuple

import numpy as np
import torch
from torch._C import _functorch as functorch

from layerscope.errors import Unsupported
from layerscope.recorder.cargo import as_tensor
from layerscope.recorder.lanes import arriving
from layerscope.stats.tensor_views import lying

__all__ = ["Arena", "Lease", "Pool", "dtype_name", "plain", "same_bits", "undisturbed", "unwrapped"]

Bytes = np.ndarray[Any, np.dtype[np.uint8]]

_HUGE_PAGE = 2 << 20
_CHUNK = 32 << 20
_SMALL = 256 << 10  # below this, ordinary allocation: a kept tensor must not hold a whole chunk
_WORDS = (1, 2, 4, 8)  # bytes of what numpy copies and compares bit by bit


def dtype_name(dtype: torch.dtype) -> str:
    """Return torch's name for a dtype without its prefix.

    >>> dtype_name(torch.bfloat16)
    'bfloat16'
    """
    return str(dtype).removeprefix("torch.")


def plain(tensor: torch.Tensor) -> tuple[torch.Tensor, dict[str, str]]:
    """Return a detached, dense, ordinary tensor with the same values, and what had to be said about it.

    Lazy conjugation and negation are resolved. A distributed tensor gives this rank's shard, with its placements. What
    has no dense values of its own is refused, with the way out.
    """
    note: dict[str, str] = {}
    kind = type(tensor).__name__
    if kind == "AsyncCollectiveTensor":
        tensor = tensor.wait()  # type: ignore[attr-defined]
    elif kind == "DTensor":
        note = {"placements": str(tensor.placements), "whole_shape": str(list(tensor.shape))}  # type: ignore[attr-defined]
        tensor = tensor.to_local()  # type: ignore[attr-defined]
    if torch._is_functional_tensor(tensor):
        raise Unsupported("inside torch.func.functionalize a tensor has no memory of its own; record a run without it")
    if tensor.is_meta or kind == "FakeTensor":
        raise Unsupported(f"a {kind} on the meta device has no values; record a run with real tensors")
    if tensor.is_nested or tensor.layout is not torch.strided:
        layout = "nested" if tensor.is_nested else str(tensor.layout).removeprefix("torch.")
        raise Unsupported(f"a {layout} tensor is not stored; keep=lambda t: t.to_dense() (or a function of its own)")
    if tensor.is_quantized:
        raise Unsupported(f"a legacy {tensor.dtype} tensor is not stored; keep=lambda t: t.dequantize()")
    if tensor.requires_grad:
        tensor = tensor.detach()
    if tensor.is_conj() or tensor.is_neg():
        tensor = tensor.resolve_conj().resolve_neg()
    return tensor, note


def unwrapped(tensor: torch.Tensor) -> tuple[torch.Tensor, dict[str, str]]:
    """Return the value behind a tensor of a functional transform, and what had to be said about it.

    Inside `vmap` a model sees one sample, and computes all: the value is that of all, along the first axes. Inside
    `grad`, `vjp` and `jvp` it is the tensor itself. To be called outside of all transforms: see `undisturbed`.
    """
    axes: list[int] = []  # of the samples, the innermost `vmap` first; each counts within what the next one sees
    while functorch.is_functorch_wrapped_tensor(tensor) and not torch._is_functional_tensor(tensor):
        if functorch.is_batchedtensor(tensor):
            axes.append(functorch.maybe_get_bdim(tensor))
        tensor = functorch.get_unwrapped(tensor)
    if not axes:
        return tensor, {}
    for outside, axis in enumerate(reversed(axes)):
        tensor = tensor.movedim(axis + outside, outside)
    first = "the first axis is" if len(axes) == 1 else f"the first {len(axes)} axes are"
    return tensor, {"vmap": f"{first} the samples of torch.func.vmap"}


@contextmanager
def undisturbed() -> Iterator[None]:
    """Hide our own tensor operations from the user's modes: a flop counter, a default device, transforms, inference."""
    from torch._functorch.pyfunctorch import temporarily_clear_interpreter_stack
    from torch.utils._python_dispatch import _disable_current_modes

    watched = torch._C._len_torch_dispatch_stack() > 0
    overridden = torch._C._len_torch_function_stack() > 0
    with (
        nullcontext() if functorch.peek_interpreter_stack() is None else temporarily_clear_interpreter_stack(),
        _disable_current_modes() if watched else nullcontext(),
        torch._C.DisableTorchFunction() if overridden else nullcontext(),
        torch.inference_mode(False) if torch.is_inference_mode_enabled() else nullcontext(),
        torch.no_grad(),
    ):
        yield


# Chunks that no tensor lies in any more. They are mapped and touched: a fresh one costs as much as the copies into it.
_idle: deque[mmap.mmap] = deque(maxlen=2)


class Arena:
    """Memory for tensors that stay: chunks of huge pages, filled one copy after the other.

    A chunk lives as long as any tensor in it. Then it is used again, by this arena or another.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._chunk = np.empty(0, np.uint8)
        self._at = 0

    def copy(self, tensor: torch.Tensor) -> Callable[[], torch.Tensor]:
        """Copy a plain tensor; the result is called for when it is needed, and may then wait for a device."""
        if not tensor.is_cpu:
            return arriving(tensor, self.room)
        kept = as_tensor(self.room(tensor.nbytes), tensor.dtype, tensor.shape)
        _copy(kept, tensor)
        return lambda: kept

    def room(self, size: int) -> Bytes:
        """Return so many bytes for a copy."""
        if size < _SMALL:
            return np.empty(size, np.uint8)
        with self._lock:
            if self._at + size > len(self._chunk):
                self._chunk, self._at = _huge(size) if size > _CHUNK else _chunk(), 0
            start = self._at
            self._at = -(-(start + size) // 64) * 64
            return self._chunk[start : start + size]


class Lease(NamedTuple):
    """A copy on its way to disk: the bytes, when they have arrived, and the buffer's way back."""

    data: Callable[[], Bytes]
    release: Callable[[], None]


class Pool:
    """Buffers that are used again, up to `budget` bytes kept idle."""

    def __init__(self, budget: int) -> None:
        self._lock = threading.Lock()
        self._idle: dict[int, list[Bytes]] = {}
        self._room = budget

    def copy(self, tensor: torch.Tensor) -> Lease:
        """Copy a plain tensor into a buffer of the pool, contiguously."""
        taken: list[Bytes] = []

        def room(exact: int) -> Bytes:
            taken.append(self._take(1 << max(12, (exact - 1).bit_length())))
            return taken[0][:exact]

        if tensor.is_cpu:
            octets = room(tensor.nbytes)
            _copy(as_tensor(octets, tensor.dtype, tensor.shape), tensor)
            return Lease(lambda: octets, lambda: self._give(taken))
        arrival = arriving(tensor, room)

        def data() -> Bytes:
            return arrival().reshape(-1).view(torch.uint8).numpy()

        return Lease(data, lambda: arrival.then(lambda: self._give(taken)))

    def _take(self, size: int) -> Bytes:
        with self._lock:
            idle = self._idle.get(size)
            if idle:
                self._room += size
                return idle.pop()
        return _huge(size) if size >= _SMALL else np.empty(size, np.uint8)

    def _give(self, taken: list[Bytes]) -> None:
        with self._lock:
            for buffer in taken:
                if buffer.size <= self._room:
                    self._room -= buffer.size
                    self._idle.setdefault(buffer.size, []).append(buffer)


def _copy(kept: torch.Tensor, tensor: torch.Tensor) -> None:
    """Copy the values of a CPU tensor to contiguous memory, past torch where they lie plainly."""
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


def _chunk() -> Bytes:
    """Return a chunk that becomes idle when nothing is left that looks into it.

    Every tensor and array that does holds the array made here. What a finaliser may do is little: it can come at any
    allocation, in any thread, and a deque needs no lock.
    """
    try:
        memory = _idle.pop()
    except IndexError:
        memory = _mapped(_CHUNK)
    chunk: Bytes = np.frombuffer(memory, np.uint8)
    weakref.finalize(chunk, _idle.append, memory).atexit = False
    return chunk


def _huge(size: int) -> Bytes:
    """Return fresh memory of this size."""
    return np.frombuffer(_mapped(size), np.uint8)[:size]


def _mapped(size: int) -> mmap.mmap:
    """Map fresh memory in huge pages where the system has them."""
    whole = -(-max(size, 1) // _HUGE_PAGE) * _HUGE_PAGE
    private = {"flags": mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS} if hasattr(mmap, "MAP_PRIVATE") else {}
    memory = mmap.mmap(-1, whole, **private)
    if hasattr(mmap, "MADV_HUGEPAGE"):
        memory.madvise(mmap.MADV_HUGEPAGE)
    return memory
