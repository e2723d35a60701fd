"""The real transformers architectures with small random weights: `make("llama", dtype=torch.bfloat16)`."""

from __future__ import annotations

import torch
import transformers
from torch import nn

NAMES = ("llama", "gpt2", "bert", "mamba", "minimax-m2")


def make(name: str, *, dtype: torch.dtype = torch.float32, attention: str = "eager") -> nn.Module:
    """A model of three layers, always with the same weights."""
    torch.manual_seed(0)
    attention = {} if name == "mamba" else {"attn_implementation": attention}
    model = _CLASSES[name](_config(name, **attention))
    return model.eval().to(dtype)


def inputs(name: str) -> dict[str, torch.Tensor]:
    """Two sequences of 24 tokens."""
    return {"input_ids": torch.randint(0, 128, (2, 24), generator=torch.Generator().manual_seed(1))}


def projections(name: str) -> list[str]:
    """The linear modules inside the layers, in the order they run."""
    kinds = ("Linear", "Conv1D")
    return [n for n, m in make(name).named_modules() if type(m).__name__ in kinds and ".2." in n and "dt_proj" not in n]


def _config(name: str, **more: str) -> transformers.PretrainedConfig:
    common = {"vocab_size": 128, "bos_token_id": 1, "eos_token_id": 2, **more}
    deep = {"hidden_size": 48, "num_hidden_layers": 3}
    heads = {**deep, "intermediate_size": 96, "num_attention_heads": 4, "max_position_embeddings": 64}
    if name == "llama":
        return transformers.LlamaConfig(**common, **heads, num_key_value_heads=2)
    if name == "gpt2":
        return transformers.GPT2Config(**common, n_embd=48, n_layer=3, n_head=4, n_positions=64)
    if name == "bert":
        return transformers.BertConfig(**common, **heads)
    if name == "mamba":
        return transformers.MambaConfig(**common, **deep, state_size=8)
    experts = {"num_key_value_heads": 2, "head_dim": 12, "num_local_experts": 4, "num_experts_per_tok": 2}
    return transformers.MiniMaxM2Config(**common, **heads, **experts)


_CLASSES = {
    "llama": transformers.LlamaForCausalLM,
    "gpt2": transformers.GPT2LMHeadModel,
    "bert": transformers.BertModel,
    "mamba": transformers.MambaForCausalLM,
    "minimax-m2": transformers.MiniMaxM2ForCausalLM,
}
