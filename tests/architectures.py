"""The real transformers architectures with small random weights, and a convolutional net.

make("llama", dtype=torch.bfloat16)
"""

from __future__ import annotations

import torch
import transformers
from torch import nn

NAMES = ("llama", "gpt2", "bert", "mamba", "minimax-m2")
EVERY = (*NAMES, "t5", "vit", "convnet")


def make(name: str, *, dtype: torch.dtype = torch.float32, attention: str = "eager") -> nn.Module:
    """A model of three layers, always with the same weights."""
    torch.manual_seed(0)
    if name == "convnet":
        return ConvNet().eval().to(dtype)
    attention = {} if name == "mamba" else {"attn_implementation": attention}
    model = _CLASSES[name](_config(name, **attention))
    return model.eval().to(dtype)


def inputs(name: str) -> dict[str, torch.Tensor]:
    """Two sequences of 24 tokens, or two pictures."""
    seeded = torch.Generator().manual_seed(1)
    if name in ("vit", "convnet"):
        return {"pixel_values": torch.randn(2, 3, 16, 16, generator=seeded)}
    tokens = {"input_ids": torch.randint(0, 128, (2, 24), generator=seeded)}
    if name == "t5":
        tokens["decoder_input_ids"] = torch.randint(0, 128, (2, 20), generator=seeded)
    return tokens


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
    if name == "t5":
        return transformers.T5Config(**common, d_model=48, d_kv=12, d_ff=96, num_layers=3, num_heads=4, pad_token_id=0)
    if name == "vit":
        kept = {"hidden_dropout_prob": 0.1, "image_size": 16, "patch_size": 4}
        return transformers.ViTConfig(**more, **deep, **kept, intermediate_size=96, num_attention_heads=4)
    experts = {"num_key_value_heads": 2, "head_dim": 12, "num_local_experts": 4, "num_experts_per_tok": 2}
    return transformers.MiniMaxM2Config(**common, **heads, **experts)


_CLASSES = {
    "llama": transformers.LlamaForCausalLM,
    "gpt2": transformers.GPT2LMHeadModel,
    "bert": transformers.BertModel,
    "mamba": transformers.MambaForCausalLM,
    "minimax-m2": transformers.MiniMaxM2ForCausalLM,
    "t5": transformers.T5ForConditionalGeneration,
    "vit": transformers.ViTModel,
}


class ConvBlock(nn.Module):
    """Two convolutions around a residual."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(width, width, 3, padding=1, bias=False)
        self.bn1 = nn.BatchNorm2d(width)
        self.conv2 = nn.Conv2d(width, width, 3, padding=1, bias=False)
        self.bn2 = nn.BatchNorm2d(width)
        self.act = nn.ReLU()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.act(x + self.bn2(self.conv2(self.act(self.bn1(self.conv1(x))))))


class ConvNet(nn.Module):
    """A small residual network whose BatchNorms have seen data."""

    def __init__(self, width: int = 16) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, width, 3, padding=1)
        self.blocks = nn.ModuleList(ConvBlock(width) for _ in range(3))
        self.pool = nn.AvgPool2d(4)
        self.dropout = nn.Dropout(0.1)
        self.head = nn.Linear(16 * width, 10)
        for norm in self.modules():
            if isinstance(norm, nn.BatchNorm2d):
                nn.init.normal_(norm.running_mean, 0, 0.2)
                nn.init.uniform_(norm.running_var, 0.2, 0.6)
                nn.init.uniform_(norm.weight, 0.7, 1.3)
                nn.init.normal_(norm.bias, 0, 0.2)

    def forward(self, pixel_values: torch.Tensor) -> torch.Tensor:
        x = self.stem(pixel_values)
        for block in self.blocks:
            x = block(x)
        return self.head(self.dropout(self.pool(x).flatten(1)))
