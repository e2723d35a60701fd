"""Stages of a mixer that compute in INT8, each made of the float stage it takes the place of.

    mixer.in_proj = Projection(mixer.in_proj, scale=scales.in_proj, arithmetic=FAST)
    mixer.conv1d = Convolution(mixer.conv1d, scale=scales.conv1d, out=scales.u, gives="codes", arithmetic=FAST)

Weights are coded per output channel. Biases stay the float model's own parameters. `repr` says what is INT8.
"""

from __future__ import annotations

from typing import Literal

import torch
from torch import nn
from torch.nn import functional as F  # noqa: N812

from layerscope.models.mamba import CausalConv, selective_scan
from layerscope.modes.quamba.calibration import Scales
from layerscope.modes.quamba.int8 import Arithmetic, Codes, quantise, rescaled, scale_of_rows

__all__ = ["Convolution", "GridScan", "Int8Scan", "Projection"]


class Projection(nn.Module):
    """A linear layer in W8A8; without a scale of its own it takes one from each token it is given."""

    weight: torch.Tensor
    weight_scale: torch.Tensor
    input_scale: torch.Tensor | None

    def __init__(self, linear: nn.Linear, *, scale: float | None, arithmetic: Arithmetic) -> None:
        super().__init__()
        coded = _coded(linear.weight)
        self.register_buffer("weight", coded.codes)
        self.register_buffer("weight_scale", coded.scale.squeeze(1))
        self.register_buffer("input_scale", None if scale is None else torch.tensor(scale))
        self.bias = linear.bias
        self.arithmetic = arithmetic

    def forward(self, x: torch.Tensor | Codes) -> torch.Tensor:
        """Return float32; codes are multiplied as they are, floats are put on this layer's grid first."""
        if isinstance(x, torch.Tensor):
            x = quantise(x, scale_of_rows(x) if self.input_scale is None else self.input_scale)
        return rescaled(self.sums(x), x.scale * self.weight_scale, self.bias)

    def sums(self, x: Codes) -> torch.Tensor:
        """Return the int32 accumulators of these codes."""
        return self.arithmetic.products(x.codes, self.weight)

    def extra_repr(self) -> str:
        """Say what is INT8."""
        outs, ins = self.weight.shape
        scale = "dynamic per token" if self.input_scale is None else f"{float(self.input_scale):.3g}"
        return f"{ins} -> {outs}, INT8 weight, INT8 input (scale {scale}), int32 sums ({self.arithmetic.name})"


class Convolution(nn.Module):
    """The causal convolution over codes; SiLU in float, and its result on the grid, as codes or as floats."""

    weight: torch.Tensor
    weight_scale: torch.Tensor
    input_scale: torch.Tensor
    output_scale: torch.Tensor

    def __init__(
        self,
        conv: CausalConv,
        *,
        scale: float,
        out: float,
        gives: Literal["codes", "floats on the grid"],
        arithmetic: Arithmetic,
    ) -> None:
        super().__init__()
        coded = _coded(conv.weight)
        self.register_buffer("weight", coded.codes)
        self.register_buffer("weight_scale", coded.scale.squeeze(1))
        self.register_buffer("input_scale", torch.tensor(scale))
        self.register_buffer("output_scale", torch.tensor(out))
        self.bias = conv.bias
        self.gives = gives
        self.arithmetic = arithmetic

    def forward(self, x: torch.Tensor) -> torch.Tensor | Codes:
        """Return u, (batch, length, channels)."""
        coded = quantise(x, self.input_scale)
        floats = rescaled(self.sums(coded), coded.scale * self.weight_scale, self.bias)
        u = quantise(F.silu(floats), self.output_scale)
        return u if self.gives == "codes" else u.floats()

    def sums(self, x: Codes) -> torch.Tensor:
        """Return the int32 accumulators of these codes."""
        return self.arithmetic.convolution(x.codes, self.weight)

    def extra_repr(self) -> str:
        """Say what is INT8."""
        channels, kernel = self.weight.shape
        given = "INT8 output" if self.gives == "codes" else "float output on the INT8 grid"
        return (
            f"{channels}, kernel={kernel}, INT8 weight, INT8 input (scale {float(self.input_scale):.3g}), int32 sums "
            f"({self.arithmetic.name}), {given} (scale {float(self.output_scale):.3g})"
        )


class _Scan(nn.Module):
    """The grids of what a scan is given."""

    u_scale: torch.Tensor
    delta_scale: torch.Tensor
    b_scale: torch.Tensor
    c_scale: torch.Tensor

    def __init__(self, scales: Scales) -> None:
        super().__init__()
        self.register_buffer("u_scale", torch.tensor(scales.u))
        self.register_buffer("delta_scale", torch.tensor(scales.delta))
        self.register_buffer("b_scale", torch.tensor(scales.B))
        self.register_buffer("c_scale", torch.tensor(scales.C))

    def coded(
        self, u: torch.Tensor | Codes, delta: torch.Tensor, b: torch.Tensor, c: torch.Tensor
    ) -> tuple[Codes, Codes, Codes, Codes]:
        """Return all four as codes; a u that comes as codes is taken as it is."""
        return (
            quantise(u, self.u_scale) if isinstance(u, torch.Tensor) else u,
            quantise(delta, self.delta_scale),
            quantise(b, self.b_scale),
            quantise(c, self.c_scale),
        )

    def grids(self) -> str:
        """Say the scales."""
        scales = (self.u_scale, self.delta_scale, self.b_scale, self.c_scale)
        return "scales " + ", ".join(f"{float(scale):.3g}" for scale in scales)


class Int8Scan(_Scan):
    """The selective scan of INT8 u, delta, B and C, with a float32 state."""

    def __init__(self, scales: Scales, *, arithmetic: Arithmetic) -> None:
        super().__init__(scales)
        self.arithmetic = arithmetic

    def forward(
        self,
        u: torch.Tensor | Codes,
        delta: torch.Tensor,
        A: torch.Tensor,  # noqa: N803
        B: torch.Tensor,  # noqa: N803
        C: torch.Tensor,  # noqa: N803
        D: torch.Tensor,  # noqa: N803
    ) -> torch.Tensor:
        """Return y in float32."""
        coded_u, coded_delta, coded_b, coded_c = self.coded(u, delta, B, C)
        return self.arithmetic.scan(coded_u, coded_delta, A, coded_b, coded_c, D)

    def extra_repr(self) -> str:
        """Say what is INT8."""
        return f"INT8 u, delta, B, C ({self.grids()}), float32 state ({self.arithmetic.name})"


class GridScan(_Scan):
    """The float scan of u, delta, B and C rounded to the INT8 grid."""

    def forward(
        self,
        u: torch.Tensor | Codes,
        delta: torch.Tensor,
        A: torch.Tensor,  # noqa: N803
        B: torch.Tensor,  # noqa: N803
        C: torch.Tensor,  # noqa: N803
        D: torch.Tensor,  # noqa: N803
    ) -> torch.Tensor:
        """Return y in float32."""
        on_u, on_delta, on_b, on_c = (codes.floats() for codes in self.coded(u, delta, B, C))
        return selective_scan(on_u, on_delta, A, on_b, on_c, D)

    def extra_repr(self) -> str:
        """Say what is on the grid."""
        return f"float u, delta, B, C on the INT8 grid ({self.grids()})"


def _coded(weight: torch.Tensor) -> Codes:
    """Code a weight per output channel, its other dimensions as one."""
    rows = weight.detach().flatten(1)
    return quantise(rows, scale_of_rows(rows))
