"""What each thread is doing: the watched calls under way."""

from __future__ import annotations

import sys
import threading
from collections.abc import Iterator
from types import FrameType
from typing import TYPE_CHECKING, NamedTuple, TypeAlias
from weakref import WeakValueDictionary

import torch
from torch.autograd.graph import Node

from layerscope.points import Leaf
from layerscope.runtimes.sink import Step

if TYPE_CHECKING:
    from layerscope.runtimes.eager.shared_arguments import Aside

__all__ = ["Call", "Calls", "Local", "Special", "is_running", "modules_running"]

_CALL_OF_A_MODULE = torch.nn.Module._call_impl.__code__


class Special(NamedTuple):
    """What is to be known of a call that is not simply one of the forward's, or through which gradients will flow."""

    repeated: bool  # by activation checkpointing, in the backward pass
    follow: bool  # whether gradients will flow through it
    first_node: int = 0  # autograd's number for the next node when the call began
    sources: tuple[tuple[Leaf, Node, int], ...] = ()  # where the inputs' gradients will flow to
    aside: Aside | None = None  # the same call made on the side, where one tensor is several inputs


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

    def innermost(self) -> Call | None:
        """Return the call that is running now; those that an interrupt ended unseen are taken off first."""
        calls, here = self.calls, sys._getframe(1)
        while calls and not is_running(calls[-1][3], within=here):
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


def is_running(frame: FrameType, *, within: FrameType) -> bool:
    """Tell whether the call that `frame` makes is under way around `within`: an interrupt ends calls unseen."""
    here: FrameType | None = within
    while here is not None:
        if here is frame:
            return True
        here = here.f_back
    return False


def modules_running() -> Iterator[torch.nn.Module]:
    """Return the modules whose calls are under way on this thread, watched or not, the innermost first."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        if frame.f_code is _CALL_OF_A_MODULE:
            yield frame.f_locals["self"]
        frame = frame.f_back
