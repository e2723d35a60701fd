"""Where a model's embedding is: the module whose output is what the first layer is given.

place = embedding_of(model, layers, args, kwargs)
place.point, place.call         # Point("model.embed_tokens"), 0
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from contextlib import suppress
from typing import Any, NamedTuple

import torch
from torch import nn

from layerscope.compiled.tapping import copied
from layerscope.points import Leaf, Point
from layerscope.runtimes import eager
from layerscope.runtimes.values import argument_leaves, leaves

__all__ = ["Embedding", "embedding_of"]


class Embedding(NamedTuple):
    """A point, and which call of it: an encoder and a decoder may share one embedding."""

    point: Point
    call: int


class _Reached(BaseException):
    """The first layer was reached; not an Exception, which the model may catch."""


def embedding_of(
    model: nn.Module, layers: list[str], args: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> Embedding | None:
    """Run a copy of the model up to its first layer; None when that does not run.

    Of several modules that pass the embedding on (a dropout in it), the outermost counts. Where the model's own code
    makes it (GPT-2 without its dropout), it is the input of the first layer.
    """
    calls: Counter[str] = Counter()
    made: list[tuple[Point, int, torch.Tensor]] = []  # kept alive, so that their memory is not used again
    found: list[Embedding] = []

    def after(name: str, value: object) -> None:
        made.extend((Point(name, "output", leaf), calls[name], tensor) for leaf, tensor in leaves(value))
        calls[name] += 1

    def reached(given: list[tuple[Leaf, torch.Tensor]]) -> None:
        floating = [(leaf, tensor) for leaf, tensor in given if tensor.is_floating_point()]
        if floating:
            leaf, states = floating[0]
            makers = [Embedding(point, call) for point, call, tensor in made if _same(tensor, states)]
            makers.sort(key=lambda maker: maker.point.name.count("."))
            found.append(makers[0] if makers else Embedding(Point(layers[0], "input", leaf), 0))
        raise _Reached

    model = copied(model)
    for name, module in eager.modules_of(model).by_name.items():
        if name == layers[0]:
            module.register_forward_pre_hook(lambda _, a, k: reached(argument_leaves(a, k)), with_kwargs=True)
        else:
            module.register_forward_hook(lambda _, a, value, name=name: after(name, value))
    with suppress(_Reached):
        model(*args, **kwargs)
    return found[0] if found else None


def _same(a: torch.Tensor, b: torch.Tensor) -> bool:
    lies, other = (a.data_ptr(), a.shape, a.stride(), a.dtype), (b.data_ptr(), b.shape, b.stride(), b.dtype)
    return lies == other
