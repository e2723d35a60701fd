"""Quantised variants of the built-in Mamba: a table of where INT8 happens, and the model each line of it makes.

    calibration = calibrate(model, batches)
    variant = quantised(model, "2-1", calibration)

`print(variant)` says which stages are INT8.
"""

from __future__ import annotations

import copy
from typing import Literal, NamedTuple

import torch
from torch import nn

from layerscope.errors import NoSuchMode, Unsupported
from layerscope.models.mamba import CausalConv, Grids, Mamba, Mixer, Scan
from layerscope.modes.quamba.calibration import Calibration, Scales
from layerscope.modes.quamba.fast import FAST
from layerscope.modes.quamba.int8 import Arithmetic
from layerscope.modes.quamba.plain import PLAIN
from layerscope.modes.quamba.stages import Convolution, FloatScan, Gives, Int8Scan, Projection


class Recipe(NamedTuple):
    """Where INT8 happens: what the convolution gives, what the scan computes with, where the input scale is from.

    A convolution or a scan of `None` is the float model's own. The projections are W8A8 in all of them.
    """

    convolution: Gives | None
    scan: Literal["codes", "floats"] | None
    scale: Literal["calibrated", "of the tensor"] = "calibrated"
    arithmetic: Arithmetic = FAST


_RECIPES: dict[str, Recipe] = {
    "0": Recipe("codes", "codes"),
    "2-0": Recipe("floats on the grid", "codes"),
    "2-1": Recipe("codes", "codes", arithmetic=PLAIN),
    "2-2": Recipe("floats on the grid", "floats"),
    "2-3": Recipe("floats", "codes", arithmetic=PLAIN),
    "2-4": Recipe("floats", "floats"),
    "3": Recipe("floats", "floats", scale="of the tensor"),
    "1": Recipe(None, None),
}

QUAMBA_MODES: dict[str, str] = {
    "0": "INT8 convolution, INT8 scan: the baseline",
    "2-0": "convolution gives floats on the INT8 grid, requantised for the INT8 scan",
    "2-1": "INT8 convolution straight into the INT8 scan, all in the plain reference arithmetic",
    "2-2": "convolution gives floats on the INT8 grid, float scan of them",
    "2-3": "INT8 convolution gives true floats, requantised for the INT8 scan, in the plain reference arithmetic",
    "2-4": "INT8 convolution gives true floats, float scan of them",
    "3": "2-4 with the convolution's input scale taken from each tensor as it comes",
    "1": "float convolution, float scan, W8A8 projections: the upper bound",
}


def why_not(model: nn.Module) -> str | None:
    """Say in a sentence why these modes cannot be made of a model; None when they can."""
    if not isinstance(model, Mamba):
        return (
            f"it quantises the stages of layerscope's own Mamba (quamba-small, quamba-130m-w8a8 or a Mamba checkpoint "
            f"folder), and this model is a {type(model).__name__}"
        )
    if not all(map(_is_float, _mixers(model))):
        return "it is quantised already, and variants are made of the float model"
    other = {p.dtype for p in model.parameters() if p.dtype != torch.float32}
    if other:
        return (
            f"it starts from float32 weights, and these are {', '.join(str(d)[6:] for d in other)}; use model.float()"
        )
    return None


def quantised(model: Mamba, mode: str, calibration: Calibration) -> Mamba:
    """Return the variant of `model` that a mode names.

    The given model stays as it is, and both share every weight that is not quantised.
    """
    if mode not in _RECIPES:
        raise NoSuchMode(f"there is no quantised mode {mode!r} of a Mamba; there are {', '.join(_RECIPES)}.")
    reason = why_not(model)
    if reason is not None:
        raise Unsupported(f"mode {mode!r} does not fit {type(model).__name__}: {reason}")
    depth = len(_mixers(model))
    if len(calibration.layers) != depth:
        raise Unsupported(
            f"the calibration is of {len(calibration.layers)} layers, and the model has {depth}; calibrate this model"
        )
    shared: dict[int, object] = {id(weight): weight for weight in (*model.parameters(), *model.buffers())}
    variant = copy.deepcopy(model, shared)
    mixers = _mixers(variant)
    for mixer, scales, stored in zip(mixers, calibration.layers, model.stored or [None] * depth, strict=True):
        for name, stage in _stages(mixer, _RECIPES[mode], scales, stored).items():
            setattr(mixer, name, stage)
    return variant


def _stages(mixer: Mixer, recipe: Recipe, scales: Scales, stored: Grids | None) -> dict[str, nn.Module]:
    """Return what a recipe puts in the place of a mixer's float stages, by their names."""
    arithmetic = recipe.arithmetic
    weights = {} if stored is None else stored.weights
    outputs = {} if stored is None else stored.outputs
    inputs = {"in_proj": scales.in_proj, "x_proj": scales.u, "dt_proj": scales.dt_proj, "out_proj": scales.out_proj}
    stages: dict[str, nn.Module] = {
        name: Projection(
            getattr(mixer, name),
            scale=scale,
            arithmetic=arithmetic,
            weight_scale=weights.get(name),
            out=outputs.get(name),
        )
        for name, scale in inputs.items()
    }
    if recipe.convolution is not None:
        scale = scales.conv1d if recipe.scale == "calibrated" else None
        stages["conv1d"] = Convolution(
            mixer.conv1d,
            scale=scale,
            out=scales.u,
            gives=recipe.convolution,
            arithmetic=arithmetic,
            weight_scale=weights.get("conv1d"),
        )
    if stored is not None and recipe.scan is not None:
        stages["scan"] = FloatScan(**({"u": stored.u} if recipe.scan == "codes" else {}), B=stored.B, C=stored.C)
    elif recipe.scan == "codes":
        stages["scan"] = Int8Scan(scales, arithmetic=arithmetic)
    elif recipe.scan == "floats":
        stages["scan"] = FloatScan(delta=scales.delta, B=scales.B, C=scales.C)
    return stages


def _mixers(model: Mamba) -> list[Mixer]:
    """Return the mixers by depth."""
    return [stage for stage in model.modules() if isinstance(stage, Mixer)]


def _is_float(mixer: Mixer) -> bool:
    """Whether every stage is the one the float model has."""
    projections = (mixer.in_proj, mixer.x_proj, mixer.dt_proj, mixer.out_proj)
    return (
        all(type(stage) is nn.Linear for stage in projections)
        and type(mixer.conv1d) is CausalConv
        and type(mixer.scan) is Scan
    )
