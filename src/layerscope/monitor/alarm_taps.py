"""What a watch is asked for, in the recorder's words.

other_side(["blocks.*"], "grad_output")     # ("blocks.*:grad_output",)
maps_of(["**.attn"])                        # a Tap of what attention modules return beside their output
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch

from layerscope.errors import Unsupported
from layerscope.patterns import Pattern, select
from layerscope.points import Point, Side
from layerscope.recorder import Tap
from layerscope.runtimes import eager


def innermost(optimizer: torch.optim.Optimizer) -> torch.optim.Optimizer:
    """Return the optimizer that steps: Accelerate's and Lightning's are wrappers of it."""
    inside = getattr(optimizer, "optimizer", None)
    if isinstance(inside, torch.optim.Optimizer):
        return innermost(inside)
    if not isinstance(optimizer, torch.optim.Optimizer):
        raise Unsupported(
            f"a {type(optimizer).__name__} is no torch.optim.Optimizer, and does not tell when it steps; without one, "
            "every forward is a step: watch(model)."
        )
    return optimizer


def other_side(patterns: Sequence[str], side: Side) -> tuple[str, ...]:
    """Return the same modules seen from another side."""
    parsed = [Pattern.parse(pattern) for pattern in patterns]
    return tuple(
        str(each if each.exclude else replace(each, sides=(side,), leaf=each.leaf if side != "input" else ()))
        for each in parsed
        if each.kind != "op"
    )


def maps_of(attention: Tap | Sequence[str]) -> Tap | None:
    """Return a tap for what attention modules return beside their output, which stands second."""
    if not attention:
        return None
    tap = attention if isinstance(attention, Tap) else Tap(tuple(attention))
    parsed = [Pattern.parse(pattern) for pattern in tap.patterns]
    return replace(tap, patterns=tuple(str(p if p.exclude or p.leaf else replace(p, leaf=(1,))) for p in parsed))


def points_of(tap: Tap, model: torch.nn.Module) -> set[Point]:
    """Return the points of a model that a tap names, shared modules under their first name."""
    shared = eager.modules_of(model).shared
    found = select(tap.patterns, eager.points(model))
    return {replace(point, name=shared.get(point.name, point.name)) for point in found}


def bounds_of(model: torch.nn.Module) -> dict[str, tuple[float, float]]:
    """Return the ranges of the modules whose function is bounded at both ends, and flat there."""
    found: dict[str, tuple[float, float]] = {}
    for name, module in eager.modules_of(model).by_name.items():
        if isinstance(module, torch.nn.Hardtanh) and not isinstance(module, torch.nn.ReLU6):
            found[name] = (module.min_val, module.max_val)
        elif isinstance(module, (torch.nn.Sigmoid, torch.nn.Hardsigmoid)):
            found[name] = (0.0, 1.0)
        elif isinstance(module, (torch.nn.Tanh, torch.nn.Softsign)):
            found[name] = (-1.0, 1.0)
    return found
