"""Where what a block is given comes from: the module that made it, for the first layer the model's embedding.

makers = Makers()
makers.gave("model.embed_tokens", value)
makers.of(states)               # Embedding(Point("model.embed_tokens"), 0)
"""

from __future__ import annotations

from collections import Counter
from typing import NamedTuple

import torch

from layerscope.points import Point
from layerscope.runtimes.values import leaves


class Embedding(NamedTuple):
    """A point, and which call of it: an encoder and a decoder may share one embedding."""

    point: Point
    call: int


class TensorState(NamedTuple):
    """A tensor as it was when it was seen; it is kept alive, so that its memory is not used again."""

    tensor: torch.Tensor
    lies: tuple[object, ...]
    version: int | None

    @classmethod
    def of(cls, tensor: torch.Tensor) -> TensorState:
        """Look at a tensor now; those of inference mode do not tell when they are changed."""
        lies = (tensor.data_ptr(), tensor.shape, tensor.stride(), tensor.dtype) if is_plain(tensor) else (id(tensor),)
        return cls(tensor, lies, None if tensor.is_inference() else tensor._version)

    def is_same(self, other: TensorState) -> bool:
        """Tell whether both are the same memory, and nothing wrote into it in between."""
        return (self.lies, self.version) == (other.lies, other.version)


def is_plain(tensor: torch.Tensor) -> bool:
    """Tell whether a tensor has its values in one piece of memory: nested and sparse ones, and subclasses, may not."""
    usual = type(tensor) in (torch.Tensor, torch.nn.Parameter)
    return usual and tensor.layout is torch.strided and not tensor.is_nested


class Makers:
    """What modules gave so far in a forward."""

    def __init__(self) -> None:
        self._calls: Counter[str] = Counter()
        self._made: list[tuple[Embedding, TensorState]] = []

    def gave(self, name: str, value: object) -> None:
        """Note what a call of a module returned."""
        for leaf, tensor in leaves(value):
            self._made.append((Embedding(Point(name, "output", leaf), self._calls[name]), TensorState.of(tensor)))
        self._calls[name] += 1

    def of(self, tensor: torch.Tensor) -> Embedding | None:
        """Return what made a tensor; None where the model's own code did, or changed it since.

        Of several modules that pass it on (a dropout in an embedding), the outermost counts.
        """
        now = TensorState.of(tensor)
        makers = [maker for maker, made in self._made if made.is_same(now)]
        return min(makers, key=lambda maker: maker.point.name.count("."), default=None)

    def forget(self) -> None:
        """Let go of the tensors."""
        self._made.clear()
