"""A mixture-of-experts transformer in the shape of MiniMax-M2, small enough to run anywhere.

    model = minimax_m2(seed=0)                                  # 62 layers, 64 wide, over bytes
    logits = model(torch.tensor([list(b"hello")]))
    MiniMaxM2(MiniMaxM2Config.of(config)).load_state_dict(theirs.state_dict())      # transformers' own

Modules and weights have the names of transformers' `MiniMaxM2ForCausalLM`. Every expert sees every token and routing
weighs what they say, so that nothing in the graph depends on values: the model can be traced, exported and compiled.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F  # noqa: N812

from layerscope.errors import BadModel


@dataclass(frozen=True, slots=True, kw_only=True)
class MiniMaxM2Config:
    """The sizes of a model, by transformers' names; what is left out is tiny, but for the depth."""

    vocab_size: int = 256
    hidden_size: int = 64
    intermediate_size: int = 32
    num_hidden_layers: int = 62
    num_attention_heads: int = 8
    num_key_value_heads: int = 2
    head_dim: int = 16
    num_local_experts: int = 8
    num_experts_per_tok: int = 2
    rms_norm_eps: float = 1e-6
    rope_theta: float = 5_000_000.0
    rotary_dim: int = 8  # of each head's channels, the first so many are rotated
    tie_word_embeddings: bool = False

    @classmethod
    def of(cls, config: Any) -> MiniMaxM2Config:
        """Read a configuration of transformers, or the mapping in a checkpoint's `config.json`."""
        said: dict[str, Any] = dict(config if isinstance(config, Mapping) else config.to_dict())
        if (kind := said.get("model_type", "minimax_m2")) != "minimax_m2":
            raise BadModel(f"this is the configuration of a {kind!r}, not of a 'minimax_m2'.")
        said |= {**(said.get("rope_scaling") or {}), **(said.get("rope_parameters") or {})}
        for key, known in (("hidden_act", "silu"), ("rope_type", "default")):
            if said.get(key, known) != known:
                raise BadModel(
                    f"{key} is {said[key]!r}, and the built-in MiniMax-M2 knows {known!r} alone; "
                    "a checkpoint folder loads through transformers whatever it is."
                )
        if "partial_rotary_factor" in said:
            said["rotary_dim"] = int(said.get("head_dim", 0) * said["partial_rotary_factor"])
        said.setdefault("rotary_dim", said.get("head_dim"))
        sizes = {field.name: said[field.name] for field in fields(cls) if said.get(field.name) is not None}
        if lacking := [field.name for field in fields(cls) if field.type == "int" and field.name not in sizes]:
            raise BadModel(f"the configuration does not say {', '.join(lacking)}.")
        return cls(**sizes)


def minimax_m2(config: MiniMaxM2Config | None = None, *, seed: int = 0) -> MiniMaxM2:
    """Return the model with weights drawn from the seed, in evaluation mode; the global random state is left alone."""
    generator = torch.Generator().manual_seed(seed)
    with torch.random.fork_rng(devices=[]):
        model = MiniMaxM2(config or MiniMaxM2Config())
    for name, weight in model.state_dict().items():
        if weight.dim() > 1:
            nn.init.normal_(weight, std=0.5 if "embed" in name else weight.shape[-1] ** -0.5, generator=generator)
        elif name.endswith("e_score_correction_bias"):
            nn.init.normal_(weight, std=0.1, generator=generator)
    return model.eval()


class MiniMaxM2(nn.Module):
    """Tokens in, logits of the next token out."""

    def __init__(self, config: MiniMaxM2Config) -> None:
        super().__init__()
        self.config = config
        self.model = MiniMaxDecoder(config)
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        if config.tie_word_embeddings:
            self.lm_head.weight = self.model.embed_tokens.weight

    def forward(self, input_ids: torch.Tensor) -> torch.Tensor:
        """Return the logits, (batch, length, vocabulary)."""
        logits: torch.Tensor = self.lm_head(self.model(input_ids))
        return logits


class MiniMaxDecoder(nn.Module):
    """Embedding, layers, and the norm after the last."""

    def __init__(self, config: MiniMaxM2Config) -> None:
        super().__init__()
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size)
        self.layers = nn.ModuleList(MiniMaxDecoderLayer(config) for _ in range(config.num_hidden_layers))
        self.norm = nn.RMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        self.rotary_emb = Rotary(config)

    def forward(self, input_ids: torch.Tensor) -> torch.Tensor:
        """Return the last hidden states."""
        hidden_states = self.embed_tokens(input_ids)
        turn = self.rotary_emb(hidden_states)
        for layer in self.layers:
            hidden_states = layer(hidden_states, turn)
        normed: torch.Tensor = self.norm(hidden_states)
        return normed


class MiniMaxDecoderLayer(nn.Module):
    """Attention and experts, each on a normed copy of the residual stream and added back to it."""

    def __init__(self, config: MiniMaxM2Config) -> None:
        super().__init__()
        self.input_layernorm = nn.RMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        self.self_attn = MiniMaxAttention(config)
        self.post_attention_layernorm = nn.RMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        self.mlp = SparseExperts(config)

    def forward(self, hidden_states: torch.Tensor, turn: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
        """Return the residual stream after this layer."""
        hidden_states = hidden_states + self.self_attn(self.input_layernorm(hidden_states), turn)
        updated: torch.Tensor = hidden_states + self.mlp(self.post_attention_layernorm(hidden_states))
        return updated


# Attention ------------------------------------------------------------------------------------------


class Rotary(nn.Module):
    """The angles by which pairs of channels turn, growing with the position."""

    def __init__(self, config: MiniMaxM2Config) -> None:
        super().__init__()
        self.width, self.theta = config.rotary_dim, config.rope_theta

    def forward(self, hidden_states: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return cosine and sine, each (1, length, rotated channels), in the dtype of the hidden states."""
        device, length = hidden_states.device, hidden_states.shape[1]
        speeds = 1.0 / self.theta ** (torch.arange(0, self.width, 2, device=device).float() / self.width)
        angles = (torch.arange(length, device=device)[:, None] * speeds).repeat(1, 2)[None]
        return angles.cos().to(hidden_states.dtype), angles.sin().to(hidden_states.dtype)


class MiniMaxAttention(nn.Module):
    """Causal attention whose key and value heads serve several query heads each, with normed queries and keys."""

    def __init__(self, config: MiniMaxM2Config) -> None:
        super().__init__()
        read, kept = (n * config.head_dim for n in (config.num_attention_heads, config.num_key_value_heads))
        self.head_dim = config.head_dim
        self.q_proj = nn.Linear(config.hidden_size, read, bias=False)
        self.k_proj = nn.Linear(config.hidden_size, kept, bias=False)
        self.v_proj = nn.Linear(config.hidden_size, kept, bias=False)
        self.o_proj = nn.Linear(read, config.hidden_size, bias=False)
        self.q_norm = nn.RMSNorm(read, eps=config.rms_norm_eps)  # over all heads at once
        self.k_norm = nn.RMSNorm(kept, eps=config.rms_norm_eps)

    def forward(self, hidden_states: torch.Tensor, turn: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
        """Return what the heads read, mixed by `o_proj`."""
        q = _turned(self._heads(self.q_norm(self.q_proj(hidden_states))), turn)
        k = _turned(self._heads(self.k_norm(self.k_proj(hidden_states))), turn)
        v = self._heads(self.v_proj(hidden_states))
        read = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        mixed: torch.Tensor = self.o_proj(read.transpose(1, 2).flatten(2))
        return mixed

    def _heads(self, states: torch.Tensor) -> torch.Tensor:
        return states.view(*states.shape[:2], -1, self.head_dim).transpose(1, 2)


def _turned(states: torch.Tensor, turn: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
    """Turn the first channels of every head; the others carry no position."""
    cos, sin = turn
    width = cos.shape[-1]
    turning, still = states[..., :width], states[..., width:]
    left, right = turning.chunk(2, dim=-1)
    return torch.cat((turning * cos + torch.cat((-right, left), dim=-1) * sin, still), dim=-1)


# Experts --------------------------------------------------------------------------------------------


class SparseExperts(nn.Module):
    """A router and the experts it chooses from; the correction bias moves the choice, not the weight of the chosen."""

    e_score_correction_bias: torch.Tensor

    def __init__(self, config: MiniMaxM2Config) -> None:
        super().__init__()
        self.gate = Router(config)
        self.experts = Experts(config)
        self.register_buffer("e_score_correction_bias", torch.zeros(config.num_local_experts))

    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        """Return the update of the residual stream."""
        tokens = hidden_states.flatten(0, 1)
        _, weights, chosen = self.gate(tokens, self.e_score_correction_bias)
        update: torch.Tensor = self.experts(tokens, chosen, weights).view_as(hidden_states)
        return update


class Router(nn.Module):
    """Scores every expert by a sigmoid of its own, and chooses the best few."""

    def __init__(self, config: MiniMaxM2Config) -> None:
        super().__init__()
        self.top_k = config.num_experts_per_tok
        self.weight = nn.Parameter(torch.empty(config.num_local_experts, config.hidden_size))

    def forward(self, tokens: torch.Tensor, bias: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Return the logits of all experts, and the weights and numbers of the chosen, best first."""
        logits = F.linear(tokens, self.weight)
        scores = logits.float().sigmoid()
        chosen = (scores + bias).topk(self.top_k, dim=-1).indices  # sorted: any other order is each runtime's own
        weights = scores.gather(-1, chosen)
        return logits, weights / weights.sum(dim=-1, keepdim=True), chosen


class Experts(nn.Module):
    """Gated MLPs, side by side in one tensor."""

    def __init__(self, config: MiniMaxM2Config) -> None:
        super().__init__()
        count, hidden, inner = config.num_local_experts, config.hidden_size, config.intermediate_size
        self.gate_up_proj = nn.Parameter(torch.empty(count, 2 * inner, hidden))
        self.down_proj = nn.Parameter(torch.empty(count, hidden, inner))

    def forward(self, tokens: torch.Tensor, chosen: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        """Return the weighted sum of what the chosen experts say of each token."""
        gate, up = torch.matmul(tokens, self.gate_up_proj.transpose(1, 2)).chunk(2, dim=-1)
        said = torch.matmul(F.silu(gate) * up, self.down_proj.transpose(1, 2))  # (expert, token, hidden)
        share = weights.new_zeros(tokens.shape[0], said.shape[0]).scatter(1, chosen, weights)
        return torch.einsum("te,eth->th", share.to(said.dtype), said)
