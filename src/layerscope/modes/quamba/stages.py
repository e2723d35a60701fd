"""Stages of a mixer that compute in INT8, each made of the float stage it takes the place of.

    mixer.in_proj = Projection(mixer.in_proj, scale=scales.in_proj, arithmetic=FAST)
    mixer.conv1d = Convolution(mixer.conv1d, scale=scales.conv1d, out=scales.u, gives="codes", arithmetic=FAST)

Weights are coded per output channel. Biases stay the float model's own parameters. `repr` says what is INT8.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal, TypeAlias

import torch
from torch import nn
from torch.nn import functional as F  # noqa: N812

from layerscope.models.mamba import CausalConv, selective_scan
from layerscope.modes.quamba.calibration import Scales
from layerscope.modes.quamba.int8 import Arithmetic, Codes, quantise, rescaled, scale_of_rows, scale_of_tensor

Gives: TypeAlias = Literal["codes", "floats on the grid", "floats"]


class Projection(nn.Module):
    """A linear layer in W8A8, with a calibrated input scale.

    A stored checkpoint also states one scale for the whole weight, and the grid of its sums before the bias.
    """

    weight: torch.Tensor
    weight_scale: torch.Tensor
    input_scale: torch.Tensor
    output_scale: torch.Tensor | None

    def __init__(
        self,
        linear: nn.Linear,
        *,
        scale: float,
        arithmetic: Arithmetic,
        weight_scale: float | None = None,
        out: float | None = None,
    ) -> None:
        super().__init__()
        coded = _coded(linear.weight, weight_scale)
        self.register_buffer("weight", coded.codes)
        self.register_buffer("weight_scale", coded.scale.squeeze(1))
        self.register_buffer("input_scale", torch.tensor(scale))
        self.register_buffer("output_scale", None if out is None else torch.tensor(out))
        self.bias = linear.bias
        self.arithmetic = arithmetic

    def forward(self, x: torch.Tensor | Codes) -> torch.Tensor:
        """Return float32; codes are multiplied as they are, floats are put on this layer's grid first."""
        if isinstance(x, torch.Tensor):
            x = quantise(x, self.input_scale)
        if self.output_scale is None:
            return rescaled(self.sums(x), x.scale * self.weight_scale, self.bias)
        given = quantise(rescaled(self.sums(x), x.scale * self.weight_scale, None), self.output_scale).floats()
        return given if self.bias is None else given + self.bias

    def sums(self, x: Codes) -> torch.Tensor:
        """Return the int32 accumulators of these codes."""
        return self.arithmetic.products(x.codes, self.weight)

    def extra_repr(self) -> str:
        """Say what is INT8."""
        outs, ins = self.weight.shape
        scale = f"{float(self.input_scale):.3g}"
        given = "" if self.output_scale is None else f", INT8 output (scale {float(self.output_scale):.3g})"
        return f"{ins} -> {outs}, INT8 weight, INT8 input (scale {scale}), int32 sums ({self.arithmetic.name}){given}"


class Convolution(nn.Module):
    """The causal convolution over codes; SiLU in float, and its result as codes, as floats on their grid or as it is.

    Without a calibrated input scale it takes the one that puts the largest magnitude of its input on the last code.
    """

    weight: torch.Tensor
    weight_scale: torch.Tensor
    input_scale: torch.Tensor | None
    output_scale: torch.Tensor

    def __init__(
        self,
        conv: CausalConv,
        *,
        scale: float | None,
        out: float,
        gives: Gives,
        arithmetic: Arithmetic,
        weight_scale: float | None = None,
    ) -> None:
        super().__init__()
        coded = _coded(conv.weight, weight_scale)
        self.register_buffer("weight", coded.codes)
        self.register_buffer("weight_scale", coded.scale.squeeze(1))
        self.register_buffer("input_scale", None if scale is None else torch.tensor(scale))
        self.register_buffer("output_scale", torch.tensor(out))
        self.bias = conv.bias
        self.gives = gives
        self.arithmetic = arithmetic

    def forward(self, x: torch.Tensor) -> torch.Tensor | Codes:
        """Return u, (batch, length, channels)."""
        coded = quantise(x, scale_of_tensor(x) if self.input_scale is None else self.input_scale)
        floats = F.silu(rescaled(self.sums(coded), coded.scale * self.weight_scale, self.bias))
        if self.gives == "floats":
            return floats
        u = quantise(floats, self.output_scale)
        return u if self.gives == "codes" else u.floats()

    def sums(self, x: Codes) -> torch.Tensor:
        """Return the int32 accumulators of these codes."""
        return self.arithmetic.convolution(x.codes, self.weight)

    def extra_repr(self) -> str:
        """Say what is INT8."""
        channels, kernel = self.weight.shape
        taken = "of the tensor" if self.input_scale is None else f"{float(self.input_scale):.3g}"
        grid = f"(scale {float(self.output_scale):.3g})"
        given = {
            "codes": f"INT8 output {grid}",
            "floats on the grid": f"float output on the INT8 grid {grid}",
            "floats": "float output",
        }
        return (
            f"{channels}, kernel={kernel}, INT8 weight, INT8 input (scale {taken}), int32 sums "
            f"({self.arithmetic.name}), {given[self.gives]}"
        )


class Int8Scan(nn.Module):
    """The selective scan of INT8 u, delta, B and C, with a float32 state; a u that comes as codes is taken as it is."""

    def __init__(self, scales: Scales, *, arithmetic: Arithmetic) -> None:
        super().__init__()
        _register(self, {"u": scales.u, "delta": scales.delta, "B": scales.B, "C": scales.C})
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
        given = zip((u, delta, B, C), self.buffers(), strict=True)
        coded = [x if isinstance(x, Codes) else quantise(x, scale) for x, scale in given]
        return self.arithmetic.scan(coded[0], coded[1], A, coded[2], coded[3], D)

    def extra_repr(self) -> str:
        """Say what is INT8."""
        return f"INT8 u, delta, B, C ({_steps(self)}), float32 state ({self.arithmetic.name})"


class FloatScan(nn.Module):
    """The scan in float32 of what was rounded to the INT8 grids that it has; the rest is taken as it comes.

    A stored checkpoint states no grid of delta: there it is INT8 before its bias and softplus, as `dt_proj` gives it.
    """

    def __init__(self, **grids: float) -> None:
        super().__init__()
        _register(self, grids)

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
        on_u, on_delta, on_b, on_c = (self._floats(n, x) for n, x in (("u", u), ("delta", delta), ("B", B), ("C", C)))
        return selective_scan(on_u, on_delta, A, on_b, on_c, D)

    def _floats(self, name: str, x: torch.Tensor | Codes) -> torch.Tensor:
        if isinstance(x, torch.Tensor):
            scale = self._buffers.get(f"{name}_scale")
            if scale is None:
                return x
            x = quantise(x, scale)
        return x.floats()

    def extra_repr(self) -> str:
        """Say what is on the grid."""
        names = [name.removesuffix("_scale") for name, _ in self.named_buffers()]
        return f"{', '.join(names)} on the INT8 grid ({_steps(self)}), all else float"


def _register(scan: nn.Module, grids: Mapping[str, float]) -> None:
    for name, scale in grids.items():
        scan.register_buffer(f"{name}_scale", torch.tensor(scale))


def _steps(scan: nn.Module) -> str:
    return "scales " + ", ".join(f"{float(scale):.3g}" for scale in scan.buffers())


def _coded(weight: torch.Tensor, scale: float | None) -> Codes:
    """Code a weight per output channel, its other dimensions as one; all channels alike where a scale is stored."""
    rows = weight.detach().flatten(1)
    return quantise(rows, scale_of_rows(rows) if scale is None else torch.full((len(rows), 1), scale))
