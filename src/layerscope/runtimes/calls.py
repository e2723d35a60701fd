"""What one thread is doing: the watched calls under way."""

from __future__ import annotations

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
    exception: BaseException | None  # what was being handled when the call began
    sources: list[tuple[Leaf, Node, int]]  # where the gradients of the inputs will flow to


class Local(threading.local):
    """The calls under way on this thread, outermost first."""

    def __init__(self) -> None:
        self.calls: list[Call] = []
        self.frame: FrameType | None = None  # of the outermost call
        self.looking = False  # our own tensor operations are not the model's

    def finished(self, name: str) -> Call | None:
        """Take off the innermost call of `name`, and what an interrupt left above it."""
        for depth in range(len(self.calls) - 1, -1, -1):
            if self.calls[depth].name == name:
                call = self.calls[depth]
                del self.calls[depth:]
                return call
        return None
