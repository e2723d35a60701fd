"""Put one value in the place of another, forwards and backwards.

    boundary(got, wanted, lambda gradient: wanted_gradient)

Forwards, `wanted` goes on instead of `got`. Backwards, the gradient that arrives is looked at, and the one that the
call returns goes on to whatever made `got`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import nn

from layerscope.points import Leaf

__all__ = ["Gradients", "Passing", "boundary"]

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


def boundary(got: torch.Tensor, wanted: torch.Tensor, passing: Callable[[torch.Tensor], torch.Tensor]) -> torch.Tensor:
    """Return `wanted` with the history of `got`; where nothing flows back, `wanted` alone."""
    if not (got.requires_grad and torch.is_grad_enabled()):
        return wanted
    return _Boundary.apply(got, wanted.detach(), passing)  # type: ignore[no-any-return, no-untyped-call]


class _Boundary(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, got: torch.Tensor, wanted: torch.Tensor, passing: Callable[..., torch.Tensor]
    ) -> torch.Tensor:
        ctx.passing = passing
        ctx.kind = got.dtype, got.device, got.shape
        return wanted.clone()

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        dtype, device, shape = ctx.kind
        passed = ctx.passing(grads[0])
        return passed.to(dtype=dtype, device=device).reshape(shape), None, None
