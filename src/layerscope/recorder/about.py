"""What a run says of the model it recorded: its manifest.

about(model, plan, name="llama", mode="fp32", statistics="full", weights=None, kernels="numba", on_disk=True)
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
from layerscope.recorder.copying import plain, undisturbed
from layerscope.recorder.taps import Level, Plan
from layerscope.runtimes import eager
from layerscope.stats import fingerprint
from layerscope.store import Manifest

__all__ = ["about"]

_MOST = 8 << 30  # fingerprinting more than this at the start of a run would be felt


def about(
    model: torch.nn.Module,
    plan: Plan,
    *,
    name: str | None,
    mode: str | None,
    statistics: Level,
    weights: bool | None,
    kernels: str | None,
    on_disk: bool,
) -> Manifest:
    """Describe a model and what is asked of it, as `run.json` states it.

    `weights=None` fingerprints the parameters of models up to 8 GiB, for runs on disk; `kernels` is what makes the
    statistics, where some are asked for.
    """
    kind = type(model)
    by_name, shared = eager.modules_of(model)
    parameters = [parameter for parameter in model.parameters() if not is_lazy(parameter)]
    size = sum(tensor.nbytes for tensor in [*parameters, *model.buffers()] if not is_lazy(tensor))
    settings: dict[str, Any] = {"statistics": statistics, "kernels": kernels} if kernels else {}
    fingerprints: dict[str, str] = {}
    if weights or (weights is None and on_disk and size <= _MOST):
        fingerprints = _fingerprints(by_name)
    elif on_disk:
        why = "not asked for" if weights is False else f"{size >> 30} GiB of parameters; ask with weights=True"
        settings["weights"] = f"not fingerprinted: {why}"
    return Manifest(
        model={
            **({"name": name} if name else {}),
            "class": f"{kind.__module__}.{kind.__qualname__}",
            "parameters": sum(parameter.numel() for parameter in parameters),
        },
        mode=mode,
        runtime="eager",
        versions={
            "layerscope": __version__,
            "python": platform.python_version(),
            "torch": torch.__version__,
            "numpy": np.__version__,
        },
        device=str(parameters[0].device) if parameters else "cpu",
        seed=torch.initial_seed(),
        weights=fingerprints,
        taps=[str(tap) for tap in plan.taps],
        aliases=plan.aliases,
        shared=dict(shared),
        settings=settings,
        started=datetime.now(timezone.utc).isoformat(timespec="seconds"),
    )


def _fingerprints(modules: dict[str, torch.nn.Module]) -> dict[str, str]:
    """Fingerprint each module's own parameters and buffers, so that runs can tell whose weights differ."""
    found: dict[str, str] = {}
    with undisturbed():
        for name, module in modules.items():
            own = [*module.named_parameters(recurse=False), *module.named_buffers(recurse=False)]
            if own:
                found[name] = _fingerprint(own)
    return found


def _fingerprint(own: list[tuple[str, torch.Tensor]]) -> str:
    digest = hashlib.blake2b(digest_size=16)
    for name, tensor in own:
        if is_lazy(tensor):
            return f"not fingerprinted: {name} is not initialised yet"
        try:
            values, _ = plain(tensor)
            digest.update(f"{name}={fingerprint(values.cpu())};".encode())
        except Unsupported as error:
            return f"not fingerprinted: {name}: {error}"
    return digest.hexdigest()
