"""Records on their way into a run in memory: copies and statistics may still have to arrive from a device.

pending.add(point, moment, taken, note)            # in a hook
pending.settle(run)                                # waits for what is on its way
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import Any, TypeAlias

import torch

from layerscope.points import Moment, Point
from layerscope.recorder.gpu.batches import leave as leave_device
from layerscope.stats import Summary
from layerscope.store import MemoryRun

_Record: TypeAlias = tuple[
    Point,
    Moment,
    "Callable[[], torch.Tensor] | None",
    "Summary | Callable[[], Summary] | None",
    "Mapping[str, Any] | None",
]


class Pending:
    """What hooks have added, in order."""

    def __init__(self) -> None:
        self.records: deque[_Record] = deque()
        self.add = self.records.append

    def settle(self, run: MemoryRun, failed: Callable[[Point, Moment, Exception], None], *, leave: int = 0) -> None:
        """Move the records into a run, but for those of the last `leave` steps; tell `failed` what does not arrive."""
        waiting: deque[_Record] = deque()
        with suppress(IndexError):  # another thread may be settling too
            for _ in range(len(self.records)):
                waiting.append(self.records.popleft())
        left: list[_Record] = []
        steps = list(dict.fromkeys(_step_of(one[1]) for one in waiting))
        last = set(steps[-leave:]) if leave else set()
        try:
            while waiting:
                one = waiting[0]
                if _step_of(one[1]) in last:
                    left.append(waiting.popleft())
                    with suppress(Exception):  # the reader of the values gets the error
                        for part in (one[2], one[3]):
                            leave_device(part)  # so that this one does not wait for a later step
                else:
                    _settle_one(run, one, failed)
                    waiting.popleft()
        finally:  # an interrupt while a copy is waited for loses nothing
            self.records.extendleft(reversed([*left, *waiting]))


def _settle_one(run: MemoryRun, one: _Record, failed: Callable[[Point, Moment, Exception], None]) -> None:
    point, moment, copy, summary, note = one
    try:
        kept = None if copy is None else copy()
        if callable(summary):
            summary = summary()
        run.add(point, moment, tensor=kept, summary=summary, note=note)
    except Exception as error:
        failed(point, moment, error)


def _step_of(moment: Moment) -> tuple[int | None, int, int]:
    return moment.epoch, moment.step, moment.batch
