"""Which step, batch and epoch it is.

clock.set(epoch=2)              # from here on, batches count from 0 again
clock.begin()                   # an outermost forward: the next step
clock.set(epoch=2, batch=7)     # until the next `set`, every forward belongs to batch 7
"""

from __future__ import annotations

import threading
from operator import index
from typing import SupportsIndex

from layerscope.points import Moment


class Clock:
    """Number the forwards, unless the caller does.

    Left alone, each forward is a step, and a batch of its epoch. Once the caller names a batch or a step, forwards stay
    in it until the caller names the next: two forwards of one batch are then two calls of the same step.
    """

    def __init__(self, *, rank: int = 0, step: int = 0) -> None:
        self._lock = threading.Lock()
        self._rank = rank
        self._epoch: int | None = None
        self._step = step  # what the next step and batch will be numbered
        self._batch = 0
        self.named: Moment | None = None  # by the caller: forwards belong to it, however many
        self._used = False

    def set(
        self,
        *,
        epoch: SupportsIndex | None = None,
        step: SupportsIndex | None = None,
        batch: SupportsIndex | None = None,
    ) -> None:
        """Say what comes next; what is left out goes on counting."""
        epoch, step, batch = _whole("epoch", epoch), _whole("step", step), _whole("batch", batch)
        with self._lock:
            if self.named is not None and (epoch, step, batch) == (self._epoch, self.named.step, self.named.batch):
                return  # the moment that holds already: its forwards go on being calls of one step
            if self.named is not None and self._used:
                self._step, self._batch = self.named.step + 1, self.named.batch + 1
            self.named, self._used = None, False
            if epoch is not None and epoch != self._epoch:
                self._epoch, self._batch = epoch, 0
            self._step = self._step if step is None else step
            self._batch = self._batch if batch is None else batch
            if step is not None or batch is not None:
                self.named = Moment(self._epoch, self._step, self._batch, 0, self._rank)

    def begin(self) -> Moment:
        """Return the moment of the forward that is about to run; the same object while the caller's name holds."""
        with self._lock:
            self._used = True
            if self.named is not None:
                return self.named
            moment = Moment(self._epoch, self._step, self._batch, 0, self._rank)
            self._step += 1
            self._batch += 1
            return moment


def _whole(word: str, value: SupportsIndex | None) -> int | None:
    if value is None:
        return None
    try:
        number = -1 if isinstance(value, bool) else index(value)
    except TypeError:
        number = -1
    if number < 0:
        raise ValueError(f"{word}={value!r} is not a moment; give a whole number from 0 on.")
    return number
