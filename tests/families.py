"""Small models of many architectures, as transformers has them: for what must hold of all models.

model, inputs = family("llama")
"""

from __future__ import annotations

from typing import Any

import torch
import transformers
from torch import nn

import architectures

HEADS = {"hidden_size": 64, "num_hidden_layers": 3, "num_attention_heads": 4, "intermediate_size": 128}
DECODER = {**HEADS, "num_key_value_heads": 2, "max_position_embeddings": 64, "vocab_size": 128}
ENCODER = {**HEADS, "max_position_embeddings": 64, "vocab_size": 128}
TOKENS = {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}
VISION = {**HEADS, "image_size": 32, "patch_size": 8}
AUDIO = {
    **HEADS,
    "vocab_size": 32,
    "conv_dim": (32, 32),
    "conv_stride": (5, 4),
    "conv_kernel": (10, 8),
    "num_feat_extract_layers": 2,
    "num_conv_pos_embeddings": 16,
    "num_conv_pos_embedding_groups": 4,
}
ROUTED = {**DECODER, "num_experts_per_tok": 2}
SEQ2SEQ = {
    "d_model": 64,
    "encoder_layers": 2,
    "decoder_layers": 2,
    "encoder_attention_heads": 4,
    "decoder_attention_heads": 4,
    "encoder_ffn_dim": 128,
    "decoder_ffn_dim": 128,
    "vocab_size": 128,
    "max_position_embeddings": 64,
}

# Of each: the configuration's class, the model's, and what makes it small.
FAMILIES: dict[str, tuple[str, str, dict[str, Any]]] = {
    "llama": ("LlamaConfig", "LlamaForCausalLM", DECODER),
    "mistral": ("MistralConfig", "MistralForCausalLM", DECODER),
    "qwen2": ("Qwen2Config", "Qwen2ForCausalLM", DECODER),
    "qwen3": ("Qwen3Config", "Qwen3ForCausalLM", {**DECODER, "head_dim": 16}),
    "gemma": ("GemmaConfig", "GemmaForCausalLM", {**DECODER, "head_dim": 16}),
    "gemma2": ("Gemma2Config", "Gemma2ForCausalLM", {**DECODER, "head_dim": 16}),
    "phi": ("PhiConfig", "PhiForCausalLM", DECODER),
    "phi3": ("Phi3Config", "Phi3ForCausalLM", {**DECODER, **TOKENS}),
    "stablelm": ("StableLmConfig", "StableLmForCausalLM", DECODER),
    "olmo": ("OlmoConfig", "OlmoForCausalLM", {**DECODER, **TOKENS}),
    "olmo2": ("Olmo2Config", "Olmo2ForCausalLM", {**DECODER, **TOKENS}),
    "granite": ("GraniteConfig", "GraniteForCausalLM", DECODER),
    "cohere": ("CohereConfig", "CohereForCausalLM", DECODER),
    "starcoder2": ("Starcoder2Config", "Starcoder2ForCausalLM", {**DECODER, **TOKENS}),
    "persimmon": ("PersimmonConfig", "PersimmonForCausalLM", DECODER),
    "smollm3": ("SmolLM3Config", "SmolLM3ForCausalLM", {**DECODER, **TOKENS}),
    "helium": ("HeliumConfig", "HeliumForCausalLM", {**DECODER, "head_dim": 16}),
    "glm": ("GlmConfig", "GlmForCausalLM", {**DECODER, **TOKENS, "head_dim": 16}),
    "nemotron": ("NemotronConfig", "NemotronForCausalLM", {**DECODER, **TOKENS}),
    "gptneox": ("GPTNeoXConfig", "GPTNeoXForCausalLM", ENCODER),
    "gpt2": (
        "GPT2Config",
        "GPT2LMHeadModel",
        {"n_embd": 64, "n_layer": 3, "n_head": 4, "vocab_size": 128, "n_positions": 64},
    ),
    "gptj": (
        "GPTJConfig",
        "GPTJForCausalLM",
        {"n_embd": 64, "n_layer": 3, "n_head": 4, "vocab_size": 128, "n_positions": 64, "rotary_dim": 8},
    ),
    "gptneo": (
        "GPTNeoConfig",
        "GPTNeoForCausalLM",
        {
            "hidden_size": 64,
            "num_layers": 2,
            "num_heads": 4,
            "vocab_size": 128,
            "max_position_embeddings": 64,
            "attention_types": [[["global", "local"], 1]],
            "window_size": 8,
        },
    ),
    "opt": ("OPTConfig", "OPTForCausalLM", {**DECODER, "ffn_dim": 128, "word_embed_proj_dim": 64}),
    "bloom": ("BloomConfig", "BloomForCausalLM", {"hidden_size": 64, "n_layer": 3, "n_head": 4, "vocab_size": 128}),
    "falcon": ("FalconConfig", "FalconForCausalLM", {**HEADS, "vocab_size": 128, "alibi": False}),
    "mpt": (
        "MptConfig",
        "MptForCausalLM",
        {"d_model": 64, "n_layers": 3, "n_heads": 4, "vocab_size": 128, "max_seq_len": 64},
    ),
    "mamba": (
        "MambaConfig",
        "MambaForCausalLM",
        {"hidden_size": 64, "num_hidden_layers": 3, "vocab_size": 128, "state_size": 8},
    ),
    "mamba2": (
        "Mamba2Config",
        "Mamba2ForCausalLM",
        {
            "hidden_size": 64,
            "num_hidden_layers": 2,
            "vocab_size": 128,
            "state_size": 8,
            "num_heads": 8,
            "head_dim": 16,
            "n_groups": 2,
            "chunk_size": 8,
        },
    ),
    "mixtral": ("MixtralConfig", "MixtralForCausalLM", {**ROUTED, "num_local_experts": 4}),
    "qwen2moe": (
        "Qwen2MoeConfig",
        "Qwen2MoeForCausalLM",
        {**ROUTED, "num_experts": 4, "moe_intermediate_size": 64, "shared_expert_intermediate_size": 64},
    ),
    "olmoe": ("OlmoeConfig", "OlmoeForCausalLM", {**ROUTED, **TOKENS, "num_experts": 4}),
    "bert": ("BertConfig", "BertModel", ENCODER),
    "roberta": ("RobertaConfig", "RobertaModel", {**ENCODER, **TOKENS}),
    "electra": ("ElectraConfig", "ElectraModel", {**ENCODER, "embedding_size": 32}),
    "albert": ("AlbertConfig", "AlbertModel", {**ENCODER, "embedding_size": 32}),
    "distilbert": (
        "DistilBertConfig",
        "DistilBertModel",
        {"dim": 64, "n_layers": 3, "n_heads": 4, "hidden_dim": 128, "vocab_size": 128, "max_position_embeddings": 64},
    ),
    "modernbert": ("ModernBertConfig", "ModernBertModel", {**ENCODER, **TOKENS, "cls_token_id": 1, "sep_token_id": 2}),
    "mpnet": ("MPNetConfig", "MPNetModel", {**ENCODER, **TOKENS}),
    "deberta2": (
        "DebertaV2Config",
        "DebertaV2Model",
        {**ENCODER, "relative_attention": True, "pos_att_type": ["c2p", "p2c"], "position_buckets": 16},
    ),
    "t5": (
        "T5Config",
        "T5ForConditionalGeneration",
        {"d_model": 64, "d_kv": 16, "d_ff": 128, "num_layers": 2, "num_heads": 4, "vocab_size": 128},
    ),
    "bart": ("BartConfig", "BartForConditionalGeneration", {**SEQ2SEQ, **TOKENS}),
    "marian": ("MarianConfig", "MarianMTModel", {**SEQ2SEQ, **TOKENS, "decoder_start_token_id": 1}),
    "whisper": (
        "WhisperConfig",
        "WhisperModel",
        {
            "d_model": 64,
            "encoder_layers": 2,
            "decoder_layers": 2,
            "encoder_attention_heads": 4,
            "decoder_attention_heads": 4,
            "encoder_ffn_dim": 128,
            "decoder_ffn_dim": 128,
            "vocab_size": 128,
            "num_mel_bins": 16,
            "max_source_positions": 24,
            "max_target_positions": 64,
            **TOKENS,
            "decoder_start_token_id": 1,
        },
    ),
    "wav2vec2": ("Wav2Vec2Config", "Wav2Vec2Model", AUDIO),
    "hubert": ("HubertConfig", "HubertModel", AUDIO),
    "vit": ("ViTConfig", "ViTModel", VISION),
    "deit": ("DeiTConfig", "DeiTModel", VISION),
    "beit": ("BeitConfig", "BeitModel", VISION),
    "dinov2": ("Dinov2Config", "Dinov2Model", VISION),
    "siglip": ("SiglipVisionConfig", "SiglipVisionModel", VISION),
    "clip": ("CLIPVisionConfig", "CLIPVisionModel", VISION),
    "convnext": ("ConvNextConfig", "ConvNextModel", {"hidden_sizes": [16, 32], "depths": [1, 2], "num_stages": 2}),
    "resnet": (
        "ResNetConfig",
        "ResNetModel",
        {"embedding_size": 16, "hidden_sizes": [16, 32], "depths": [1, 2], "layer_type": "basic"},
    ),
    "swin": (
        "SwinConfig",
        "SwinModel",
        {"image_size": 32, "patch_size": 4, "embed_dim": 16, "depths": [1, 1], "num_heads": [2, 4], "window_size": 4},
    ),
    "wide-llama": (
        "LlamaConfig",
        "LlamaForCausalLM",
        {**DECODER, "hidden_size": 256, "intermediate_size": 4096, "num_hidden_layers": 2},
    ),
    "deep-llama": (
        "LlamaConfig",
        "LlamaForCausalLM",
        {**DECODER, "hidden_size": 48, "intermediate_size": 96, "num_hidden_layers": 24},
    ),
}


def family(name: str, *, attention: str = "eager", dtype: torch.dtype = torch.float32, seed: int = 0) -> nn.Module:
    """One architecture in eval mode, always with the same weights, of order one."""
    if name == "convnet":
        return architectures.make("convnet", dtype=dtype)
    config, kind, small = FAMILIES[name]
    made = getattr(transformers, config)(**small)
    made._attn_implementation = attention
    torch.manual_seed(seed)
    try:
        model = getattr(transformers, kind)._from_config(made, attn_implementation=attention)
    except ValueError:  # it has one kernel of its own
        model = getattr(transformers, kind)(made)
    model.eval()
    _spread(model)
    return model.to(dtype) if name == "resnet" else cast(model, dtype)  # a convolution's output meets the buffers


def cast(model: nn.Module, dtype: torch.dtype) -> nn.Module:
    """Cast the parameters, and leave the buffers as a checkpoint's loader does."""
    for parameter in model.parameters():
        if parameter.is_floating_point():
            parameter.data = parameter.data.to(dtype)
    return model


def _spread(model: nn.Module) -> None:
    """Give norms, biases and projections the weights that training leaves: initial ones hide what layers do."""
    generator = torch.Generator().manual_seed(5)

    def draw(like: torch.Tensor, std: float) -> torch.Tensor:
        return torch.randn(like.shape, generator=generator) * std

    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.ndim >= 2:
                parameter.copy_(draw(parameter, 1.0 / max(1, parameter[0].numel()) ** 0.5))
            elif name.endswith("bias"):
                parameter.copy_(draw(parameter, 0.1))
            elif name.endswith("weight"):
                parameter.add_(draw(parameter, 0.1))


def inputs(name: str, *, seed: int = 1, batch: int = 2, length: int = 24) -> dict[str, torch.Tensor]:
    """What it is given: two sequences of 24 tokens, two pictures, two sounds."""
    seeded = torch.Generator().manual_seed(seed)
    if name == "convnet":
        return {"pixel_values": torch.randn(batch, 3, 16, 16, generator=seeded)}
    _, kind, small = FAMILIES[name]
    if name == "whisper":
        features = torch.randn(batch, 16, 48, generator=seeded)
        return {"input_features": features, "decoder_input_ids": torch.randint(3, 128, (batch, 12), generator=seeded)}
    if small is AUDIO:
        return {"input_values": torch.randn(batch, 800, generator=seeded)}
    if "vocab_size" not in small:
        return {"pixel_values": torch.randn(batch, 3, 32, 32, generator=seeded)}
    tokens = {"input_ids": torch.randint(3, 128, (batch, length), generator=seeded)}
    if kind in ("T5ForConditionalGeneration", "BartForConditionalGeneration", "MarianMTModel"):
        tokens["decoder_input_ids"] = torch.randint(3, 128, (batch, 12), generator=seeded)
    return tokens
