"""Symmetric INT8: codes with a scale, and the one way onto the grid and back.

    codes = quantise(x, scale)              # round half to even, saturate at -127 and 127
    codes.floats()                          # codes * scale: x to half a step, where it was not clipped

A float cannot pass for INT8: `Codes` refuses any tensor that is not int8, so that a stage which forgets to round fails
at once instead of being a little too exact.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import torch

from layerscope.errors import Unsupported

# Symmetric: -128 is never used, so that the grid has as many steps below zero as above.
LIMIT = 127


@dataclass(frozen=True, slots=True, eq=False)
class Codes:
    """Values on an INT8 grid; the scale is one number, or one for each row (an output channel's)."""

    codes: torch.Tensor
    scale: torch.Tensor

    def __post_init__(self) -> None:
        if self.codes.dtype != torch.int8:
            raise Unsupported(
                f"INT8 codes are int8, and these are {str(self.codes.dtype).removeprefix('torch.')}: a float leaked "
                "into an INT8 stage; `quantise` makes codes of floats"
            )

    def floats(self) -> torch.Tensor:
        """Return the values in float32."""
        return self.codes * self.scale


def quantise(x: torch.Tensor, scale: torch.Tensor) -> Codes:
    """Return the nearest codes: ties go to the even one, what lies outside the grid to its end.

    Every INT8 value of every mode is made here.
    """
    return Codes(torch.div(x, scale).round_().clamp_(-LIMIT, LIMIT).to(torch.int8), scale)


def scale_of_rows(x: torch.Tensor) -> torch.Tensor:
    """Return, for each row, the scale that puts its largest magnitude on the last code; 1 for a row of zeros."""
    peaks = x.abs().amax(dim=-1, keepdim=True)
    return torch.where(peaks > 0, peaks / LIMIT, 1.0)


def scale_of_tensor(x: torch.Tensor) -> torch.Tensor:
    """Return the scale that puts the largest magnitude of all on the last code; 1 where all is zero."""
    peak = x.abs().max()
    return torch.where(peak > 0, peak / LIMIT, 1.0)


def rescaled(sums: torch.Tensor, scale: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    """Return what int32 sums of products stand for: `sums * scale + bias` in float32, in this order of operations."""
    floats = sums.to(torch.float32).mul_(scale)
    return floats if bias is None else floats + bias


class Arithmetic(NamedTuple):
    """How codes are computed with; `fast` and `plain` are the two, and agree on every integer."""

    name: str
    products: Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
    convolution: Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
    scan: Callable[[Codes, Codes, torch.Tensor, Codes, Codes, torch.Tensor], torch.Tensor]
