"""What each thread is doing: the watched calls under way."""

from __future__ import annotations

import sys
import threading
from types import FrameType
from typing import TYPE_CHECKING, NamedTuple
from weakref import WeakValueDictionary

from torch.autograd.graph import Node

from layerscope.points import Leaf
from layerscope.runtimes.sink import Step

if TYPE_CHECKING:
    from layerscope.runtimes.eager.shared_arguments import Aside


class Flow(NamedTuple):
    """Where gradients will flow through a call."""

    first_node: int  # autograd's number for the next node when the call began
    sources: tuple[tuple[Leaf, Node, int], ...] = ()  # where the inputs' gradients will flow to
    aside: Aside | None = None  # the same call made on the side, where one tensor is several inputs


class RunningCall(NamedTuple):
    """One call of a watched module, while it runs."""

    name: str
    step: Step
    number: int  # of this call within the step
    frame: FrameType | None  # that makes the call and runs the hooks
    handled: BaseException | None = None  # what was being handled when the call began: it raised nothing
    repeated: bool = False  # by activation checkpointing, in the backward pass
    flow: Flow | None = None


class Calls(list[RunningCall]):
    """The calls under way on one thread, outermost first."""


class Local(threading.local):
    """The calls of this thread; `everywhere` knows those of every thread that lives."""

    def __init__(self, everywhere: WeakValueDictionary[int, Calls]) -> None:
        self.calls = everywhere[threading.get_ident()] = Calls()
        self.ours = _Ours()

    def innermost(self) -> RunningCall | None:
        """Return the call that is running now, once those that an interrupt ended without their hooks are taken off."""
        calls, here = self.calls, sys._getframe(1)
        while calls and not _is_running(calls[-1].frame, here):
            calls.pop()
        return calls[-1] if calls else None

    def ended(self, name: str) -> RunningCall | None:
        """Take off the innermost call of a module, and what an interrupt left above it; None where none was seen."""
        calls = self.calls
        for depth in range(len(calls) - 1, -1, -1):
            if calls[depth].name == name:
                call = calls[depth]
                del calls[depth:]
                return call
        return None


class _Ours:
    """While it is entered, tensor operations are ours and not the model's."""

    __slots__ = ("depth",)

    def __init__(self) -> None:
        self.depth = 0

    def __bool__(self) -> bool:
        return self.depth > 0

    def __enter__(self) -> None:
        self.depth += 1

    def __exit__(self, *_: object) -> None:
        self.depth -= 1


def _is_running(frame: FrameType | None, here: FrameType | None) -> bool:
    while here is not None and here is not frame:
        here = here.f_back
    return here is not None
