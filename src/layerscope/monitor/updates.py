"""How much an optimizer's step moves each parameter.

    updates.before()        # as the step begins: a copy of every trainable parameter
    updates.after()         # as it ends: weights, gradients and the ratio of update to weight

It costs one copy of the trainable parameters, for the length of the step, and a few passes over them; hence only on the
steps that are due.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch

from layerscope.points import unwrapped
from layerscope.recorder.copying import plain
from layerscope.recorder.devices import Statistics
from layerscope.recorder.taps import Level
from layerscope.rules import ParameterReading
from layerscope.stats import Summary, summarize

__all__ = ["Updates"]

_Statistics = Summary | Callable[[], Summary]


class Updates:
    """The trainable parameters of a model around one step of its optimizer."""

    def __init__(self, model: torch.nn.Module, *, level: Level) -> None:
        self._model = model
        self._level = level
        self._devices = Statistics()
        self._held: list[tuple[str, torch.Tensor, torch.Tensor, _Statistics | None]] = []

    def before(self) -> None:
        """Copy the parameters, and summarise their gradients."""
        held = []
        for name, parameter in self._model.named_parameters():
            if parameter.requires_grad:
                now = plain(parameter)[0]
                gradient = None if parameter.grad is None else self._summary(_dense(parameter.grad))
                held.append((unwrapped(name), now, now.clone(), gradient))
        self._held = held

    def after(self) -> tuple[ParameterReading, ...]:
        """Measure what changed since `before`, and let go of the copies."""
        held, self._held = self._held, []
        with torch.no_grad():
            weights = _norms([copy for _, _, copy, _ in held])
            results = _norms([now for _, now, _, _ in held])
            changes = _norms([torch.sub(now, copy, out=copy) for _, now, copy, _ in held])
        readings = []
        for (name, now, _, gradient), weight, result, change in zip(held, weights, results, changes, strict=True):
            base = weight or result
            readings.append(
                ParameterReading(
                    name,
                    weight / math.sqrt(now.numel()) if now.numel() else 0.0,
                    gradient() if callable(gradient) else gradient,
                    change / base if base else 0.0,
                )
            )
        return tuple(readings)

    def forget(self) -> None:
        """Let go of a step that is not due, or was not finished."""
        self._held = []

    def close(self) -> None:
        """Let go of everything: nothing is measured any more."""
        self._held = []
        self._devices.close()

    def _summary(self, gradient: torch.Tensor) -> _Statistics:
        start = summarize if gradient.device.type == "cpu" else self._devices.of
        return start(gradient, level=self._level)


def _dense(gradient: torch.Tensor) -> torch.Tensor:
    """Return a gradient's values: those that are there, of a sparse one."""
    return plain(gradient if gradient.layout is torch.strided else gradient.coalesce().values())[0]


def _norms(tensors: list[torch.Tensor]) -> list[float]:
    """Return the 2-norm of each tensor, fetched from each device at once."""
    norms = [torch.linalg.vector_norm(each, dtype=_wide(each.dtype)).double() for each in tensors]
    found: dict[int, float] = {}
    for device in {norm.device for norm in norms}:
        here = [at for at, norm in enumerate(norms) if norm.device == device]
        found |= zip(here, torch.stack([norms[at] for at in here]).tolist(), strict=True)
    return [found[at] for at in range(len(norms))]


def _wide(dtype: torch.dtype) -> torch.dtype | None:
    return torch.float32 if dtype in (torch.float16, torch.bfloat16) else None
