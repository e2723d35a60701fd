"""The decoder layers of a model: a list of like blocks that is not inside another one, and that runs in sequence.

    lists = lists_of(model)                     # {"model.layers": ["model.layers.0", "model.layers.1", ...]}
    stack_of(model, lists, followed(model, lists, args, kwargs)).layers

Where several run (an encoder and a decoder, a picture's tower and a text's), it is the decoder's where there is an
encoder, else the one with the most parameters.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

import torch
from torch import nn

from layerscope.compile_taps.decoder.embedding import Embedding
from layerscope.compile_taps.decoder.forward_order import ForwardOrder
from layerscope.runtimes.eager import modules_of


class Stack(NamedTuple):
    """The layers as they are listed, those that ran in the order they did, and what the first of these was given."""

    layers: list[str]
    ran: list[str]
    embedding: Embedding | None

    @property
    def disorder(self) -> str:
        """What is to be said of layers that run in another order than they are listed in; nothing of others."""
        if self.ran == [layer for layer in dict.fromkeys(self.layers) if layer in self.ran]:
            return ""
        order = ", ".join(str(self.layers.index(layer)) for layer in self.ran)
        return f"the layers run in the order {order}, and their hidden states come in that order"


def lists_of(model: nn.Module) -> dict[str, list[str]]:
    """Return the outermost lists of like blocks, by name, and the names of their blocks."""
    by_name = modules_of(model).by_name
    names = {id(module): name for name, module in by_name.items()}
    lists = {name: module for name, module in by_name.items() if _is_list(module)}
    return {
        name: [names[id(block)] for block in blocks.children()]
        for name, blocks in lists.items()
        if not any(_inside(name, other) for other in lists)
    }


def stack_of(model: nn.Module, lists: Mapping[str, list[str]], order: ForwardOrder) -> Stack | None:
    """Return the stack among the lists, by how a forward went; None where none of them ran in sequence."""
    by_name = modules_of(model).by_name
    ran = {name: list(dict.fromkeys(each for each in order.began if each in set(lists[name]))) for name in lists}
    running = [name for name in lists if ran[name] and name not in order.beside]
    if not running:
        return None
    coded = any("encoder" in name.split(".") for name in running)
    chosen = max(running, key=lambda name: (coded and "decoder" in name.split("."), _size(by_name[name])))
    return Stack(lists[chosen], ran[chosen], order.embeddings.get(chosen))


def _is_list(module: nn.Module) -> bool:
    """Tell whether a module is a list of blocks, each with modules of its own, of few classes for its length."""
    if not isinstance(module, (nn.ModuleList, nn.Sequential)):
        return False
    blocks = list(module.children())
    kinds = {type(block) for block in blocks}
    have_parts = all(next(block.children(), None) is not None for block in blocks)
    return bool(blocks) and have_parts and 2 * len(kinds) <= len(blocks) + 1


def _inside(name: str, other: str) -> bool:
    return name != other and (not other or name.startswith(f"{other}."))


def _size(module: nn.Module) -> int:
    return sum(parameter.numel() for parameter in module.parameters() if isinstance(parameter, torch.Tensor))
