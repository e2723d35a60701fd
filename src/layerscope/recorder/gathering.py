"""Take a step's small tensors together when it ends, where that is known to give the same values.

    gathering.begin()                                   # a step
    held = gathering.hold(request, only, tensor)        # in a hook: None where the tensor must be taken at once
    gathering.end()                                     # held() waits for the values from here on

A launch or a copy for each tensor costs more than the hook itself where a model waits for Python; one for all of them
costs little. But what the model changes in place before the step ends is gone then. So each point is tried first: its
tensor is taken as it appears and once more at the end of the step. If both agree to the bit, and torch counts no change
in place, the point's tensors of that size are held back from the next step on, up to 64 MB of them. A later change that
torch counts is noticed: that one record is lost, which is said, and the point is never held back again.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from threading import get_ident
from typing import Any

import torch

from layerscope.recorder.cargo import Arrival, Lost
from layerscope.recorder.devices import Later
from layerscope.recorder.lanes import current_stream, is_capturing
from layerscope.recorder.taps import Only, Request

__all__ = ["Gathering", "Held"]

_MOST = 64 << 20  # bytes that are held at a time, half of them in doubt
_TRIES = 8  # of one point, with tensors of several sizes
_LARGEST = {"moments": 4 << 20, "full": 4 << 20, "tensor": 64 << 10}  # a larger one is worth a launch of its own

TakeAll = Callable[[Only, list[torch.Tensor], int], list[Any]]  # what of each, of which tensors, on which stream


class Held:
    """A tensor that is taken when the step ends."""

    __slots__ = ("got", "only", "request", "tensor", "version")

    def __init__(self, request: Request, only: Only, tensor: torch.Tensor, version: int) -> None:
        self.request = request
        self.only = only
        self.tensor: torch.Tensor | None = tensor
        self.version = version
        self.got: Callable[[], Any] | None = None

    def __call__(self) -> Any:
        """Wait for the values."""
        if self.got is None:
            raise Lost("it was changed in place between the hook and the end of the step, which it never was before")
        return self.got()


class Gathering:
    """What one thread's steps hold back on one device; another thread's tensors are taken at once."""

    def __init__(self, place: int, take_all: TakeAll) -> None:
        self.place = place
        self._take_all = take_all
        self._thread: int | None = None
        self._stream = 0
        self._basket: deque[Held] = deque()
        self._doubts: list[tuple[Held, Any]] = []  # and what was taken of each at once
        self._trials: deque[tuple[Request, int, int, Any, Any]] = deque()  # items, bytes, and what was taken twice
        self._bytes = 0  # of what is held back
        self._doubted = 0  # and of what is in doubt

    @property
    def is_mine(self) -> bool:
        """Whether this is the thread whose steps are gathered."""
        return self._thread in (None, get_ident())

    def begin(self) -> None:
        """Begin a step, and judge the points whose trial is over."""
        if not self.is_mine:
            return
        self.flush()  # what an interrupt left
        self._thread = get_ident()
        self._stream = -1 if is_capturing() else current_stream(self.place)
        while self._trials and self._trials[0][3].has_arrived and self._trials[0][4].has_arrived:
            request, items, size, at_once, later = self._trials.popleft()
            request.trials -= 1
            if not at_once.same_as(later):
                request.held = -1
            elif request.held >= 0 and not request.trials:  # a point may have been called several times in the step
                request.held, request.size = items, size

    def hold(self, request: Request, only: Only, tensor: torch.Tensor) -> Held | None:
        """Hold a tensor back, if its point may be; every line counts where a model waits for Python."""
        if request.held != tensor.numel() or current_stream(self.place) != self._stream or get_ident() != self._thread:
            return None
        try:
            held = Held(request, only, tensor, tensor._version)
        except RuntimeError:  # an inference tensor counts no changes
            return None
        self._basket.append(held)
        self._bytes += request.size
        if self._bytes > _MOST // 2:
            self.flush()
        return held

    def doubt(self, request: Request, only: Only, tensor: torch.Tensor, got: Any) -> None:
        """Hold a tensor that was taken at once, to try whether that can wait; not if it is large, or there are many."""
        size = tensor.nbytes
        if request.trials or request.tries == _TRIES or size > _LARGEST[only] or self._doubted + size > _MOST // 2:
            return
        if not self.is_mine:
            return
        if current_stream(self.place) == self._stream and not tensor.is_inference() and not tensor.data_ptr() % 16:
            self._doubts.append((Held(request, only, tensor, tensor._version), got))
            self._doubted += size

    def end(self) -> None:
        """Take what was held back, and once more what is in doubt."""
        if not self.is_mine:
            return
        self.flush()
        doubts, self._doubts = self._doubts, []
        for held, _ in doubts:
            if held.tensor is not None and held.tensor._version != held.version:
                held.request.held = -1
        doubts = [(held, got) for held, got in doubts if held.request.held >= 0]
        self._take([held for held, _ in doubts])
        for held, got in doubts:
            held.request.tries += 1
            if isinstance(held.got, (Later, Arrival)) and held.tensor is not None:
                held.request.trials += 1
                self._trials.append((held.request, held.tensor.numel(), held.tensor.nbytes, got, held.got))
                got.leave()
                held.got.leave()
            held.tensor = None
        self._doubted = 0

    def flush(self) -> None:
        """Take what was held back until now."""
        intact = []
        for _ in range(len(self._basket)):
            held = self._basket.popleft()
            assert held.tensor is not None
            if held.tensor._version == held.version:
                intact.append(held)
            else:
                held.tensor, held.request.held = None, -1
        self._take(intact)
        for held in intact:
            held.tensor = None
        self._bytes = 0

    def _take(self, held: list[Held]) -> None:
        """Take each tensor once, whoever saw it."""
        for only in {one.only for one in held}:
            numbers: dict[int, int] = {}
            tensors: list[torch.Tensor] = []
            those = [one for one in held if one.only == only]
            for one in those:
                assert one.tensor is not None
                if numbers.setdefault(id(one.tensor), len(tensors)) == len(tensors):
                    tensors.append(one.tensor)
            got = self._take_all(only, tensors, self._stream)
            for one in those:
                one.got = got[numbers[id(one.tensor)]]
