"""What every mode is given: the same inputs, in the types the variant takes, and the fingerprint that proves it.

fingerprint_of(batches)             # equal inputs, equal text
fitted(batch, variant)
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable

import torch
from torch import nn

from layerscope.errors import Unsupported
from layerscope.models import Inputs
from layerscope.recorder.tensors import dtype_name, plain
from layerscope.runtimes.values import rebuilt, replaced
from layerscope.stats import fingerprint


def fingerprint_of(batches: Iterable[Inputs]) -> str:
    """Return a text that equal inputs share: names, dtypes, shapes and values count, objects without tensors do not."""
    digest = hashlib.blake2b(digest_size=16)
    for batch in batches:
        digest.update(repr(rebuilt((batch.args, batch.kwargs), lambda _, tensor: _print(tensor))).encode())
    return digest.hexdigest()


def _print(tensor: torch.Tensor) -> str:
    try:
        values = fingerprint(plain(tensor)[0].cpu())
    except Unsupported as error:
        return str(error)
    return f"{dtype_name(tensor.dtype)}{list(tensor.shape)}={values}"


def fitted(batch: Inputs, model: nn.Module, *, dtype: torch.dtype | None = None) -> Inputs:
    """Copy the inputs, floating-point ones in the model's dtype (or another), all on its device.

    A copy, because a forward may write into what it is given, and the next mode is to be given the same.
    """
    device = next((p.device for p in model.parameters()), torch.device("cpu"))
    dtype = dtype or dtype_of(model)

    def fit(_: object, tensor: torch.Tensor) -> torch.Tensor:
        wanted = dtype if dtype is not None and tensor.is_floating_point() else tensor.dtype
        return tensor.to(device=device, dtype=wanted, copy=True)

    return Inputs(replaced(batch.args, fit), replaced(batch.kwargs, fit))


def dtype_of(model: nn.Module) -> torch.dtype | None:
    """Return the dtype a model computes in: that of its first floating-point parameter, None where it has none."""
    return next((p.dtype for p in model.parameters() if p.is_floating_point()), None)
