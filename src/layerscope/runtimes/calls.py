"""What one thread is doing: the watched calls under way."""

from __future__ import annotations

import sys
import threading
from types import FrameType
from typing import NamedTuple

from torch.autograd.graph import Node

from layerscope.points import Leaf
from layerscope.runtimes.sink import Step

__all__ = ["Call", "Local"]


class Call(NamedTuple):
    """One call of a watched module, while it runs."""

    name: str
    step: Step
    number: int  # of this call within the step
    repeated: bool  # by activation checkpointing, in the backward pass
    follow: bool  # whether gradients will flow through it
    exception: BaseException | None  # what was being handled when the call began
    frame: FrameType  # that makes the call; an interrupt can end it without our hooks being told
    first_node: int  # autograd's number for the next node when the call began
    sources: list[tuple[Leaf, Node, int]]  # where the gradients of the inputs will flow to


class Local(threading.local):
    """The calls under way on this thread, outermost first."""

    def __init__(self) -> None:
        self.calls: list[Call] = []
        self.looking = False  # our own tensor operations are not the model's

    def innermost(self) -> Call | None:
        """Return the call that is running now; those that an interrupt ended unseen are taken off first."""
        while self.calls and not _on_stack(self.calls[-1].frame):
            self.calls.pop()
        return self.calls[-1] if self.calls else None

    def finished(self, name: str) -> Call | None:
        """Take off the innermost call of `name`, and what an interrupt left above it."""
        for depth in range(len(self.calls) - 1, -1, -1):
            if self.calls[depth].name == name:
                call = self.calls[depth]
                del self.calls[depth:]
                return call
        return None


def _on_stack(frame: FrameType) -> bool:
    """Tell whether the call that `frame` makes is still under way on this thread."""
    here: FrameType | None = sys._getframe(1)
    while here is not None and here is not frame:
        here = here.f_back
    return here is not None
