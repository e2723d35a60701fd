"""Mamba, a state-space language model, with each stage a module that can be tapped and replaced.

    model = Mamba(MambaConfig(hidden_size=64, num_hidden_layers=2, time_step_rank=4))
    logits = model(torch.tensor([list(b"hello")]))

Modules and weights have the names of transformers' `MambaForCausalLM`, so that checkpoints load and runs align. Unlike
there, the convolution, `dt_proj` and the scan are called as modules: a hook sees them, and a mode may put another
module in their place. `Mixer` only passes values along; `conv1d` may return anything that `x_proj` and `scan` take.
"""

# ruff: noqa: N803, N806 (A, B, C and D are the letters of the equation)

from __future__ import annotations

import torch
from torch import nn
from torch.nn import functional as F  # noqa: N812

from layerscope.models.mamba.mamba_config import MambaConfig
from layerscope.models.mamba.scan import selective_scan
from layerscope.models.mamba.w8a8 import Grids


class Mamba(nn.Module):
    """Token ids in, logits of the next token out; its weights are empty until they are loaded or drawn."""

    stored: tuple[Grids, ...] | None = None  # the scales of a checkpoint in W8A8, by depth

    def __init__(self, config: MambaConfig) -> None:
        super().__init__()
        self.config = config
        self.backbone = Backbone(config)
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        if config.tie_word_embeddings:
            self.lm_head.weight = self.backbone.embeddings.weight

    def forward(self, input_ids: torch.Tensor) -> torch.Tensor:
        """Return the logits, (batch, length, vocabulary)."""
        logits: torch.Tensor = self.lm_head(self.backbone(input_ids))
        return logits


class Backbone(nn.Module):
    """Embedding, blocks, and the norm after the last."""

    def __init__(self, config: MambaConfig) -> None:
        super().__init__()
        self.embeddings = nn.Embedding(config.vocab_size, config.hidden_size)
        self.layers = nn.ModuleList(MambaBlock(config) for _ in range(config.num_hidden_layers))
        self.norm_f = RMSNorm(config.hidden_size, eps=config.layer_norm_epsilon)

    def forward(self, input_ids: torch.Tensor) -> torch.Tensor:
        """Return the last hidden states, normed."""
        hidden = self.embeddings(input_ids)
        for layer in self.layers:
            hidden = layer(hidden)
        normed: torch.Tensor = self.norm_f(hidden)
        return normed


class MambaBlock(nn.Module):
    """The mixer on a normed copy of the residual stream, added back to it."""

    def __init__(self, config: MambaConfig) -> None:
        super().__init__()
        self.norm = RMSNorm(config.hidden_size, eps=config.layer_norm_epsilon)
        self.mixer = Mixer(config)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        """Return the residual stream after this block, in float32 (or wider) whatever the weights are."""
        residual = hidden.to(torch.promote_types(hidden.dtype, torch.float32))
        updated: torch.Tensor = residual + self.mixer(self.norm(residual))
        return updated


class RMSNorm(nn.Module):
    """Divide by the root of the mean square, taken in float32 or wider; the result has the weight's dtype."""

    def __init__(self, hidden: int, *, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(hidden))
        self.eps = eps

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        """Return the normed states."""
        wide = hidden.to(torch.promote_types(self.weight.dtype, torch.float32))
        normed = F.rms_norm(wide, self.weight.shape, self.weight.to(wide.dtype), self.eps)
        return normed.to(self.weight.dtype)

    def extra_repr(self) -> str:
        """Say the width."""
        return f"{self.weight.shape[0]}, eps={self.eps}"


class Mixer(nn.Module):
    """Convolve, scan, gate: what attention is to a transformer."""

    def __init__(self, config: MambaConfig) -> None:
        super().__init__()
        inner, states, rank = config.intermediate_size, config.state_size, config.time_step_rank
        self.widths = (rank, states, states)
        self.in_proj = nn.Linear(config.hidden_size, 2 * inner, bias=config.use_bias)
        self.conv1d = CausalConv(inner, kernel=config.conv_kernel, bias=config.use_conv_bias)
        self.x_proj = nn.Linear(inner, sum(self.widths), bias=False)
        self.dt_proj = nn.Linear(rank, inner)
        self.A_log = nn.Parameter(torch.empty(inner, states))
        self.D = nn.Parameter(torch.empty(inner))
        self.scan = Scan()
        self.out_proj = nn.Linear(inner, config.hidden_size, bias=config.use_bias)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        """Return the update of the residual stream."""
        x, gate = self.in_proj(hidden).chunk(2, dim=-1)
        u = self.conv1d(x)
        low, B, C = self.x_proj(u).split(self.widths, dim=-1)
        delta = F.softplus(self.dt_proj(low))
        y = self.scan(u, delta, -torch.exp(self.A_log), B, C, self.D)
        update: torch.Tensor = self.out_proj(y * F.silu(gate))
        return update


class CausalConv(nn.Module):
    """A convolution along time of each channel by itself, which sees the past alone, and SiLU."""

    def __init__(self, channels: int, *, kernel: int, bias: bool) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(channels, 1, kernel))
        self.bias = nn.Parameter(torch.empty(channels)) if bias else None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return what x_proj and the scan take as u: (batch, length, channels), like x."""
        length, kernel = x.shape[1], self.weight.shape[-1]
        wide = torch.promote_types(x.dtype, torch.float32)
        taps = self.weight.to(wide).squeeze(1).t()
        past = F.pad(x.to(wide), (0, 0, kernel - 1, 0))
        out = past[:, :length] * taps[0]
        if self.bias is not None:
            out = out + self.bias
        for k in range(1, kernel):
            out = torch.addcmul(out, past[:, k : k + length], taps[k])
        return F.silu(out).to(x.dtype)

    def extra_repr(self) -> str:
        """Say the shape."""
        return f"{self.weight.shape[0]}, kernel={self.weight.shape[-1]}, bias={self.bias is not None}"


class Scan(nn.Module):
    """The selective scan as a module of its own, so that it can be tapped and replaced."""

    def forward(
        self,
        u: torch.Tensor,
        delta: torch.Tensor,
        A: torch.Tensor,
        B: torch.Tensor,
        C: torch.Tensor,
        D: torch.Tensor,
    ) -> torch.Tensor:
        """Return y, like u."""
        return selective_scan(u, delta, A, B, C, D)
