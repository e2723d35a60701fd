"""A Mamba as Quamba stores it: INT8 weights, biases and A, D with one scale each, and the grids of the activations.

    weights, grids = unpacked(tensors, config, source="folder")

The weights come back as the floats that the codes stand for; `grids` has the scales, so that a mode finds the very
codes again. Hadamard transforms, which Quamba fuses into the weights, are not computed here and are refused by name.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from layerscope.errors import BadModel
from layerscope.models.mamba.mamba_config import MambaConfig

_PROJECTIONS = ("in_proj", "x_proj", "dt_proj", "out_proj")


@dataclass(frozen=True, slots=True)
class Grids:
    """The stored scales of one mixer: weights and inputs by the name of their stage, outputs of projections, B and C.

    delta is INT8 before its bias and softplus: its grid is the output of `dt_proj`.
    """

    weights: dict[str, float]
    inputs: dict[str, float]
    outputs: dict[str, float]
    u: float
    B: float
    C: float


def unpacked(
    tensors: Mapping[str, Any], config: MambaConfig, *, source: str
) -> tuple[dict[str, torch.Tensor], tuple[Grids, ...]]:
    """Return the weights in float32 under the names of transformers, and the grids of each layer."""
    if turned := [name for name in tensors if name.endswith(".had.x_H_scale")]:
        raise BadModel(
            f"{source!r} has Hadamard transforms fused into its weights ({turned[0]}), which layerscope does not "
            "compute; give the float checkpoint it was made of, or one made without them."
        )
    left = dict(tensors)
    weights = {
        "backbone.embeddings.weight": _taken(left, "backbone.embedding.weight", source).float(),
        "backbone.norm_f.weight": _taken(left, "backbone.norm_f.weight", source).float(),
        "lm_head.weight": _taken(left, "lm_head.weight", source).float(),
    }
    grids = []
    for at in range(config.num_hidden_layers):
        layer = f"backbone.layers.{at}"
        weights[f"{layer}.norm.weight"] = _taken(left, f"{layer}.norm.weight", source).float()
        made, found = _mixer(left, f"{layer}.mixer", config, source)
        weights |= made
        grids.append(found)
        stated = _number(left, f"{layer}.norm.output_scale", source)
        if abs(stated - found.inputs["in_proj"]) > 1e-4 * stated:
            raise BadModel(
                f"{source!r}: {layer}.norm.output_scale is {stated:g}, and in_proj takes {found.inputs['in_proj']:g}; "
                "the two are one grid, so the file is of another kind than layerscope knows."
            )
    if left:
        raise BadModel(f"{source!r} has {next(iter(left))}, which layerscope does not compute; nothing is left out.")
    return weights, tuple(grids)


def _mixer(left: dict[str, Any], name: str, config: MambaConfig, source: str) -> tuple[dict[str, torch.Tensor], Grids]:
    def number(key: str) -> float:
        return _number(left, f"{name}.{key}", source)

    scan = {key: number(f"selective_scan.{key}") for key in ("u_scale", "dt_scale", "B_scale", "C_scale", "z_scale")}
    number("selective_scan.ssm_state_scale")  # of the state between two calls; a forward from the start has none
    conv = {key: number(f"conv1d.{key}") for key in ("weight_scale", "input_scale", "output_scale", "bias_scale")}
    inner, rank = config.intermediate_size, config.time_step_rank
    rows = {
        "in_proj": 2 * inner,
        "x_proj": rank + 2 * config.state_size,
        "dt_proj": inner,
        "out_proj": config.hidden_size,
    }
    outputs = {"in_proj": conv["input_scale"], "x_proj": scan["B_scale"], "dt_proj": scan["dt_scale"]}
    made: dict[str, torch.Tensor] = {}
    scales: dict[str, float] = {"conv1d": conv["weight_scale"]}
    inputs: dict[str, float] = {"conv1d": conv["input_scale"]}
    for stage in _PROJECTIONS:
        scales[stage] = number(f"{stage}.b")
        inputs[stage] = number(f"{stage}.a") * outputs.get(stage, 1.0)
        left.pop(f"{name}.{stage}.alpha", None)  # a times b, for products of one row
        # Stored as (in, out), with rows of zeros up to a multiple of 16.
        codes = _taken(left, f"{name}.{stage}.weight", source).t()[: rows[stage]]
        made[f"{name}.{stage}.weight"] = _floats(codes, scales[stage], f"{name}.{stage}.weight", source)
    given = number("had.scale")  # where transforms are fused this is `had.x_H_scale`; without either it is not known
    if abs(given - inputs["out_proj"]) > 1e-4 * given:
        raise BadModel(f"{source!r}: {name}.had.scale and out_proj.a state different grids for one tensor.")
    made[f"{name}.conv1d.weight"] = _coded(left, f"{name}.conv1d.weight", conv["weight_scale"], source)[:, None]
    if config.use_conv_bias:
        made[f"{name}.conv1d.bias"] = _coded(left, f"{name}.conv1d.bias", conv["bias_scale"], source)
    for theirs, ours, scale in (("dt_bias", "dt_proj.bias", "dt_bias"), ("A_log", "A_log", "A"), ("D", "D", "D")):
        step = number(f"selective_scan.{scale}_scale")
        made[f"{name}.{ours}"] = _coded(left, f"{name}.selective_scan.{theirs}", step, source)
    return made, Grids(scales, inputs, outputs, scan["u_scale"], scan["B_scale"], scan["C_scale"])


def _coded(left: dict[str, Any], name: str, scale: float, source: str) -> torch.Tensor:
    return _floats(_taken(left, name, source), scale, name, source)


def _floats(codes: torch.Tensor, scale: float, name: str, source: str) -> torch.Tensor:
    if codes.dtype != torch.int8 or bool((codes == -128).any()):
        what = "the code -128" if codes.dtype == torch.int8 else str(codes.dtype)[6:]
        raise BadModel(f"{source!r}: {name} is to be INT8 from -127 to 127, and has {what}.")
    return codes.to(torch.float32) * scale


def _taken(left: dict[str, Any], name: str, source: str) -> torch.Tensor:
    value = left.pop(name, None)
    if not isinstance(value, torch.Tensor):
        raise BadModel(f"{source!r} lacks {name} of Quamba's W8A8 layout; save the whole model again.")
    return value


def _number(left: dict[str, Any], name: str, source: str) -> float:
    value = left.pop(name, None)
    if isinstance(value, torch.Tensor) and value.numel() == 1:
        value = value.item()
    if not isinstance(value, int | float):
        raise BadModel(f"{source!r} lacks {name}, a scale of Quamba's W8A8 layout; save the whole model again.")
    return float(value)
