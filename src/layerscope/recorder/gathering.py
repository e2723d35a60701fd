"""Take a step's small tensors together when it ends, where that is known to give the same values.

    gathering.begin(step)                               # a step
    held = gathering.hold(request, tensor, moment)      # in a hook: None where the tensor must be taken at once
    gathering.end()                                     # values_of(held) waits for the values from here on

A launch or a copy for each tensor costs more than the hook itself where a model waits for Python; one for all of them
costs little. But what the model changes in place before the step ends is gone then. So each point is tried first: its
tensor is taken as it appears and once more at the end of the step. If both agree to the bit, and torch counts no change
in place, the point's tensors of that size are held back from the next step on. A later change that torch counts is
noticed: that one record is lost, which is said, and the point is never held back again. One that torch does not count
(a kernel of one's own, a collective) is noticed when the point is tried again, after 32, 64, ... and at last every 512
steps, or as soon after that as few others are; the records in between are then said to be in doubt.

With the statistics' own memory, all that is held back at a time is less than 64 MB.

What may wait passes by in C (`native/`), most of it without a line of Python.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Mapping
from functools import partial
from threading import get_ident
from typing import Any, NamedTuple

import torch

from layerscope.points import Moment, Point
from layerscope.recorder.cargo import Lost
from layerscope.recorder.copying import undisturbed
from layerscope.recorder.lanes import current_stream, is_alone, is_capturing, is_current
from layerscope.recorder.taps import Only, Request

__all__ = ["Gathering", "Held", "leave_behind", "values_of"]

Held = Any  # of `native/`; its parts are listed in `native/sweep.c`

_MOST = 56 << 20  # bytes of the device that may be taken up: more has all that waits taken, as soon as a call is over
_DOUBTED = 20 << 20  # bytes of these that may be in doubt, half of them of points that are tried again
_SIZES = 8  # of one point's tensors that are told apart
_SOON, _SELDOM = 32, 512  # steps after which a point that may wait is tried again,
_FEW = 128  # and of how many points one in a step, beside the first
_LARGEST = 4 << 20  # bytes; a larger one is taken as it appears,
_HUGE = 16 << 20  # and one that is larger still in its hook's own way: no model waits for Python that has such tensors
_FOREVER = 1 << 62  # steps

TakeAll = Callable[[Only, torch.dtype, list[Held]], None]  # has all that can be taken together know where it is
Found = tuple[dict[tuple[Only, torch.dtype], list[Held]], list[Held], list[Held]]  # together, odd, changed
Alone = Callable[[Only, torch.Tensor], Callable[[], Any]]


def values_of(held: Held) -> Any:
    """Wait for the values of a tensor that was held back."""
    return _part(held)()


def leave_behind(held: Held) -> None:
    """Have the values fetched, though nobody waits for them."""
    got = (held.twin or held).got
    if hasattr(got, "leave"):
        got.leave()


def _stream_here(place: int) -> int:
    """Return the current stream of a device, -1 where another device is current: number 0 is a stream of each."""
    return int(current_stream(place)) if is_current(place) else -1


def _part(held: Held) -> Any:
    first = held.twin or held  # of those that saw the same tensor
    if first.part is None:
        if first.got is None:
            raise Lost(
                "it was changed in place between its hook and the end of the step, which it never was before, or the "
                "step was broken off"
            )
        first.part = first.got.part(first.place, first.dtype, torch.Size(first.shape))
    return first.part


class _Single(NamedTuple):
    """What was taken of a tensor by itself, for it does not lie as the others do."""

    got: Callable[[], Any]

    def part(self, place: int, dtype: torch.dtype, shape: torch.Size) -> Callable[[], Any]:
        """Return the only part there is."""
        return self.got


_Sort = tuple[int, torch.dtype]  # of one point's tensors: how many items, and which


def _sort(one: Held) -> _Sort:
    return one.items, one.dtype


class Standing:
    """What is known of one point: which sizes may wait, and what is being tried."""

    __slots__ = ("leave", "never", "passed", "proofs", "refused", "trials")

    def __init__(self) -> None:
        self.leave: Any = None  # the pass that lets its tensors wait
        self.proofs: dict[_Sort, int] = {}  # for how many steps they may
        self.passed: list[tuple[_Sort, int, int]] = []  # of trials so far; what C calls the dtype, and bytes
        self.trials = 0  # that nobody has judged yet
        self.refused = -1  # the step in which not all of its calls could be tried
        self.never = False

    def deny(self) -> None:
        """Never have a tensor of this point wait."""
        self.never = True
        self.proofs.clear()
        self.leave.deny()

    def judge(self, held: Held, size: int, again: Callable[[int, int], int], *, same: bool) -> None:
        """Hear how a trial ended; they count together, because a point may have been called several times in a step.

        `again` says in which step one is tried that is due in so many, and has so many bytes.
        """
        self.trials -= 1
        self.passed.append((_sort(held), held.type, size))
        if not same:
            self.deny()
        if not self.trials:
            kinds = {} if self.never else {sort: (kind, octets) for sort, kind, octets in self.passed}
            for sort, (kind, octets) in kinds.items():
                before = self.proofs.get(sort)
                steps = _SOON if before is None else min(2 * before, _SELDOM)
                until = again(steps, sum(size for other, _, size in self.passed if other == sort)) - 1
                if self.leave.allow(*sort, octets, until, False, kind):  # not if it has too many
                    self.proofs[sort] = steps
            self.passed.clear()


class Agenda:
    """In which step each point is tried again: few of them in one, and few bytes."""

    def __init__(self) -> None:
        self.points: Counter[int] = Counter()
        self.bytes: Counter[int] = Counter()

    def book(self, step: int, size: int, *, few: int) -> int:
        """Return the first step, this one or later, in which there is room for one more, and count it there."""
        while self.points[step] and (self.points[step] >= few or self.bytes[step] + size > _DOUBTED // 2):
            step += 1
        self.points[step] += 1
        self.bytes[step] += size
        return step

    def strike(self, step: int) -> None:
        """Forget a step that has come."""
        del self.points[step], self.bytes[step]


class _Doubt(NamedTuple):
    """A tensor of a point that is tried, the bytes it keeps from being used again, and what was taken of it at once."""

    held: Held
    size: int
    got: Any

    @property
    def standing(self) -> Standing:
        standing: Standing = self.held.pass_.standing
        return standing


class _Trial(NamedTuple):
    """What was taken of one tensor twice."""

    doubt: _Doubt
    later: Any

    @property
    def has_arrived(self) -> bool:
        """Whether both can be looked at."""
        return bool(self.doubt.got.has_arrived and self.later.has_arrived)

    def is_same(self) -> bool | None:
        """Whether both are alike; None if one of them never came."""
        try:
            return bool(self.doubt.got.same_as(self.later))
        except Exception:
            return None


class Gathering:
    """What one thread's steps hold back on one device; another thread's tensors are taken at once.

    `keep` is given all that is held back, in order; `doubtful` is told of a point that turned out to be changed in a
    way that torch does not count. `taken` says how many bytes statistics take up on each device by themselves.
    """

    def __init__(
        self,
        gates: Any,
        place: int,
        *,
        take_all: TakeAll,
        alone: Alone,
        keep: Callable[[Held], None],
        doubtful: Callable[[Point], None],
        taken: Mapping[int, int] | None = None,
    ) -> None:
        self.place = place
        here = current_stream if is_alone() else _stream_here
        self.basket = gates.Basket(place, keep, self._rest, _MOST, here, is_capturing)
        self._stream_here: Callable[[], int] = partial(here, place)
        self.gates = gates
        self._take_all = take_all
        self._alone = alone
        self._doubtful = doubtful
        self._taken = {} if taken is None else taken
        self._thread: int | None = None
        self._step = 0
        self._points = 0
        self._agenda = Agenda()
        self._stream = -1
        self._origin: torch.cuda.Stream | None = None
        self._doubts: list[_Doubt] = []
        self._trials: deque[_Trial] = deque()

    @property
    def is_mine(self) -> bool:
        """Whether this is the thread whose steps are gathered."""
        return self._thread in (None, get_ident())

    def give_up(self) -> None:
        """Hold nothing back any more."""
        self._thread = -1
        self.basket.bar()
        self.basket.aim(None)
        self.gates.release([one.held for one in self._doubts])
        self._doubts.clear()
        self._trials.clear()

    def begin(self, step: Any) -> None:
        """Begin a step, and judge the points whose trial is over; None is a step in which nothing may wait."""
        thread = get_ident()
        if self._thread != thread:
            if self._thread is not None:
                return
            self._thread = thread
        if self.basket.bytes or self._doubts:
            self._leave_nothing()
        self._step += 1  # though nothing is due in it: what is seldom seen is tried whenever it is
        if self._step in self._agenda.points:
            self._agenda.strike(self._step)
        stream = self._stream_here()
        if stream > 0 and is_capturing():  # the default one is never captured
            stream = -1
        if stream != self._stream:
            self._stream = stream
            self.basket.aim(None)
            self._origin = None if stream == -1 else torch.cuda.current_stream(self.place)
        if self._trials and stream != -1:  # to ask whether something has arrived would spoil a capture
            with undisturbed():
                self._judge()
        if step is not None and stream != -1:
            self.basket.most = _MOST - self._taken.get(self.place, 0)
            self.basket.open(step, self._step, stream, step.alone)
        else:
            self.basket.shut()

    def hold(self, request: Request, tensor: torch.Tensor, moment: Moment) -> Held | None:
        """Hold a tensor back, if its point may be."""
        standing: Standing | None = request.standing
        return None if standing is None else self.basket.hold(standing.leave, tensor, moment)

    def doubt(self, request: Request, only: Only, tensor: torch.Tensor, got: Any) -> None:
        """Hold a tensor that was taken at once, to try whether that can wait; `got` is None if it could not be.

        A point is tried with all its calls of a step, or not at all.
        """
        standing: Standing | None = request.standing
        step = self.basket.step if self.is_mine else None
        if not request.gathers or (standing is not None and (standing.trials or standing.refused == self._step)):
            return
        if standing is None:
            if step is None:
                return
            standing = request.standing = Standing()
            standing.leave = self.gates.Pass(self.basket, request.point, only, standing, step.requests)
            self._points += 1
        size = 0 if got is None else tensor.untyped_storage().nbytes()  # of the whole that it may be a view of
        if only != "tensor" and (standing.never or size > _LARGEST):
            most = _SIZES if standing.never else _SIZES // 2  # the other half is for those that may wait
            if 0 < size <= _HUGE and standing.leave.count - len(standing.proofs) < most:
                standing.leave.allow(tensor.numel(), tensor.dtype, size, _FOREVER, True)
        elif standing.leave.count < _SIZES or (tensor.numel(), tensor.dtype) in standing.proofs:  # others never wait
            tried = got is not None and step is not None and self._can_try(standing, only, tensor, size)
            held = self.basket.make(standing.leave, tensor) if tried else None
            if held is None:
                self._refuse(standing, size)
                return
            self._doubts.append(_Doubt(held, size, got))
            if not any(other.held.tensor is tensor for other in self._doubts[-8:-1]):
                self.basket.doubted += size

    def _refuse(self, standing: Standing, size: int) -> None:
        """Try a point another time; what is in doubt of it is let go, and never tried again where it is too much."""
        standing.refused = self._step
        mine = [one for one in self._doubts if one.standing is standing]
        if mine:
            self._doubts = [one for one in self._doubts if one.standing is not standing]
            self.basket.doubted = sum({id(one.held.tensor): one.size for one in self._doubts}.values())
            if sum(one.size for one in mine) + size > _DOUBTED:
                standing.deny()

    def _can_try(self, standing: Standing, only: Only, tensor: torch.Tensor, size: int) -> bool:
        if standing.never or size > _LARGEST or tensor.is_inference():
            return False
        if self.basket.doubted + size > min(_DOUBTED, self.basket.most):
            return False
        if only != "tensor" and tensor.dtype is torch.float64:  # of which one launch takes one
            return False
        return self._stream_here() == self._stream

    def end(self) -> None:
        """Take what was held back, and once more what is in doubt."""
        if self._thread != get_ident():
            return
        self.basket.shut()
        self.flush()
        if self._doubts:
            self._try()

    def _try(self) -> None:
        """Take once more what is in doubt."""
        doubts, self._doubts = self._doubts, []
        self.basket.doubted = 0
        held = [one.held for one in doubts]
        try:
            self._take(self.gates.sorted(held, self.place), wanted=self._is_tried)
            for one in doubts:
                if one.held.got is None or isinstance(one.held.got, _Single):
                    one.standing.refused = self._step
            for one in doubts:
                if self._is_tried(one.standing):
                    one.standing.trials += 1
                    self._trials.append(_Trial(one, _part(one.held)))
                    one.got.leave()
                    leave_behind(one.held)
        finally:
            self.gates.release(held)

    def _is_tried(self, standing: Standing) -> bool:
        return not standing.never and standing.refused != self._step

    def flush(self) -> None:
        """Take what was held back until now."""
        left = self.basket.sweep()
        if left is not None:
            self._rest(left)

    def _rest(self, left: tuple[list[Held], Found]) -> None:
        """Take what there was no way for yet."""
        held, found = left
        try:
            self._take(found)
        finally:
            self.gates.release(held)

    def close(self) -> None:
        """Take what is held back, whoever's it is, and let go of the rest."""
        self.basket.shut()
        self.flush()
        self.basket.aim(None)
        if self._trials and not is_capturing():
            with undisturbed():
                self._judge()
        self._doubts.clear()
        self._trials.clear()

    def _leave_nothing(self) -> None:
        """Take what an interrupt left, and forget what it left in doubt."""
        self.basket.shut()
        self.flush()
        if self._doubts:
            self.gates.release([one.held for one in self._doubts])
            self._doubts.clear()
        self.basket.doubted = 0

    def _judge(self) -> None:
        while self._trials and self._trials[0].has_arrived:
            trial = self._trials.popleft()
            held, size, _ = trial.doubt
            standing, same = trial.doubt.standing, trial.is_same()
            waited = _sort(held) in standing.proofs
            standing.judge(held, size, self._again, same=bool(same))
            if waited and same is False:
                self._doubtful(held.pass_.point)

    def _again(self, steps: int, size: int) -> int:
        return self._agenda.book(self._step + steps, size, few=1 + self._points // _FEW)

    def _take(self, found: Found, *, wanted: Callable[[Standing], bool] = lambda standing: True) -> None:
        """Take each tensor once, whoever saw it, on the stream it was made on."""
        if self._origin is not None and self._stream_here() != self._stream:
            with torch.cuda.stream(self._origin):
                self._take_here(found, wanted)
        else:
            self._take_here(found, wanted)

    def _take_here(self, found: Found, wanted: Callable[[Standing], bool]) -> None:
        together, odd, changed = found
        for one in changed:
            one.pass_.standing.deny()
        for (only, dtype), group in together.items():
            those = [one for one in group if wanted(one.pass_.standing)]
            if those:
                self._take_all(only, dtype, those)
                odd += (one for one in those if one.got is None)
        for one in odd:
            if wanted(one.pass_.standing):
                one.got = _Single(self._alone(one.pass_.kind, one.tensor))
