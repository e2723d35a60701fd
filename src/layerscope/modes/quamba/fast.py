"""INT8 arithmetic as fast as a CPU does it.

    sums = FAST.products(x, weight)         # int8 (..., K) and (N, K) to int32 (..., N)

All modes compute with it, `2-1` excepted; every integer is the one that `plain` finds.
"""

from __future__ import annotations

from functools import cache

import torch
from torch.nn import functional as F  # noqa: N812

from layerscope.models.mamba import selective_scan
from layerscope.modes.quamba.int8 import LIMIT, Arithmetic, Codes

# float32 holds every integer up to 2**24, so a sum of this many products of codes is exact in any order.
_EXACT_IN_FLOAT32 = 2**24 // LIMIT**2


def _products(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """Multiply int8 rows with int8 rows, summed in int32 without an error."""
    rows = x.reshape(-1, x.shape[-1])
    sums = torch._int_mm(rows, weight.t()) if rows.is_cpu and _int_mm_is_exact() else _by_floats(rows, weight)
    return sums.view(*x.shape[:-1], weight.shape[0])


@cache
def _int_mm_is_exact() -> bool:
    """Try torch's int8 GEMM where it may fail: at the ends of the grid.

    oneDNN adds pairs of products in 16 bits on a CPU without VNNI instructions and saturates: sums are off by up to all
    of their size, without a word. With VNNI it is exact, and about four times as fast as float32.
    """
    ends = torch.full((64, 256), LIMIT, dtype=torch.int8)
    sums = torch._int_mm(ends, torch.cat((ends, -ends)).t())
    return bool((sums.abs() == 256 * LIMIT**2).all())


def _by_floats(rows: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """Multiply codes as float32, in pieces short enough for every sum to be exact."""
    sums = torch.zeros(len(rows), len(weight), dtype=torch.int32, device=rows.device)
    for start in range(0, rows.shape[1], _EXACT_IN_FLOAT32):
        piece = slice(start, start + _EXACT_IN_FLOAT32)
        sums += F.linear(rows[:, piece].float(), weight[:, piece].float()).to(torch.int32)
    return sums


def _convolution(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """Convolve int8 (batch, length, channels) with int8 (channels, kernel), causally, in int32."""
    length, kernel = x.shape[1], weight.shape[1]
    past = F.pad(x.to(torch.int32), (0, 0, kernel - 1, 0))
    taps = weight.to(torch.int32)
    sums = past[:, :length] * taps[:, 0]
    for k in range(1, kernel):
        sums.addcmul_(past[:, k : k + length], taps[:, k])
    return sums


def _scan(
    u: Codes,
    delta: Codes,
    A: torch.Tensor,  # noqa: N803
    B: Codes,  # noqa: N803
    C: Codes,  # noqa: N803
    D: torch.Tensor,  # noqa: N803
) -> torch.Tensor:
    """Scan the codes themselves: their scales are folded into A, D and the result.

    What enters the state is a product of three codes, an integer below 2**24, and so exact in float32.
    """
    inner = delta.scale * B.scale * C.scale
    u_codes, delta_codes, b_codes, c_codes = (codes.codes.to(torch.float32) for codes in (u, delta, B, C))
    y = selective_scan(u_codes, delta_codes, A * delta.scale, b_codes, c_codes, D / inner)
    return y * (u.scale * inner)


FAST = Arithmetic("fast", _products, _convolution, _scan)
