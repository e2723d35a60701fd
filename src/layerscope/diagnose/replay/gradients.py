"""Gradients as they passed a forward, and the backward half of a run on the reference's values.

    boundary(value, lambda gradient: keep(gradient))
    handed = backwards.hand(frame, ...)      # an argument: a leaf of the call's own, whose gradient is read at the end
    given = backwards.give(frame, ...)       # an output: the reference's gradient goes in, and past the call to its
    arguments

Each call is given the reference's gradient at its output, so that no call depends on what another does to it. What it
makes of it is measured at its arguments; what reaches those outside is the reference's again, whether the call lets any
gradient through or not.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import nn

from layerscope.diagnose.replay.module_hooks import Key
from layerscope.points import Leaf

Passing = tuple[tuple[str, int], str, Leaf]  # a call, a side, a leaf


class Gradients:
    """The gradients that passed each place of a forward, added up where a value was used more than once."""

    def __init__(self) -> None:
        self.at: dict[Passing, torch.Tensor] = {}
        self.parameters: dict[tuple[str, str], torch.Tensor] = {}  # by module and name

    def keep(self, place: Passing, gradient: torch.Tensor) -> torch.Tensor:
        """Keep a gradient and let it pass."""
        known = self.at.get(place)
        self.at[place] = gradient.detach() if known is None else known + gradient.detach()
        return gradient

    def take_parameters(self, modules: Mapping[str, nn.Module]) -> None:
        """Keep what the backward pass left on the parameters."""
        for name, module in modules.items():
            for key, parameter in module.named_parameters(recurse=False):
                if parameter.grad is not None:
                    self.parameters[name, key] = parameter.grad.detach().clone()


def boundary(got: torch.Tensor, passing: Callable[[torch.Tensor], torch.Tensor]) -> torch.Tensor:
    """Return a value with its history; the gradient that arrives passes the call on its way there."""
    if not (got.requires_grad and torch.is_grad_enabled()):
        return got
    return _joined(got, lambda gradient: [_like(passing(gradient), got)], got)


class _Handed(NamedTuple):
    """An argument: where its gradient is measured, what arrived, the leaf handed in, the reference's gradient."""

    place: Any
    arrived: torch.Tensor
    leaf: torch.Tensor
    right: torch.Tensor


class Backwards:
    """What was handed to each call, and which calls a gradient came back to.

    `measure` is told a place, the reference's gradient and the one that came.
    """

    def __init__(self, gradients: Gradients, measure: Callable[[Any, torch.Tensor, torch.Tensor], None]) -> None:
        self.gradients = gradients
        self.measure = measure
        self.handed: dict[Key, list[_Handed]] = {}
        self.reached: set[Key] = set()
        self.given: set[Key] = set()

    def hand(self, call: Key, passing: Passing, own: torch.Tensor, value: torch.Tensor, *, place: Any) -> torch.Tensor:
        """Return the value as a leaf of the call's own."""
        right = self.gradients.at.get(passing)
        if right is None or not torch.is_grad_enabled() or not value.is_floating_point():
            return value
        leaf = value.detach().requires_grad_()
        self.handed.setdefault(call, []).append(_Handed(place, own, leaf, right))
        return leaf.clone()  # which may be written into, as a leaf may not

    def give(
        self, call: Key, passing: Passing, own: torch.Tensor, value: torch.Tensor, *, place: Any, lost: Any
    ) -> torch.Tensor:
        """Return the value so that gradients go both ways: the reference's into the call, and to what it was handed.

        `place` is where what comes back is measured, `lost` where it is told that the call lets nothing through.
        """
        right = self.gradients.at.get(passing)
        if right is None or not torch.is_grad_enabled():
            return value
        sources = [] if call in self.given else self.handed.get(call, [])
        self.given.add(call)
        arrived = [handed for handed in sources if handed.arrived.requires_grad]
        inner = [own] if own.requires_grad else []
        if not inner:
            self.measure(lost, right, torch.zeros_like(right))
        if not inner and not arrived:
            return value

        def back(gradient: torch.Tensor) -> list[torch.Tensor]:
            self.reached.add(call)
            if place is not None:
                self.measure(place, right, gradient)
            return [_like(right, tensor) for tensor in inner] + [_like(h.right, h.arrived) for h in arrived]

        return _joined(value, back, *inner, *(h.arrived for h in arrived))

    def settle(self) -> None:
        """Measure what came to every argument of the calls that a gradient came back to."""
        for call, arguments in self.handed.items():
            if call in self.reached:
                for handed in arguments:
                    got = handed.leaf.grad
                    self.measure(handed.place, handed.right, torch.zeros_like(handed.leaf) if got is None else got)


def _like(gradient: torch.Tensor, tensor: torch.Tensor) -> torch.Tensor:
    return gradient.to(dtype=tensor.dtype, device=tensor.device).reshape(tensor.shape)


def _joined(
    value: torch.Tensor, back: Callable[[torch.Tensor], Sequence[torch.Tensor]], *sources: torch.Tensor
) -> torch.Tensor:
    """Return a value through which a gradient goes back to `sources`, whatever made it."""
    return _Junction.apply(value.detach(), back, *sources)  # type: ignore[no-any-return, no-untyped-call]


class _Junction(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, value: torch.Tensor, back: Callable[[torch.Tensor], Sequence[torch.Tensor]], *sources: torch.Tensor
    ) -> torch.Tensor:
        ctx.back = back
        return value.clone()

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        return None, None, *ctx.back(grads[0])
