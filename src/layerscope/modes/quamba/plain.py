"""The same INT8 arithmetic in the plainest way, to hold the fast one against; mode `2-1` computes with it.

    sums = PLAIN.products(x, weight)        # the integers that FAST.products gives

Integers are summed in float64, which holds all of them up to 2**53; the scan is its definition, token by token.
"""

from __future__ import annotations

import torch
from torch.nn import functional as F  # noqa: N812

from layerscope.modes.quamba.int8 import Arithmetic, Codes


def _products(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """Multiply int8 rows with int8 rows."""
    return F.linear(x.double(), weight.double()).to(torch.int32)


def _convolution(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """Convolve int8 (batch, length, channels) with int8 (channels, kernel), causally."""
    channels, kernel = weight.shape
    past = F.pad(x.double().transpose(1, 2), (kernel - 1, 0))
    return F.conv1d(past, weight.double()[:, None], groups=channels).transpose(1, 2).to(torch.int32)


def _scan(
    u: Codes,
    delta: Codes,
    A: torch.Tensor,  # noqa: N803
    B: Codes,  # noqa: N803
    C: Codes,  # noqa: N803
    D: torch.Tensor,  # noqa: N803
) -> torch.Tensor:
    """Step through time with a float32 state, and take each token's codes off the grid when its turn comes."""
    batch, length, channels = u.codes.shape
    state = torch.zeros(batch, channels, A.shape[1], device=A.device)
    outputs = []
    for t in range(length):
        u_t, delta_t, b_t, c_t = (codes.codes[:, t] * codes.scale for codes in (u, delta, B, C))
        state = torch.exp(delta_t[:, :, None] * A) * state + (delta_t * u_t)[:, :, None] * b_t[:, None, :]
        outputs.append((state * c_t[:, None, :]).sum(dim=-1) + D * u_t)
    return torch.stack(outputs, dim=1)


PLAIN = Arithmetic("plain", _products, _convolution, _scan)
