"""One forward of a model as it might be: with parameters and outputs moved by a rounding, or in another dtype.

    with forward(begun, Twin("moved 1", "float32", seed=1)):        # hooks that move outputs are on
        ...

The model is called through `torch.func.functional_call`, so that its own parameters and buffers are never touched.
"""

from __future__ import annotations

import math
import zlib
from collections import defaultdict
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from layerscope.runtimes.eager import modules_of
from layerscope.runtimes.values import replaced
from layerscope.twins.begun import Begun

EPSILON = {"float64": 2.0**-52, "float32": 2.0**-23, "float16": 2.0**-10, "bfloat16": 2.0**-7}
_ORDER = tuple(EPSILON)
_FINER = {"float32": "float64", "float16": "float32", "bfloat16": "float32"}
_MASKED = 1e30


@dataclass(frozen=True, slots=True)
class Twin:
    """What is other about one forward; a dtype of its own, or a seed that everything is moved by. Neither: a replay."""

    name: str
    arithmetic: str  # the class it stands for
    dtype: torch.dtype | None = None
    seed: int | None = None


def twins_of(arithmetic: str) -> list[Twin]:
    """Return the twins of a model of this arithmetic: three for its own class, and some for each coarser one."""
    found = []
    for name in _ORDER[_ORDER.index(arithmetic) :]:
        other = _FINER.get(name) if name == arithmetic else name
        if other is not None:
            found.append(Twin(other, name, dtype=getattr(torch, other)))
        # A GPU in float16 is rarer than one in bfloat16; its cast and one moved twin have shown enough.
        moves = 1 if name == "float16" != arithmetic else 2
        found += [Twin(f"moved {n}", name, seed=n) for n in range(1, moves + 1)]
    return found


@contextmanager
def moving(model: nn.Module, twin: Twin) -> Iterator[None]:
    """Move what leaf modules give by the twin's rounding, until the block ends."""
    if twin.seed is None:
        yield
        return
    calls: dict[str, int] = defaultdict(int)
    with ExitStack() as stack:
        for name, module in modules_of(model).by_name.items():
            if not module._modules and type(module).forward is not nn.Module.forward:
                by = max(EPSILON[twin.arithmetic], math.sqrt(fan_in(module)) / 4 * EPSILON["float32"])
                stack.callback(module.register_forward_hook(_mover(name, by, twin.seed, calls)).remove)
        yield


def _mover(name: str, by: float, seed: int, calls: dict[str, int]) -> Any:
    def hook(module: nn.Module, args: object, output: Any) -> Any:
        calls[name] += 1
        at = f"{name} {calls[name]} {seed}"
        return replaced(output, lambda leaf, tensor: moved(tensor, by, f"{at} {leaf}"))

    return hook


def moved(tensor: torch.Tensor, by: float, at: str) -> torch.Tensor:
    """Return a tensor whose values are off by at most `by`, relatively; drawn by the place, computed in float32."""
    if not tensor.is_floating_point() or not tensor.numel() or tensor.dtype.itemsize < 2:
        return tensor
    generator = torch.Generator().manual_seed(zlib.crc32(at.encode("utf-8", "surrogatepass")))
    wide = torch.float64 if tensor.dtype == torch.float64 else torch.float32
    drawn = torch.rand(tensor.shape, generator=generator, dtype=wide).to(tensor.device).mul_(2 * by).sub_(by).add_(1)
    other = (tensor.detach().to(wide) * drawn).to(tensor.dtype)
    if bool((tensor.abs() >= _MASKED).any()):
        other = torch.where(tensor.abs() < _MASKED, other, tensor)
    return other


def fan_in(module: nn.Module) -> int:
    """Return how long the sums are that a module's output comes from."""
    if isinstance(module, nn.Embedding):
        return 1
    total = 0
    for weight in module.parameters(recurse=False):
        if weight.ndim >= 2:
            flipped = type(module).__name__ == "Conv1D" or (weight.ndim == 3 and "Conv" not in type(module).__name__)
            total += max(weight.shape[-2:]) if flipped else weight.numel() // max(1, weight.shape[0])
    return max(1, total)


def parameters(model: nn.Module, twin: Twin) -> dict[str, torch.Tensor]:
    """Return a twin's parameters; empty where they are the model's own."""
    own = dict(model.named_parameters())
    if twin.seed is not None:
        by = EPSILON[twin.arithmetic]
        return {name: moved(p, by, f"{name} {twin.seed}") for name, p in own.items()}
    if twin.dtype is None:
        return {}
    return {name: p.detach().to(twin.dtype) if p.is_floating_point() else p.detach() for name, p in own.items()}


def run(begun: Begun, twin: Twin, *, buffers: bool = False) -> None:
    """Run one forward; a twin's floating-point buffers are in its dtype only where the forward fails otherwise."""
    args, kwargs = begun.inputs(twin.dtype)
    held = {name: buffer.clone() for name, buffer in begun.buffers.items()}
    if buffers:
        held = {n: b.to(twin.dtype) if b.is_floating_point() else b for n, b in held.items()}
    with torch.no_grad(), torch.compiler.set_stance("force_eager"), begun.arithmetic(twin.dtype):
        torch.func.functional_call(begun.model, {**parameters(begun.model, twin), **held}, args, kwargs)
