"""A small decoder-only transformer over bytes, with the names of its big relatives.

    model = tiny_transformer(seed=0)
    logits = model(torch.tensor([list(b"hello")]))

Its weights are drawn from the seed alone, so that two machines see the same model; it runs in milliseconds.
"""

from __future__ import annotations

import torch
from torch import nn
from torch.nn import functional as F  # noqa: N812

VOCABULARY = 256


def tiny_transformer(*, seed: int = 0, layers: int = 8, hidden: int = 64, heads: int = 4) -> TinyTransformer:
    """Return the model, in evaluation mode; the global random state is left as it was."""
    generator = torch.Generator().manual_seed(seed)
    with torch.random.fork_rng(devices=[]):
        model = TinyTransformer(layers=layers, hidden=hidden, heads=heads)
    for name, parameter in model.named_parameters():
        if parameter.dim() > 1:
            # Writing into the residual stream at full strength lets it grow with depth, as trained models do.
            std = 0.5 if "embed" in name else parameter.shape[1] ** -0.5
            nn.init.normal_(parameter, std=std, generator=generator)
    return model.eval()


class TinyTransformer(nn.Module):
    """Bytes in, logits of the next byte out."""

    def __init__(self, *, layers: int, hidden: int, heads: int) -> None:
        super().__init__()
        self.model = Decoder(layers=layers, hidden=hidden, heads=heads)
        self.lm_head = nn.Linear(hidden, VOCABULARY, bias=False)

    def forward(self, input_ids: torch.Tensor) -> torch.Tensor:
        """Return the logits, (batch, length, 256)."""
        logits: torch.Tensor = self.lm_head(self.model(input_ids))
        return logits


class Decoder(nn.Module):
    """Embedding, blocks, and the norm after the last."""

    def __init__(self, *, layers: int, hidden: int, heads: int) -> None:
        super().__init__()
        self.embed_tokens = nn.Embedding(VOCABULARY, hidden)
        self.layers = nn.ModuleList(DecoderLayer(hidden, heads) for _ in range(layers))
        self.norm = nn.RMSNorm(hidden)

    def forward(self, input_ids: torch.Tensor) -> torch.Tensor:
        """Return the last hidden states."""
        hidden_states = self.embed_tokens(input_ids)
        for layer in self.layers:
            hidden_states = layer(hidden_states)
        normed: torch.Tensor = self.norm(hidden_states)
        return normed


class DecoderLayer(nn.Module):
    """Attention and MLP, each on a normed copy of the residual stream and added back to it."""

    def __init__(self, hidden: int, heads: int) -> None:
        super().__init__()
        self.input_layernorm = nn.RMSNorm(hidden)
        self.self_attn = Attention(hidden, heads)
        self.post_attention_layernorm = nn.RMSNorm(hidden)
        self.mlp = MLP(hidden)

    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        """Return the residual stream after this layer."""
        hidden_states = hidden_states + self.self_attn(self.input_layernorm(hidden_states))
        updated: torch.Tensor = hidden_states + self.mlp(self.post_attention_layernorm(hidden_states))
        return updated


class Attention(nn.Module):
    """Causal self-attention with rotary positions."""

    def __init__(self, hidden: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.q_proj = nn.Linear(hidden, hidden, bias=False)
        self.k_proj = nn.Linear(hidden, hidden, bias=False)
        self.v_proj = nn.Linear(hidden, hidden, bias=False)
        self.o_proj = nn.Linear(hidden, hidden, bias=False)

    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        """Return what the heads read, mixed by `o_proj`."""
        batch, length, hidden = hidden_states.shape
        apart = (batch, length, self.heads, hidden // self.heads)
        q, k, v = (p(hidden_states).view(apart).transpose(1, 2) for p in (self.q_proj, self.k_proj, self.v_proj))
        read = F.scaled_dot_product_attention(_rotated(q), _rotated(k), v, is_causal=True)
        mixed: torch.Tensor = self.o_proj(read.transpose(1, 2).reshape(batch, length, hidden))
        return mixed


class MLP(nn.Module):
    """The gated kind."""

    def __init__(self, hidden: int) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(hidden, 2 * hidden, bias=False)
        self.up_proj = nn.Linear(hidden, 2 * hidden, bias=False)
        self.down_proj = nn.Linear(2 * hidden, hidden, bias=False)

    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        """Return the update of the residual stream."""
        gated = F.silu(self.gate_proj(hidden_states)) * self.up_proj(hidden_states)
        update: torch.Tensor = self.down_proj(gated)
        return update


def _rotated(x: torch.Tensor) -> torch.Tensor:
    """Turn pairs of channels by angles that grow with the position."""
    length, width = x.shape[-2:]
    speeds = 10_000.0 ** (-torch.arange(0, width, 2, device=x.device) / width)
    angles = torch.arange(length, device=x.device)[:, None] * speeds
    cos, sin = (t.repeat(1, 2).to(x.dtype) for t in (angles.cos(), angles.sin()))
    left, right = x.chunk(2, dim=-1)
    return x * cos + torch.cat((-right, left), dim=-1) * sin
