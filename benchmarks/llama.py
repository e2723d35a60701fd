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


def large(*, dtype: torch.dtype = torch.bfloat16) -> LlamaForCausalLM:
    """Hidden 2048, 24 layers, intermediate 5504, vocabulary 32000: 1.3 B parameters, made on the GPU."""
    torch.manual_seed(0)
    config = LlamaConfig(
        hidden_size=2048,
        intermediate_size=5504,
        num_hidden_layers=24,
        num_attention_heads=16,
        num_key_value_heads=16,
        vocab_size=32000,
        max_position_embeddings=2048,
        attn_implementation="sdpa",
        dtype=dtype,
    )
    torch.set_default_dtype(dtype)
    try:
        with torch.device("cuda"):
            return LlamaForCausalLM(config).eval()
    finally:
        torch.set_default_dtype(torch.float32)


def tokens() -> torch.Tensor:
    """2 x 256 tokens."""
    return torch.randint(0, 8000, (2, 256), generator=torch.Generator().manual_seed(1))
