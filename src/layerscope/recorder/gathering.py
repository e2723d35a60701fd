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
from typing import Any, NamedTuple

import torch

from layerscope.points import Point
from layerscope.recorder.cargo import Arrival, Lost
from layerscope.recorder.copying import undisturbed
from layerscope.recorder.devices import Later
from layerscope.recorder.lanes import current_stream, is_capturing
from layerscope.recorder.taps import Only, Request

__all__ = ["Gathering", "Held"]

_MOST = 64 << 20  # bytes that are held at a time, half of them in doubt
_SIZES = 8  # of one point's tensors that are told apart
_SOON, _SELDOM = 16, 256  # steps after which a point that may wait is tried again
_LARGEST = {"moments": 4 << 20, "full": 4 << 20, "tensor": 64 << 10}  # a larger one is worth a launch of its own

TakeAll = Callable[[Only, list[torch.Tensor]], list[Any]]  # what of each, of which tensors


class Proof:
    """That a point's tensors of one size may wait, for so many steps."""

    __slots__ = ("is_good", "size", "step", "steps", "until")

    def __init__(self, size: int, until: int) -> None:
        self.size = size  # bytes that one keeps from being used again
        self.until = until
        self.steps = 0  # since it was tried
        self.step = -1  # the last one in which it was asked for
        self.is_good = True  # in that step: it is tried again with all its calls, or with none

    def holds(self, step: int) -> bool:
        """Whether tensors may wait in this step."""
        if self.step != step:
            self.step = step
            self.steps += 1
            self.is_good = self.steps <= self.until
        return self.is_good


class Standing:
    """What is known of one point: which sizes may wait, and what is being tried."""

    __slots__ = ("never", "passed", "proofs", "refused", "stagger", "trials")

    def __init__(self, stagger: int) -> None:
        self.proofs: dict[int, Proof] = {}  # by the number of items
        self.passed: list[tuple[int, int]] = []  # items and bytes, of trials in a step that is not judged to its end
        self.trials = 0  # that nobody has judged yet
        self.refused = -1  # the step in which not all of its calls could be tried
        self.never = False
        self.stagger = stagger  # so that not all points are tried in the same step

    def deny(self) -> None:
        """Never have a tensor of this point wait."""
        self.never = True
        self.proofs.clear()

    def judge(self, items: int, size: int, *, same: bool) -> None:
        """Hear how a trial ended; they count together, because a point may have been called several times in a step."""
        self.trials -= 1
        self.passed.append((items, size))
        if not same:
            self.deny()
        if not self.trials:
            for count, octets in dict(self.passed).items() if not self.never else ():
                before = self.proofs.get(count)
                until = _SOON + self.stagger if before is None else min(2 * before.until, _SELDOM)
                self.proofs[count] = Proof(octets, until)
            self.passed.clear()


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


class _Doubt(NamedTuple):
    """A tensor of a point that is tried, the bytes it keeps from being used again, and what was taken of it at once."""

    held: Held
    point: Point
    size: int
    got: Any


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
        self._points = 0
        self._stream = -1
        self._origin: torch.cuda.Stream | None = None
        self._basket: deque[Held] = deque()
        self._doubts: list[_Doubt] = []
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
        self._trials.clear()

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
        if self._trials and stream != -1:  # to ask whether something has arrived would spoil a capture
            with undisturbed():
                self._judge()

    def hold(self, request: Request, only: Only, tensor: torch.Tensor) -> Held | None:
        """Hold a tensor back, if its point may be; every line counts where a model waits for Python."""
        standing: Standing | None = request.standing
        proof = None if standing is None else standing.proofs.get(tensor.numel())
        if (
            proof is None
            or not proof.holds(self._step)
            or current_stream(self.place) != self._stream
            or get_ident() != self._thread
            or tensor.get_device() != self.place
            or (self._stream and is_capturing())  # the default stream never is
        ):
            return None
        assert standing is not None
        try:
            held = Held(standing, only, tensor, tensor._version, tensor.data_ptr())
        except RuntimeError:  # an inference tensor counts no changes
            return None
        self._basket.append(held)
        self._bytes += proof.size
        if self._bytes > _MOST // 2:
            self.flush()
        return held

    def doubt(self, request: Request, only: Only, tensor: torch.Tensor, got: Any) -> None:
        """Hold a tensor that was taken at once, to try whether that can wait; `got` is None if it could not be.

        A point is tried with all its calls of a step, or not at all.
        """
        standing: Standing | None = request.standing
        if not request.gathers or (standing is not None and (standing.never or standing.trials)):
            return
        if standing is None:
            standing = request.standing = Standing(self._points % _SOON)
            self._points += 1
        size = 0 if got is None else tensor.untyped_storage().nbytes()  # of the whole that it may be a view of
        if got is None or not self._can_try(standing, only, tensor, size):
            standing.refused = self._step
            return
        held = Held(standing, only, tensor, tensor._version, tensor.data_ptr())
        self._doubts.append(_Doubt(held, request.point, size, got))
        self._doubted += size

    def _can_try(self, standing: Standing, only: Only, tensor: torch.Tensor, size: int) -> bool:
        if size > _LARGEST[only] or self._doubted + size > _MOST // 2 or tensor.is_inference():
            return False
        if len(standing.proofs) >= _SIZES and tensor.numel() not in standing.proofs:
            return False
        if not self.is_mine or current_stream(self.place) != self._stream:
            return False
        address = tensor.data_ptr()
        return address != 0 and address % 16 == 0

    def end(self) -> None:
        """Take what was held back, and once more what is in doubt."""
        if not self.is_mine:
            return
        self.flush()
        doubts, self._doubts, self._doubted = self._doubts, [], 0
        try:
            for held, *_ in doubts:
                if not held.is_intact:
                    held.standing.deny()
            tried = [one for one in doubts if self._is_tried(one.held.standing)]
            self._take([held for held, *_ in tried])
            for held, *_ in tried:
                if not isinstance(held.got, (Later, Arrival)):
                    held.standing.refused = self._step
            for held, point, size, got in tried:
                tensor, later = held.tensor, held.got
                if self._is_tried(held.standing) and isinstance(later, (Later, Arrival)) and tensor is not None:
                    held.standing.trials += 1
                    self._trials.append((held.standing, point, tensor.numel(), size, got, later))
                    got.leave()
                    later.leave()
        finally:
            for held, *_ in doubts:
                held.tensor = None

    def _is_tried(self, standing: Standing) -> bool:
        return not standing.never and standing.refused != self._step

    def flush(self) -> None:
        """Take what was held back until now."""
        held: list[Held] = []
        with suppress(IndexError):  # another thread may be flushing too
            while self._basket:
                held.append(self._basket.popleft())
        try:
            for one in held:
                if not one.is_intact:
                    one.tensor = None
                    one.standing.deny()
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
        for held, *_ in self._doubts:
            held.tensor = None
        self._doubts.clear()
        self._doubted = 0

    def _judge(self) -> None:
        while self._trials:
            standing, point, items, size, at_once, later = self._trials[0]
            if not (at_once.has_arrived and later.has_arrived):
                return
            self._trials.popleft()
            waited = items in standing.proofs
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
