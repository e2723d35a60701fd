"""What one thread is doing: the watched calls under way."""

from __future__ import annotations

import sys
import threading
from dataclasses import dataclass, field
from types import FrameType

from torch.autograd.graph import Node

from layerscope.points import Leaf
from layerscope.runtimes.sink import Step

__all__ = ["Call", "Local"]

# _on_stack, innermost, enter and __call__ of ours; inner, _call_impl, _wrapped_call_impl, forward and inner of torch's.
_USUAL = 8


@dataclass(slots=True, eq=False)
class Call:
    """One call of a watched module, while it runs."""

    name: str
    step: Step
    number: int  # of this call within the step
    repeated: bool  # by activation checkpointing, in the backward pass
    follow: bool  # whether gradients will flow through it
    exception: BaseException | None  # what was being handled when the call began
    frame: FrameType  # that makes the call; an interrupt can end it without our hooks being told
    first_node: int = 0  # autograd's number for the next node when the call began
    sources: list[tuple[Leaf, Node, int]] = field(default_factory=list)  # where the inputs' gradients will flow to


class Local(threading.local):
    """The calls under way on this thread, outermost first."""

    def __init__(self) -> None:
        self.calls: list[Call] = []
        self.looking = False  # our own tensor operations are not the model's

    def innermost(self) -> Call | None:
        """Return the call that is running now; those that an interrupt ended unseen are taken off first."""
        calls = self.calls
        while calls and not _on_stack(calls[-1].frame):
            calls.pop()
        return calls[-1] if calls else None

    def finished(self, name: str) -> Call | None:
        """Take off the innermost call of `name`, and what an interrupt left above it."""
        calls = self.calls
        if calls and calls[-1].name == name:
            return calls.pop()
        for depth in range(len(calls) - 1, -1, -1):
            if calls[depth].name == name:
                call = calls[depth]
                del calls[depth:]
                return call
        return None


def _on_stack(frame: FrameType) -> bool:
    """Tell whether the call that `frame` makes is still under way on this thread.

    A module is mostly called by the one around it, so many frames up. To look there makes an object of that frame
    alone; to walk makes one of every frame on the way.
    """
    try:
        if sys._getframe(_USUAL) is frame:
            return True
    except ValueError:  # the stack is not that deep
        pass
    here: FrameType | None = sys._getframe(1)
    while here is not None and here is not frame:
        here = here.f_back
    return here is not None
