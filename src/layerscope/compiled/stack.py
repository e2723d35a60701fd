"""The decoder layers of a model, found by structure: a list of like blocks that is not inside another one.

    stack_of(model)         # ["model.layers.0", "model.layers.1", ...]

Where a model has several (an encoder and a decoder, a picture's tower and a text's), it is the decoder's, else the one
with the most parameters.
"""

from __future__ import annotations

import torch
from torch import nn

from layerscope.runtimes.eager import modules_of

__all__ = ["head_of", "stack_of"]

_HEADS = ("lm_head", "embed_out", "output_projection")


def stack_of(model: nn.Module) -> list[str]:
    """Return the names of the layers in order of depth; none where no list of like blocks is found."""
    by_name = modules_of(model).by_name
    names = {id(module): name for name, module in by_name.items()}
    lists = {name: module for name, module in by_name.items() if _is_stack(module)}
    outermost = {name: blocks for name, blocks in lists.items() if not any(_inside(name, other) for other in lists)}
    if not outermost:
        return []
    _, blocks = max(outermost.items(), key=lambda item: ("decoder" in item[0].split("."), _size(item[1])))
    return [names[id(block)] for block in blocks.children()]


def head_of(model: nn.Module) -> str | None:
    """Return the module that makes the logits: a linear layer called so, or one as wide as the vocabulary."""
    by_name = modules_of(model).by_name
    sizes = {module.num_embeddings for module in by_name.values() if isinstance(module, nn.Embedding)}
    linear = {name: module for name, module in by_name.items() if isinstance(module, nn.Linear)}
    named = [name for name in linear if name.rpartition(".")[2] in _HEADS]
    wide = [name for name, module in linear.items() if module.out_features in sizes]
    found = named or wide
    return found[-1] if found else None


def _is_stack(module: nn.Module) -> bool:
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
