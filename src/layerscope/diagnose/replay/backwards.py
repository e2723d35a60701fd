"""The backward half of a guided run: no call depends on what another does to the gradient.

    handed = backwards.hand(frame, ...)      # an argument: a leaf of the call's own, whose gradient is read at the end
    given = backwards.give(frame, ...)       # an output: the reference's gradient goes in, and past the call to its
    arguments

Each call is given the reference's gradient at its output. What it makes of it is measured at its arguments; what
reaches those outside is the reference's again, whether the call lets any gradient through or not.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch

from layerscope.diagnose.replay.module_hooks import Gradients, Key, Passing


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

        return _Junction.apply(value.detach(), back, *inner, *(h.arrived for h in arrived))  # type: ignore[no-any-return, no-untyped-call]

    def settle(self) -> None:
        """Measure what came to every argument of the calls that a gradient came back to."""
        for call, arguments in self.handed.items():
            if call in self.reached:
                for handed in arguments:
                    got = handed.leaf.grad
                    self.measure(handed.place, handed.right, torch.zeros_like(handed.leaf) if got is None else got)


def _like(gradient: torch.Tensor, tensor: torch.Tensor) -> torch.Tensor:
    return gradient.to(dtype=tensor.dtype, device=tensor.device).reshape(tensor.shape)


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
