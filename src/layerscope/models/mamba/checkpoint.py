"""A Mamba checkpoint in a local folder, without transformers: Hugging Face's, mamba_ssm's, or Quamba's in W8A8.

model = load_mamba(Path("checkpoints/mamba-130m-hf"))

`config.json` says whose it is: `model_type` is Hugging Face's word, `d_model` mamba_ssm's, and a `layer` of `ssm_cfg`
Quamba's. The weights are safetensors or `pytorch_model.bin`; no pickle is run.
"""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import torch

from layerscope.errors import BadModel
from layerscope.models.mamba.assembly import assembled
from layerscope.models.mamba.mamba_config import MambaConfig
from layerscope.models.mamba.model import Mamba
from layerscope.models.mamba.w8a8 import unpacked
from layerscope.models.weight_files import read_weights

_COUNTS = ("vocab_size", "hidden_size", "num_hidden_layers", "state_size", "expand", "conv_kernel", "time_step_rank")
_OTHERS = ("use_bias", "use_conv_bias", "tie_word_embeddings", "layer_norm_epsilon")


def is_mamba(folder: Path) -> bool:
    """Tell whether the folder says that it holds a Mamba, which `load_mamba` makes or refuses by name."""
    try:
        told = _read(folder)
        if _is_state_spaces(told):
            return True
        _config(told, folder)
    except BadModel:
        return False
    return told.get("architectures") in (None, ["MambaForCausalLM"])


def is_state_spaces(folder: Path) -> bool:
    """Tell whether the folder is mamba_ssm's or Quamba's, which transformers does not read."""
    try:
        return _is_state_spaces(_read(folder))
    except BadModel:
        return False


def load_mamba(folder: Path) -> Mamba:
    """Return the model in float32, with every weight of the folder in its place, or say what stands in the way.

    Of a W8A8 folder these are the floats that its codes stand for, and `stored` has the grids.
    """
    told = _read(folder)
    if not _is_state_spaces(told):
        config = _config(told, folder)
        return assembled(config, _tensors(read_weights(folder), folder), source=str(folder))
    config = _state_spaces(told, folder)
    found = read_weights(folder)
    if _layer(told) == "Mamba1":
        renamed = {name.replace("backbone.embedding.", "backbone.embeddings."): w for name, w in found.items()}
        return assembled(config, _tensors(renamed, folder), source=str(folder))
    weights, grids = unpacked(found, config, source=str(folder))
    model = assembled(config, weights, source=str(folder))
    model.stored = grids
    return model


def _tensors(found: dict[str, Any], folder: Path) -> dict[str, torch.Tensor]:
    if others := [name for name, value in found.items() if not isinstance(value, torch.Tensor)]:
        raise BadModel(f"{str(folder)!r} has {others[0]}, which is no tensor; a Mamba has tensors alone.")
    return found


def _is_state_spaces(told: dict[str, Any]) -> bool:
    return "d_model" in told and "n_layer" in told and "model_type" not in told


def _layer(told: dict[str, Any]) -> object:
    given = told.get("ssm_cfg")
    return given.get("layer", "Mamba1") if isinstance(given, dict) else "Mamba1"


def _state_spaces(told: dict[str, Any], folder: Path) -> MambaConfig:
    """Read a config of mamba_ssm or Quamba; refuse by name what is another model than layerscope's Mamba."""
    layer, place = _layer(told), str(folder)
    if layer not in ("Mamba1", "W8A8QMamba"):
        raise BadModel(
            f"{place!r} has layers of the kind {layer!r}; layerscope computes Mamba1 and W8A8QMamba. A Mamba2 in "
            "Hugging Face's format is read by transformers."
        )
    quantised = layer == "W8A8QMamba"
    for part, usual in (("embedding_cfg", "Embedding"), ("lm_head_cfg", "Linear")):
        kind = (told.get(part) or {}).get("layer", usual)
        if kind != usual:
            raise BadModel(f"{place!r} has {part} {kind!r}, which layerscope does not compute; it computes {usual!r}.")
    refused = {
        "attn_layer_idx": (bool(told.get("attn_layer_idx")), "attention layers"),
        "d_intermediate": (bool(told.get("d_intermediate")), "an MLP in each layer"),
        "is_hybrid": (bool(told.get("is_hybrid")), "layers of several precisions"),
        "rms_norm": (not told.get("rms_norm", False), "LayerNorm in the place of RMSNorm"),
    }
    for key, (is_so, what) in refused.items():
        if is_so:
            raise BadModel(f"{place!r} has {what} ({key} = {told.get(key)!r}), which layerscope does not compute.")
    sizes = {k: v for k, v in (told.get("ssm_cfg") or {}).items() if k != "layer"}
    known = {"d_state": "state_size", "d_conv": "conv_kernel", "expand": "expand", "dt_rank": "time_step_rank"}
    known |= {"bias": "use_bias", "conv_bias": "use_conv_bias"}
    ignored = {"dt_min", "dt_max", "dt_init", "dt_scale", "dt_init_floor", "use_fast_path"}
    if sizes.pop("use_had_transform", False):
        raise BadModel(
            f"{place!r} has Hadamard transforms fused into its weights (use_had_transform), which layerscope does not "
            "compute; give the float checkpoint it was made of, or one made without them."
        )
    if unknown := [key for key in sizes if key not in known and key not in ignored]:
        raise BadModel(f"{place!r} has {unknown[0]} in its ssm_cfg, which layerscope does not compute.")
    words, multiple = told.get("vocab_size"), told.get("pad_vocab_size_multiple", 1)
    if type(words) is int and type(multiple) is int and multiple > 0:
        words = -(-words // multiple) * multiple
    tied = bool(told.get("tie_embeddings", True)) and not quantised  # Quamba fuses the last norm into the head
    return _config(
        {
            "model_type": "mamba",
            "vocab_size": words,
            "hidden_size": told["d_model"],
            "num_hidden_layers": told["n_layer"],
            "tie_word_embeddings": tied,
            "layer_norm_epsilon": told.get("norm_epsilon", 1e-5),
            **{known[key]: value for key, value in sizes.items() if key in known},
        },
        folder,
    )


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
