"""The model everything is measured on: transformers' Llama with random weights, small enough for two cores."""

from __future__ import annotations

import torch
from transformers import LlamaConfig, LlamaForCausalLM


def llama(*, attention: str = "sdpa") -> LlamaForCausalLM:
    """Hidden 512, 12 layers, vocabulary 8000, float32."""
    torch.manual_seed(0)
    config = LlamaConfig(
        hidden_size=512,
        intermediate_size=1376,
        num_hidden_layers=12,
        num_attention_heads=8,
        num_key_value_heads=8,
        vocab_size=8000,
        max_position_embeddings=512,
        attn_implementation=attention,
    )
    return LlamaForCausalLM(config).eval()


def tokens() -> torch.Tensor:
    """2 x 256 tokens."""
    return torch.randint(0, 8000, (2, 256), generator=torch.Generator().manual_seed(1))
