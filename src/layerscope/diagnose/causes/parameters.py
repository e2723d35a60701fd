"""The tensors that two modules hold, paired by name: parameters, buffers, plain attributes.

    for name, reference, candidate in paired(case): ...

A module inside that never ran by itself lends its weights to its parent's code (`MultiheadAttention.out_proj`, Mamba's
`conv1d`): they are the parent's here, under their path.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import nn

from layerscope.diagnose.causes.cause import Case

# Where wrappers keep what they wrap: PEFT, torch.compile, DDP.
_WRAPPED = ("base_layer", "_orig_mod", "module")
# Counters, which no result depends on.
_IDLE = frozenset({"num_batches_tracked"})


def parts(case: Case) -> Iterator[tuple[str, nn.Module, nn.Module]]:
    """Yield the suspect and what is used functionally inside it: path, the reference's, the candidate's."""
    there = dict(_unwrapped(case.candidate).named_modules())
    for path, module in _unwrapped(case.reference).named_modules():
        if path and case.uncalled is not None:
            above = (path, *(path[:at] for at, letter in enumerate(path) if letter == "."))
            if not set(above) & set(case.uncalled):
                continue
        if path in there:
            yield path, module, _unwrapped(there[path])


def paired(case: Case) -> Iterator[tuple[str, torch.Tensor, torch.Tensor]]:
    """Yield the tensors that both sides hold under one name, as dense ones."""
    for path, module, other in parts(case):
        theirs = held(other)
        for name, tensor in held(module).items():
            if name in theirs and name not in _IDLE:
                one, two = dense(tensor), dense(theirs[name])
                if one is not None and two is not None:
                    yield f"{path}.{name}".lstrip("."), one, two


def held(module: nn.Module) -> dict[str, torch.Tensor]:
    """Return a module's own tensors by name, not those of the modules inside it."""
    found = {name: tensor for name, tensor in module.__dict__.items() if isinstance(tensor, torch.Tensor)}
    for kept in (module._parameters, module._buffers):
        found |= {name: tensor for name, tensor in kept.items() if tensor is not None}
    return found


def dense(tensor: torch.Tensor) -> torch.Tensor | None:
    """Return a tensor's values as a plain tensor, dequantised where it is quantised; None where they cannot be had."""
    tensor = tensor.detach()
    try:
        if tensor.is_quantized or getattr(type(tensor), "dequantize", None) is not torch.Tensor.dequantize:
            tensor = tensor.dequantize()
        return None if tensor.is_meta or tensor.layout is not torch.strided else tensor
    except (RuntimeError, NotImplementedError, TypeError):
        return None


def _unwrapped(module: nn.Module) -> nn.Module:
    """Return what a wrapper wraps; an adapter keeps its own weights beside it, the others nothing."""
    for name in _WRAPPED:
        inner = module._modules.get(name)
        if inner is not None and (name == "base_layer" or len(module._modules) == 1):
            return _unwrapped(inner)
    return module
