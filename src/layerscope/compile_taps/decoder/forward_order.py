"""One forward, followed: in which order modules run, and where what they are given comes from.

    order = followed(model, lists_of(model), args, kwargs)
    order.began                       # ["model", "model.embed_tokens", "model.layers.0", ...]
    order.embeddings["model.layers"]  # what the first of its blocks was given, and who made it

What is inside the blocks of a list is not looked at: blocks are told apart by how they run, not by what they do.
"""

from __future__ import annotations

from collections.abc import Mapping
from itertools import accumulate
from typing import Any, NamedTuple

import torch
from torch import nn

from layerscope.compile_taps.decoder.embedding import Embedding, Makers, TensorState, is_plain
from layerscope.compile_taps.tapped_model import copied
from layerscope.points import Leaf, Point
from layerscope.runtimes.eager import modules_of
from layerscope.runtimes.values import argument_leaves, leaves

OWN, COPY, OTHERS = range(3)

Given = list[tuple[Leaf, torch.Tensor]]


class ForwardOrder(NamedTuple):
    """The way a forward went.

    `began` has the calls in the order they begin, `blocks` the names of those that are blocks of a list. `beside` are
    the lists of which a block was given just what the one before it was: they run side by side. `embeddings` are, by
    list, where the states come from that its first block was given. `tables` are the modules that look ids up, and how
    those stand to the caller's: OWN (the same memory), COPY, or OTHERS, as positions are.
    """

    began: list[str]
    blocks: frozenset[str]
    beside: set[str]
    embeddings: dict[str, Embedding]
    tables: dict[str, int]


def followed(
    model: nn.Module, lists: Mapping[str, list[str]], args: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> ForwardOrder:
    """Run a copy of the model; `lists` are the names of lists of blocks, and of their blocks."""
    copy = copied(model)
    follower = _Follower(lists, [tensor for _, tensor in argument_leaves(args, kwargs)])
    for name, module in modules_of(copy).by_name.items():
        if not follower.is_inside_a_block(name):
            follower.attach(name, module)
    copy(*args, **kwargs)
    return follower.order


class _Follower:
    def __init__(self, lists: Mapping[str, list[str]], tensors: list[torch.Tensor]) -> None:
        self._list_of = {block: name for name, blocks in lists.items() for block in blocks}
        self.order = ForwardOrder([], frozenset(self._list_of), set(), {}, {})
        self._ids = [tensor for tensor in tensors if _is_ids(tensor)]
        self._makers = Makers()
        self._waiting = set(lists)
        self._arrived: dict[str, list[tuple[torch.Tensor, Embedding]]] = {}
        self._last: dict[str, tuple[str, list[TensorState]]] = {}

    def is_inside_a_block(self, name: str) -> bool:
        above = list(accumulate(name.split("."), "{}.{}".format))[:-1]
        return any(each in self._list_of for each in above)

    def attach(self, name: str, module: nn.Module) -> None:
        is_table = isinstance(module, nn.Embedding)

        def before(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            given = argument_leaves(args, kwargs)
            self.order.began.append(name)
            if is_table:
                ranks = [self._rank(tensor) for _, tensor in given if _is_ids(tensor)]
                self.order.tables[name] = min([*ranks, self.order.tables.get(name, OTHERS)])
            if name in self._list_of:
                self._block(self._list_of[name], name, given)

        def after(_: nn.Module, args: tuple[Any, ...], value: object) -> None:
            if name in self._list_of:
                self._settle(self._list_of[name], value)
            if self._waiting:
                self._makers.gave(name, value)

        module.register_forward_pre_hook(before, with_kwargs=True)
        module.register_forward_hook(after)

    def _block(self, listed: str, name: str, given: Given) -> None:
        if listed in self._waiting:
            self._arrived[listed] = [
                (tensor, self._makers.of(tensor) or Embedding(Point(name, "input", leaf), 0))
                for leaf, tensor in given
                if tensor.is_floating_point()
            ]
            self._waiting.discard(listed)
            if not self._waiting:
                self._makers.forget()
        before, seen = self._last.get(listed, (name, []))
        now = [TensorState.of(tensor) for _, tensor in given]
        if before != name and len(now) == len(seen) and all(map(TensorState.is_same, now, seen)):
            self.order.beside.add(listed)
        self._last[listed] = (name, now)

    def _settle(self, listed: str, value: object) -> None:
        """Of what the first block was given, take what looks like what it gives: a mask or positions are no states."""
        arrived = self._arrived.pop(listed, [])
        gives = [_extent(tensor) for _, tensor in leaves(value) if tensor.is_floating_point()][:1]
        alike = [maker for tensor, maker in arrived if _extent(tensor) in gives]
        found = alike or [maker for _, maker in arrived]
        if found:
            self.order.embeddings[listed] = found[0]

    def _rank(self, ids: torch.Tensor) -> int:
        if any(ids.untyped_storage().data_ptr() == own.untyped_storage().data_ptr() for own in self._ids):
            return OWN
        return COPY if any(_is_copy(ids, own) for own in self._ids) else OTHERS


def _extent(tensor: torch.Tensor) -> object:
    return "nested" if tensor.is_nested else tensor.shape


def _is_copy(ids: torch.Tensor, own: torch.Tensor) -> bool:
    return ids.numel() == own.numel() and bool((ids.cpu().flatten() == own.cpu().flatten()).all())


def _is_ids(tensor: torch.Tensor) -> bool:
    return is_plain(tensor) and not tensor.is_floating_point() and not tensor.is_complex()
