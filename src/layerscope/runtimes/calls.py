"""What each thread is doing: the watched calls under way."""

from __future__ import annotations

import sys
import threading
from collections.abc import Iterator
from itertools import pairwise, takewhile
from types import FrameType
from typing import NamedTuple, TypeAlias
from weakref import WeakValueDictionary

import torch
from torch.autograd.graph import Node

from layerscope.native import CALL, CALLING, RAISED
from layerscope.points import Leaf
from layerscope.runtimes.doors import may_stand
from layerscope.runtimes.sink import Step

__all__ = ["Call", "Calls", "Local", "Special", "frames_to", "has_raised", "modules_running", "runs_of"]

_CALL_OF_A_MODULE = CALL.__code__


class Special(NamedTuple):
    """What is to be known of a call that is not simply one of the forward's, or through which gradients will flow."""

    repeated: bool  # by activation checkpointing, in the backward pass
    follow: bool  # whether gradients will flow through it
    first_node: int = 0  # autograd's number for the next node when the call began
    sources: tuple[tuple[Leaf, Node, int], ...] = ()  # where the inputs' gradients will flow to


# One call of a watched module, while it runs: the module's name; the step; the number of this call within it; the
# frame that makes the call and runs the hooks, which an interrupt can end without their being told; what is special. A
# bare tuple: there is one for every call of every module, and anything else takes five times as long to make.
Call: TypeAlias = tuple[str, Step, int, FrameType, "Special | None"]


class Calls(list[Call]):
    """The calls under way on one thread, outermost first; those of an idle step below the outermost are left out."""


class Local(threading.local):
    """The calls of this thread; `everywhere` knows those of every thread that lives."""

    def __init__(self, everywhere: WeakValueDictionary[int, Calls]) -> None:
        self.calls = everywhere[threading.get_ident()] = Calls()
        self.looking = False  # our own tensor operations are not the model's

    def insert(self, calls: list[Call]) -> None:
        """Put calls among those under way, where they were made: others may have begun inside them since."""
        depth = {id(frame): -away for away, frame in enumerate(_stack())}
        self.calls += calls
        self.calls.sort(key=lambda call: depth.get(id(call[3]), 0))

    def innermost(self) -> Call | None:
        """Return the call that is running now; those that an interrupt ended unseen are taken off first."""
        calls = self.calls
        while calls and calls[-1][3] not in _stack():
            calls.pop()
        return calls[-1] if calls else None

    def ended(self, frame: FrameType) -> Call | None:
        """Take off the call that `frame` made, or that raised into it, and what an interrupt left above it."""
        calls = self.calls
        for depth in range(len(calls) - 1, -1, -1):
            made_by = calls[depth][3]
            if made_by is frame or made_by.f_back is frame:
                call = calls[depth]
                del calls[depth:]
                return call
        return None


def modules_running() -> Iterator[torch.nn.Module]:
    """Return the modules whose calls are under way on this thread, watched or not, the innermost first."""
    return (module for module, _ in _under_way())


def runs_of(module: torch.nn.Module, *, within: FrameType | None = None) -> list[FrameType]:
    """Return the frames that make the calls of a module which are under way on this thread, the outermost first.

    Those that were made before `within` are left out.
    """
    inner = takewhile(lambda call: call[1] is not within, _under_way())
    return [frame for called, frame in inner if called is module][::-1]


def has_raised(frame: FrameType, value: object) -> bool:
    """Tell whether the frame that runs a hook with this value does so because the module's forward raised."""
    return value is RAISED or (value is None and frame.f_code is _CALL_OF_A_MODULE)


def frames_to(outer: FrameType, frame: FrameType) -> int:
    """Count the frames from a hook that `frame` runs to one further out, -1 if there is none, as without a door."""
    frames = 1 + (2 if frame.f_code is CALLING else 0)  # torch's own two, which a door does without
    here: FrameType | None = frame
    while here is not None:
        if here is outer:
            return frames
        here, frames = here.f_back, frames + 1
    return -1


def _under_way() -> Iterator[tuple[torch.nn.Module, FrameType]]:
    """Walk this thread's calls of modules and the frames that make them: behind a door, that is torch's outermost."""
    for inner, frame in pairwise(_stack()):
        if frame.f_code is _CALL_OF_A_MODULE:
            yield frame.f_locals["self"], inner
        elif frame.f_code is CALLING and inner.f_code is not _CALL_OF_A_MODULE:
            module = frame.f_locals["self"]
            if may_stand(module):
                yield module, frame


def _stack() -> Iterator[FrameType]:
    """Walk this thread's frames from the inside out, as far as is asked."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        yield frame
        frame = frame.f_back
