"""A dozen tiny models, each with one awkwardness.

    model, inputs = zoo.tuple_outputs()

Every entry of `ALL` is a function that returns a seeded model and the positional arguments of one forward.
"""

from __future__ import annotations

from collections import namedtuple
from dataclasses import dataclass

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

Pair = namedtuple("Pair", ["first", "second"])


@dataclass
class Parts:
    hidden: torch.Tensor
    weights: torch.Tensor
    label: str = "not a tensor"


class Broken(nn.Module):
    """Two layers that torch.compile makes two graphs of."""

    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x):
        x = self.a(x)
        torch._dynamo.graph_break()
        return self.b(x)


class Holder(nn.Module):
    """A module whose forward is a function given to it; children by keyword."""

    def __init__(self, forward, **children):
        super().__init__()
        for name, child in children.items():
            self.add_module(name, child)
        self._forward = forward

    def forward(self, *args, **kwargs):
        return self._forward(self, *args, **kwargs)


def seeded(make):
    def made():
        torch.manual_seed(0)
        return make()

    made.__name__ = make.__name__
    return made


@seeded
def plain():
    return nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 3)), (torch.randn(5, 4),)


@seeded
def shared():
    """One linear layer under two names, called under both."""
    layer = nn.Linear(4, 4)
    return Holder(lambda m, x: m.b(m.a(x)), a=layer, b=layer), (torch.randn(2, 4),)


@seeded
def called_thrice():
    def forward(m, x):
        for _ in range(3):
            x = m.layer(x)
        return x

    return Holder(forward, layer=nn.Linear(4, 4)), (torch.randn(2, 4),)


@seeded
def recursive():
    """A module that calls itself until its input is short."""

    def forward(m, x):
        x = m.layer(x)
        return m(x[1:]) if len(x) > 1 else x

    return Holder(forward, layer=nn.Linear(4, 4)), (torch.randn(3, 4),)


@seeded
def tuple_outputs():
    block = Holder(lambda m, x: (m.layer(x), None, [x * 2]), layer=nn.Linear(4, 4))
    return Holder(lambda m, x: m.block(x)[0], block=block), (torch.randn(2, 4),)


@seeded
def dict_outputs():
    block = Holder(lambda m, x: {"hidden": m.layer(x), "odd key/]": x + 1, 3: x}, layer=nn.Linear(4, 4))
    return Holder(lambda m, x: m.block(x)["hidden"], block=block), (torch.randn(2, 4),)


@seeded
def named_outputs():
    """A dataclass and a named tuple."""
    first = Holder(lambda m, x: Parts(m.layer(x), x), layer=nn.Linear(4, 4))
    second = Holder(lambda m, p: Pair(p.hidden, p.weights.sum()))
    return Holder(lambda m, x: m.second(m.first(x)).first, first=first, second=second), (torch.randn(2, 4),)


@seeded
def keyword_inputs():
    block = Holder(lambda m, x, *, scale, extras: m.layer(x) * scale + extras["bias"], layer=nn.Linear(4, 4))
    return Holder(lambda m, x: m.block(x, scale=torch.tensor(2.0), extras={"bias": torch.ones(4)}), block=block), (
        torch.randn(2, 4),
    )


@seeded
def in_place():
    """The tensor that was recorded is changed by the next module."""
    return nn.Sequential(nn.Linear(4, 4), nn.ReLU(inplace=True), nn.Linear(4, 4)), (torch.randn(2, 4),)


@seeded
def never_called():
    return Holder(lambda m, x: m.used(x), used=nn.Linear(4, 4), unused=nn.Linear(4, 4)), (torch.randn(2, 4),)


@seeded
def attention():
    """`MultiheadAttention` uses its out_proj's weights and never calls it."""
    return Holder(lambda m, x: m.attn(x, x, x)[0], attn=nn.MultiheadAttention(8, 2)), (torch.randn(3, 2, 8),)


@seeded
def half_precision():
    return nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 3)).bfloat16(), (torch.randn(5, 4).bfloat16(),)


@seeded
def dropout():
    return nn.Sequential(nn.Linear(4, 64), nn.Dropout(0.5), nn.Linear(64, 3)).train(), (torch.randn(5, 4),)


@seeded
def not_finite():
    block = Holder(lambda m, x: torch.cat([x, x.new_tensor([[float("nan"), float("inf"), -float("inf"), 0.0]])]))
    return nn.Sequential(nn.Linear(4, 4), block), (torch.randn(2, 4),)


@seeded
def residual():
    """Two consumers of one input: a module's own share of the gradient is not the whole."""
    return Holder(lambda m, x: x + m.branch(x), branch=nn.Linear(4, 4)), (torch.randn(2, 4, requires_grad=True),)


@seeded
def no_tensors():
    return Holder(lambda m, x: (m.teller(x), x)[1], teller=Holder(lambda m, x: None)), (torch.randn(2),)


def checkpointed(*, reentrant: bool):
    """Two blocks whose activations are computed again in the backward pass."""
    torch.manual_seed(0)

    def block():
        return nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4))

    def forward(m, x):
        for name in ("one", "two"):
            x = checkpoint(getattr(m, name), x, use_reentrant=reentrant)
        return x

    return Holder(forward, one=block(), two=block()), (torch.randn(2, 4, requires_grad=True),)


ALL = [
    plain,
    shared,
    called_thrice,
    recursive,
    tuple_outputs,
    dict_outputs,
    named_outputs,
    keyword_inputs,
    in_place,
    never_called,
    attention,
    half_precision,
    dropout,
    not_finite,
    residual,
    no_tensors,
]
