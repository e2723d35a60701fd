"""What a run says of the model it recorded: its manifest.

provenance(model, runtime, plan, options, statistics="full", kernels="numba", on_disk=True)
"""

from __future__ import annotations

import hashlib
import platform
from datetime import datetime, timezone
from typing import Any

import numpy as np
import torch
from torch.nn.parameter import is_lazy

from layerscope import __version__
from layerscope.errors import Unsupported
from layerscope.recorder.record_options import RecordOptions
from layerscope.recorder.taps import TapPlan
from layerscope.recorder.tensors import plain, undisturbed
from layerscope.runtimes.runtime import Runtime, Weights
from layerscope.stats import fingerprint
from layerscope.store import Manifest

_MOST = 8 << 30  # fingerprinting more than this at the start of a run would be felt


def provenance(
    model: Any,
    runtime: Runtime,
    plan: TapPlan,
    options: RecordOptions,
    *,
    statistics: str,
    kernels: str | None,
    on_disk: bool,
) -> Manifest:
    """Describe a model and what is asked of it, as `run.json` states it.

    `kernels` is what makes the statistics, where some are asked for.
    """
    weights = options.weights
    kind = type(model)
    parameters, own = runtime.parameters(model), runtime.weights(model)
    tensors = {id(tensor): tensor for named in own.values() for _, tensor in named if not is_lazy(tensor)}
    size = sum(tensor.nbytes for tensor in tensors.values())
    said: dict[str, Any] = {"statistics": statistics, "kernels": kernels} if kernels else {}
    if grid := _grid(own):
        said["quantised"] = grid
    fingerprints: dict[str, str] = {}
    if weights or (weights is None and on_disk and size <= _MOST):
        fingerprints = _fingerprints(own)
        if parameters and not own:
            said["weights"] = f"not fingerprinted: {runtime.NAME} does not keep them as they are in the source"
    elif on_disk:
        why = (
            "not asked for"
            if weights is False
            else f"{size >> 30} GiB of parameters; ask with RecordOptions(weights=True)"
        )
        said["weights"] = f"not fingerprinted: {why}"
    return Manifest(
        model={
            **({"name": options.name} if options.name else {}),
            "class": f"{kind.__module__}.{kind.__qualname__}",
            "parameters": sum(parameter.numel() for parameter in parameters),
        },
        mode=options.mode,
        runtime=runtime.NAME,
        versions=versions(),
        device=str(parameters[0].device) if parameters else "cpu",
        seed=torch.initial_seed(),
        weights=fingerprints,
        taps=[str(tap) for tap in plan.taps],
        aliases=plan.aliases,
        shared=runtime.shared(model),
        settings=said | dict(options.settings),
        started=datetime.now(timezone.utc).isoformat(timespec="seconds"),
    )


def versions() -> dict[str, str]:
    """Return the versions of what computes here."""
    return {
        "layerscope": __version__,
        "python": platform.python_version(),
        "torch": torch.__version__,
        "numpy": np.__version__,
    }


def said_of(model: torch.nn.Module) -> str:
    """Say what a live model is: its class, its size, its dtypes and where it lies."""
    kind, weights = type(model), [one for one in model.parameters() if not is_lazy(one)]
    dtypes = dict.fromkeys(str(one.dtype).removeprefix("torch.") for one in weights)
    places = dict.fromkeys(str(one.device) for one in weights)
    size = f"{sum(one.numel() for one in weights):,} parameters"
    return ", ".join((f"{kind.__module__}.{kind.__qualname__}", size, *dtypes, *places))


def _grid(weights: Weights) -> str:
    """Say in words that the weights lie on a coarser grid, where some of them show it; else nothing."""
    for owned in weights.values():
        for name, tensor in owned:
            if "weight" not in name or is_lazy(tensor):
                continue
            if not tensor.is_floating_point() or tensor.dtype.itemsize == 1:
                return f"weights of {str(tensor.dtype).removeprefix('torch.')}"
            if _dequantises(tensor):
                return f"weights in a {type(tensor).__name__}"
    return ""


def _fingerprints(weights: Weights) -> dict[str, str]:
    """Fingerprint each module's own parameters and buffers, so that runs can tell whose weights differ."""
    with undisturbed():
        return {name: _fingerprint(own) for name, own in weights.items()}


def _fingerprint(own: list[tuple[str, torch.Tensor]]) -> str:
    digest = hashlib.blake2b(digest_size=16)
    for name, tensor in own:
        if is_lazy(tensor):
            return f"not fingerprinted: {name} is not initialised yet"
        try:
            values, _ = plain(_unpacked(tensor))
            digest.update(f"{name}={fingerprint(values.cpu())};".encode())
        except Unsupported as error:
            return f"not fingerprinted: {name}: {error}"
    return digest.hexdigest()


def _unpacked(tensor: torch.Tensor) -> torch.Tensor:
    """Return the values that a quantised tensor stands for: a fingerprint is of those, not of how they are packed."""
    unpacked: torch.Tensor = tensor.dequantize() if _dequantises(tensor) else tensor
    return unpacked


def _dequantises(tensor: torch.Tensor) -> bool:
    """Say whether a tensor is of a subclass that stands for other values than it holds, as torchao's are."""
    return getattr(type(tensor), "dequantize", torch.Tensor.dequantize) is not torch.Tensor.dequantize
