"""A Mamba checkpoint of Hugging Face in a local folder: `config.json` and safetensors, without transformers.

model = load_mamba(Path("checkpoints/mamba-130m-hf"))
"""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file

from layerscope.errors import BadModel
from layerscope.models.mamba.assembly import assembled
from layerscope.models.mamba.config import MambaConfig
from layerscope.models.mamba.model import Mamba

__all__ = ["is_mamba", "load_mamba"]

_COUNTS = ("vocab_size", "hidden_size", "num_hidden_layers", "state_size", "expand", "conv_kernel", "time_step_rank")
_OTHERS = ("use_bias", "use_conv_bias", "tie_word_embeddings", "layer_norm_epsilon")


def is_mamba(folder: Path) -> bool:
    """Tell whether the folder says that it holds a Mamba language model that `load_mamba` knows how to make."""
    try:
        told = _read(folder)
        _config(told, folder)
    except BadModel:
        return False
    return told.get("architectures") in (None, ["MambaForCausalLM"])


def load_mamba(folder: Path) -> Mamba:
    """Return the model in float32, with every weight of the folder in its place, or say what stands in the way."""
    config = _config(_read(folder), folder)
    files = sorted(folder.glob("*.safetensors"))
    if not files:
        raise BadModel(
            f"{str(folder)!r} has no .safetensors file; other weight files could run code when they are loaded. "
            "Save the model as safetensors (model.save_pretrained(folder))."
        )
    weights: dict[str, torch.Tensor] = {}
    for file in files:
        try:
            weights |= load_file(file)
        except SafetensorError as error:
            raise BadModel(f"{str(file)!r} is not a readable safetensors file: {error}.") from error
    return assembled(config, weights, source=str(folder))


def _read(folder: Path) -> dict[str, Any]:
    path = folder / "config.json"
    try:
        told = json.loads(path.read_text("utf-8"))
    except (OSError, ValueError) as error:
        raise BadModel(f"{str(path)!r} cannot be read: {error}.") from error
    if not isinstance(told, dict):
        raise BadModel(f"{str(path)!r} is not a JSON object.")
    return told


def _config(told: dict[str, Any], folder: Path) -> MambaConfig:
    kind = told.get("model_type")
    if kind != "mamba":
        raise BadModel(f"{str(folder)!r} holds a model of type {kind!r}, not 'mamba'; give MODEL that folder instead.")
    if (act := told.get("hidden_act", "silu")) != "silu":
        raise BadModel(f"{str(folder)!r} has the activation {act!r}; a Mamba that layerscope knows has 'silu'.")
    # What a config.json leaves out has transformers' default, which for two of the sizes is not ours.
    told = {"vocab_size": 50280, "hidden_size": 768, "num_hidden_layers": 32, "time_step_rank": "auto", **told}
    if told["time_step_rank"] == "auto" and isinstance(told["hidden_size"], int):
        told["time_step_rank"] = math.ceil(told["hidden_size"] / 16)
    for name in _COUNTS:
        if name in told and (type(told[name]) is not int or told[name] < 1):
            raise BadModel(f"{str(folder / 'config.json')!r} has {name} = {told[name]!r}; it is a number from 1 on.")
    return MambaConfig(**{name: told[name] for name in (*_COUNTS, *_OTHERS) if name in told})
