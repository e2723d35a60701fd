"""The module that makes the logits.

    head_of(model, stack, order)          # "lm_head"; None where nothing is known to be one

It is what the model itself says (`get_output_embeddings`, or a name such as lm_head), else a linear layer that runs
after the stack and is as wide as the vocabulary of the embedding that feeds it. A table of positions is no vocabulary.
"""

from __future__ import annotations

from collections.abc import Mapping

from torch import nn

from layerscope.compile_taps.decoder.forward_order import OTHERS, ForwardOrder
from layerscope.compile_taps.decoder.stack import Stack
from layerscope.runtimes.eager import modules_of

_HEADS = ("lm_head", "embed_out", "output_projection")


def head_of(model: nn.Module, stack: Stack | None, order: ForwardOrder) -> str | None:
    """Return the name of the module whose output is the logits, of those that ran."""
    by_name = modules_of(model).by_name
    own = [name for name in _own(by_name) if name in order.began]
    if own:
        return own[0]
    layers = set(stack.layers) if stack else set(order.tables)
    last = max((at for at, name in enumerate(order.began) if name in layers), default=-1)
    after = order.began[last + 1 :]
    named = [name for name in after if name.rpartition(".")[2] in _HEADS]
    size = _vocabulary(by_name, stack, order)
    wide = [name for name in after if isinstance(each := by_name[name], nn.Linear) and each.out_features == size]
    found = named or wide
    return found[-1] if found else None


def _own(by_name: Mapping[str, nn.Module]) -> list[str]:
    """Return what the model, or a part of it, gives for its head, the outermost first."""
    names = {id(module): name for name, module in by_name.items()}
    found = []
    for module in by_name.values():
        ask = getattr(module, "get_output_embeddings", None)
        try:
            head = ask() if callable(ask) else None
        except (NotImplementedError, AttributeError):
            continue
        if id(head) in names:
            found.append(names[id(head)])
    return found


def _vocabulary(by_name: Mapping[str, nn.Module], stack: Stack | None, order: ForwardOrder) -> int | None:
    """Return how many tokens the embedding knows that feeds the stack; None where that is not clear."""
    maker = by_name.get(stack.embedding.point.name) if stack and stack.embedding else None
    if isinstance(maker, nn.Embedding):
        return maker.num_embeddings
    before = order.began[: order.began.index(stack.ran[0])] if stack else order.began
    another = max((at for at, name in enumerate(before) if name in order.blocks), default=-1)  # an encoder's last
    fed = _fed(before[another + 1 :], order) or _fed(before, order)
    table = by_name[fed[0]] if fed else None
    return table.num_embeddings if isinstance(table, nn.Embedding) else None


def _fed(names: list[str], order: ForwardOrder) -> list[str]:
    """Return the tables that are given the caller's ids, those that are given the very tensor first."""
    tables = [name for name in names if order.tables.get(name, OTHERS) < OTHERS]
    return sorted(tables, key=lambda name: order.tables[name])
