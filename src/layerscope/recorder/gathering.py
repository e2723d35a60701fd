"""Take a step's small tensors together when it ends, where that is known to give the same values.

    gathering.begin()                                   # a step
    held = gathering.hold(request, only, tensor)        # in a hook: None where the tensor must be taken at once
    gathering.end()                                     # held() waits for the values from here on

A launch or a copy for each tensor costs more than the hook itself where a model waits for Python; one for all of them
costs little. But what the model changes in place before the step ends is gone then. So each point is tried first: its
tensor is taken as it appears and once more at the end of the step. If both agree to the bit, and torch counts no change
in place, the point's tensors of that size are held back from the next step on, up to 64 MB of them. A later change that
torch counts is noticed: that one record is lost, which is said, and the point is never held back again. One that torch
does not count (a kernel of one's own, a collective) is noticed when the point is tried again, after 16, 32, ... and at
last every 256 steps; the records in between are then said to be in doubt.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from contextlib import suppress
from threading import get_ident
from typing import Any

import torch

from layerscope.points import Point
from layerscope.recorder.cargo import Arrival, Lost
from layerscope.recorder.copying import undisturbed
from layerscope.recorder.devices import Later
from layerscope.recorder.lanes import current_stream, is_capturing
from layerscope.recorder.taps import Only, Request

__all__ = ["Gathering", "Held"]

_MOST = 64 << 20  # bytes that are held at a time, half of them in doubt
_TRIES = 8  # of one point, with tensors of several sizes
_SOON, _SELDOM = 16, 256  # steps after which a point that may wait is tried again
_LARGEST = {"moments": 4 << 20, "full": 4 << 20, "tensor": 64 << 10}  # a larger one is worth a launch of its own

TakeAll = Callable[[Only, list[torch.Tensor]], list[Any]]  # what of each, of which tensors


class Standing:
    """Whether the tensors of one point may wait: those of so many items, for so many steps more."""

    __slots__ = ("items", "never", "refused", "size", "steps", "trials", "tries", "until")

    def __init__(self) -> None:
        self.items = 0  # of a tensor that may wait; none at first
        self.size = 0  # its bytes
        self.steps = 0  # since it was tried
        self.until = _SOON
        self.tries = 0
        self.trials = 0  # that nobody has judged yet
        self.never = False
        self.refused = -1  # the step in which not all of its calls could be tried

    def judge(self, items: int, size: int, *, same: bool) -> None:
        """Hear how a trial ended; a point may have been called several times in its step."""
        self.trials -= 1
        if not same:
            self.items, self.never = 0, True
        elif not (self.never or self.trials):
            again = self.items == items
            self.until = min(2 * self.until, _SELDOM) if again else _SOON
            self.items, self.size, self.steps = items, size, 0


class Held:
    """A tensor that is taken when the step ends."""

    __slots__ = ("address", "got", "only", "standing", "tensor", "version")

    def __init__(self, standing: Standing, only: Only, tensor: torch.Tensor, version: int, address: int) -> None:
        self.standing = standing
        self.only = only
        self.tensor: torch.Tensor | None = tensor
        self.version = version
        self.address = address
        self.got: Callable[[], Any] | None = None

    @property
    def is_intact(self) -> bool:
        """Whether torch knows of no change: neither of the values, nor of where they lie."""
        tensor = self.tensor
        return tensor is not None and tensor._version == self.version and tensor.data_ptr() == self.address

    def __call__(self) -> Any:
        """Wait for the values."""
        if self.got is None:
            raise Lost(
                "it was changed in place between its hook and the end of the step, which it never was before, or the "
                "step was broken off"
            )
        return self.got()

    def leave(self) -> None:
        """Have the values fetched, though nobody waits for them."""
        leave = getattr(self.got, "leave", None)
        if leave is not None:
            leave()


class Gathering:
    """What one thread's steps hold back on one device; another thread's tensors are taken at once.

    `doubtful` is told of a point that turned out to be changed in a way that torch does not count.
    """

    def __init__(self, place: int, take_all: TakeAll, doubtful: Callable[[Point], None]) -> None:
        self.place = place
        self._take_all = take_all
        self._doubtful = doubtful
        self._thread: int | None = None
        self._step = 0
        self._stream = -1
        self._origin: torch.cuda.Stream | None = None
        self._basket: deque[Held] = deque()
        self._doubts: list[tuple[Held, Point, Any]] = []  # and what was taken of each at once
        self._trials: deque[tuple[Standing, Point, int, int, Any, Any]] = deque()  # items, bytes, what was taken twice
        self._bytes = 0  # of what is held back
        self._doubted = 0  # and of what is in doubt

    @property
    def is_mine(self) -> bool:
        """Whether this is the thread whose steps are gathered."""
        return self._thread in (None, get_ident())

    def give_up(self) -> None:
        """Hold nothing back any more."""
        self._thread = -1

    def begin(self) -> None:
        """Begin a step, and judge the points whose trial is over."""
        if not self.is_mine:
            return
        self._leave_nothing()
        self._thread = get_ident()
        self._step += 1
        stream = -1 if is_capturing() else current_stream(self.place)
        if stream != self._stream:
            self._stream = stream
            self._origin = None if stream == -1 else torch.cuda.current_stream(self.place)
        if self._trials:
            with undisturbed():
                self._judge()

    def hold(self, request: Request, only: Only, tensor: torch.Tensor) -> Held | None:
        """Hold a tensor back, if its point may be; every line counts where a model waits for Python."""
        standing: Standing | None = request.standing
        if (
            standing is None
            or standing.items != tensor.numel()
            or standing.steps >= standing.until
            or current_stream(self.place) != self._stream
            or get_ident() != self._thread
            or tensor.get_device() != self.place
            or (self._stream and is_capturing())  # the default stream never is
        ):
            return None
        try:
            held = Held(standing, only, tensor, tensor._version, tensor.data_ptr())
        except RuntimeError:  # an inference tensor counts no changes
            return None
        standing.steps += 1
        self._basket.append(held)
        self._bytes += standing.size
        if self._bytes > _MOST // 2:
            self.flush()
        return held

    def doubt(self, request: Request, only: Only, tensor: torch.Tensor, got: Any) -> None:
        """Hold a tensor that was taken at once, to try whether that can wait; not if it is large, or there are many."""
        if not request.gathers or not self.is_mine or current_stream(self.place) != self._stream:
            return
        standing: Standing = request.standing or Standing()
        request.standing = standing
        size, again = tensor.nbytes, standing.items == tensor.numel()
        if standing.never or standing.trials or (standing.tries >= _TRIES and not again) or size > _LARGEST[only]:
            return
        if self._doubted + size > _MOST // 2:
            standing.refused = self._step
        elif not tensor.is_inference() and tensor.data_ptr() and not tensor.data_ptr() % 16:
            held = Held(standing, only, tensor, tensor._version, tensor.data_ptr())
            self._doubts.append((held, request.point, got))
            self._doubted += size

    def end(self) -> None:
        """Take what was held back, and once more what is in doubt."""
        if not self.is_mine:
            return
        self.flush()
        doubts, self._doubts, self._doubted = self._doubts, [], 0
        try:
            for held, _, _ in doubts:
                if not held.is_intact:
                    held.standing.items, held.standing.never = 0, True
            tried = [one for one in doubts if not (one[0].standing.never or one[0].standing.refused == self._step)]
            self._take([held for held, _, _ in tried])
            for held, point, got in tried:
                tensor, later, standing = held.tensor, held.got, held.standing
                if isinstance(later, (Later, Arrival)) and tensor is not None:
                    standing.tries += standing.trials == 0
                    standing.trials += 1
                    self._trials.append((standing, point, tensor.numel(), tensor.nbytes, got, later))
                    got.leave()
                    later.leave()
        finally:
            for held, _, _ in doubts:
                held.tensor = None

    def flush(self) -> None:
        """Take what was held back until now."""
        held: list[Held] = []
        with suppress(IndexError):  # another thread may be flushing too
            while self._basket:
                held.append(self._basket.popleft())
        try:
            for one in held:
                if not one.is_intact:
                    one.tensor, one.standing.items, one.standing.never = None, 0, True
            self._take([one for one in held if one.tensor is not None])
        finally:
            for one in held:
                one.tensor = None
            self._bytes = 0

    def close(self) -> None:
        """Take what is held back, whoever's it is, and let go of the rest."""
        self.flush()
        self._doubts.clear()
        self._trials.clear()

    def _leave_nothing(self) -> None:
        """Take what an interrupt left, and forget what it left in doubt."""
        if self._basket:
            self.flush()
        for held, _, _ in self._doubts:
            held.tensor = None
        self._doubts.clear()
        self._doubted = 0

    def _judge(self) -> None:
        while self._trials:
            standing, point, items, size, at_once, later = self._trials[0]
            if not (at_once.has_arrived and later.has_arrived):
                return
            self._trials.popleft()
            waited = standing.items == items
            try:
                same = at_once.same_as(later)
            except Exception:  # one of them never came
                standing.judge(items, size, same=False)
                continue
            standing.judge(items, size, same=same)
            if waited and not same:
                self._doubtful(point)

    def _take(self, held: list[Held]) -> None:
        """Take each tensor once, whoever saw it, on the stream it was made on."""
        if held and self._origin is not None and current_stream(self.place) != self._stream:
            with torch.cuda.stream(self._origin):
                self._take_here(held)
        else:
            self._take_here(held)

    def _take_here(self, held: list[Held]) -> None:
        for only in {one.only for one in held}:
            numbers: dict[int, int] = {}
            tensors: list[torch.Tensor] = []
            those = [one for one in held if one.only == only and one.tensor is not None]
            for one in those:
                if numbers.setdefault(id(one.tensor), len(tensors)) == len(tensors):
                    tensors.append(one.tensor)  # type: ignore[arg-type]
            got = self._take_all(only, tensors) if tensors else []
            for one in those:
                one.got = got[numbers[id(one.tensor)]]
