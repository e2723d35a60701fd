"""What norms and activations compute: a function of the input and a few parameters, told by its name.

form, eps = form_of(parameters, x, y, epsilons)      # the one that gives y
computed(form, x, parameters, eps)
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TypeAlias

import torch
from torch.nn import functional

Parameters: TypeAlias = "Mapping[str, torch.Tensor]"
Tensor = torch.Tensor

ACTIVATIONS: Mapping[str, Callable[[Tensor], Tensor]] = {
    "identity": lambda x: x,
    "relu": functional.relu,
    "gelu": functional.gelu,
    "gelu, tanh form": lambda x: functional.gelu(x, approximate="tanh"),
    "gelu, sigmoid form": lambda x: x * torch.sigmoid(1.702 * x),
    "silu": functional.silu,
    "relu squared": lambda x: functional.relu(x).square(),
    "tanh": torch.tanh,
    "sigmoid": torch.sigmoid,
    "relu6": functional.relu6,
    "hardswish": functional.hardswish,
    "hardsigmoid": functional.hardsigmoid,
    "elu": functional.elu,
    "leaky relu": functional.leaky_relu,
    "mish": functional.mish,
    "softplus": functional.softplus,
}


def _rms(x: Tensor, p: Parameters, eps: float, *, plus: float) -> Tensor:
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps) * (p["weight"] + plus)


def _layer(x: Tensor, p: Parameters, eps: float) -> Tensor:
    shape = next(iter(p.values())).shape if p else x.shape[-1:]
    return functional.layer_norm(x, tuple(shape), p.get("weight"), p.get("bias"), eps)


def _layer_of_one_more(x: Tensor, p: Parameters, eps: float) -> Tensor:
    return functional.layer_norm(x, tuple(p["weight"].shape), p["weight"] + 1, p.get("bias"), eps)


def _batch(x: Tensor, p: Parameters, eps: float) -> Tensor:
    return functional.batch_norm(x, p["running_mean"], p["running_var"], p.get("weight"), p.get("bias"), eps=eps)


def _scale(x: Tensor, p: Parameters, eps: float) -> Tensor:
    return x * p["weight"] + p.get("bias", 0.0)


NORMS: Mapping[str, Callable[[Tensor, Parameters, float], Tensor]] = {
    "layer norm": _layer,
    "RMS norm": lambda x, p, eps: _rms(x, p, eps, plus=0.0),
    "RMS norm of 1 + weight": lambda x, p, eps: _rms(x, p, eps, plus=1.0),
    "layer norm of 1 + weight": _layer_of_one_more,
    "batch norm": _batch,
    "scale": _scale,
    "rows of a table": lambda x, p, eps: p["weight"].expand(x.shape),
}


def computed(form: str, x: Tensor, parameters: Parameters, eps: float) -> Tensor:
    """Return what a module of this form gives, in float64."""
    x = x.double()
    if form in ACTIVATIONS:
        return ACTIVATIONS[form](x)
    return NORMS[form](x, {name: value.to(x.device).double() for name, value in parameters.items()}, eps)


def fitting(
    x: Tensor, y: Tensor, parameters: Parameters, epsilons: Sequence[float], *, within: float
) -> tuple[str, float, float] | None:
    """Return the form, its epsilon and how far off it is, of what gives `y` from `x`; None when no form does."""
    forms: Iterable[tuple[str, float]]
    forms = [(n, e) for n in NORMS for e in epsilons] if parameters else [(n, 0.0) for n in ACTIVATIONS]
    best: tuple[str, float, float] | None = None
    for form, eps in forms:
        try:
            made = computed(form, x, parameters, eps)
        except (KeyError, RuntimeError, ValueError):
            continue
        off = _apart(made, y)
        if off < within and (best is None or off < best[2]):
            best = form, eps, off
    return best


def other_form(x: Tensor, y: Tensor, *, within: float) -> str | None:
    """Return the activation that gives `y`, where one is nearer than `within`."""
    found = fitting(x, y, {}, (), within=within)
    return None if found is None else found[0]


def _apart(made: Tensor, y: Tensor) -> float:
    if made.shape != y.shape:
        return float("inf")
    norm = float(y.double().norm())
    return float((made - y.double()).norm()) / norm if norm else float("inf")
