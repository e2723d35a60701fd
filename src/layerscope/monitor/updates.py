"""How much an optimizer's step moves each parameter.

    updates.before()        # as the step begins: a copy of every trainable parameter
    updates.now()           # before it moves anything: weights and gradients
    updates.after()         # as it ends: weights, gradients and the ratio of update to weight

It costs one copy of the trainable parameters, for the length of the step, and a few passes over them; hence only on the
steps that are due.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch

from layerscope.points import unwrapped
from layerscope.recorder.gpu import DeviceStatistics
from layerscope.recorder.taps import Level
from layerscope.recorder.tensors import plain
from layerscope.rules import ParameterReading
from layerscope.stats import Summary, summarize

_Statistics = Summary | Callable[[], Summary]


class Updates:
    """The trainable parameters of a model around one step of its optimizer."""

    def __init__(self, model: torch.nn.Module, *, level: Level) -> None:
        self._model = model
        self._level = level
        self._devices = DeviceStatistics()
        self._held: list[tuple[str, torch.nn.Parameter, torch.Tensor, _Statistics | None]] = []
        self._read = True  # whether the gradients were there when the step began

    def before(self, *, gradients: bool = True) -> None:
        """Copy the parameters, and summarise their gradients; not those of a step that is yet to make them."""
        held = []
        for name, parameter in self._model.named_parameters():
            if parameter.requires_grad:
                now = plain(parameter)[0]
                gradient = self._gradient(parameter) if gradients else None
                held.append((unwrapped(name), parameter, now.clone(), gradient))
        self._held, self._read = held, gradients

    def now(self) -> tuple[ParameterReading, ...]:
        """Tell what is known before the optimizer has moved anything: weights, and the gradients as they are."""
        with torch.no_grad():
            weights = _norms([copy for _, _, copy, _ in self._held])
        return tuple(
            ParameterReading(name, _rms(weight, copy), _came(gradient if self._read else self._gradient(parameter)))
            for (name, parameter, copy, gradient), weight in zip(self._held, weights, strict=True)
        )

    def after(self) -> tuple[ParameterReading, ...]:
        """Measure what changed since `before`, and let go of the copies."""
        held, self._held = self._held, []
        gradients = [_came(known if self._read else self._gradient(parameter)) for _, parameter, _, known in held]
        values = [plain(parameter)[0] for _, parameter, _, _ in held]
        copies = [copy for _, _, copy, _ in held]
        with torch.no_grad():
            weights, results = _norms(copies), _norms(values)
            changes = _norms([torch.sub(now, copy, out=copy) for now, copy in zip(values, copies, strict=True)])
        readings = []
        for (name, _, copy, _), gradient, weight, result, change in zip(
            held, gradients, weights, results, changes, strict=True
        ):
            base = weight or result
            readings.append(ParameterReading(name, _rms(weight, copy), gradient, change / base if base else 0.0))
        return tuple(readings)

    def forget(self) -> None:
        """Let go of a step that is not due, or was not finished."""
        self._held = []

    def close(self) -> None:
        """Let go of everything: nothing is measured any more."""
        self._held = []
        self._devices.close()

    def _gradient(self, parameter: torch.Tensor) -> _Statistics | None:
        if parameter.grad is None:
            return None
        gradient = _dense(parameter.grad)
        start = summarize if gradient.device.type == "cpu" else self._devices.of
        return start(gradient, level=self._level)


def _came(gradient: _Statistics | None) -> Summary | None:
    return gradient() if callable(gradient) else gradient


def _rms(norm: float, values: torch.Tensor) -> float:
    return norm / math.sqrt(values.numel()) if values.numel() else 0.0


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
