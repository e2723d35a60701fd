"""Modes that any model has: other floating-point types, and Linear layers quantised by torchao.

    variant(model, "bf16")
    variant(model, "int8-dynamic")

A quantised Linear layer computes in the model's own dtype with weights (`int8-dynamic`: and activations) that went
through the narrow type, on whatever device the model is. What torchao offers for one kind of device alone is not used,
so that a mode means the same everywhere.
"""

from __future__ import annotations

import importlib
import logging
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from importlib.util import find_spec
from types import ModuleType
from typing import Any

import torch
from torch import nn
from torch.nn.modules.linear import NonDynamicallyQuantizableLinear
from torch.nn.parameter import is_lazy

from layerscope.errors import MissingExtra
from layerscope.modes.registry import Mode, Setting, copied

__all__ = ["GENERIC", "GROUP_SIZE", "REFERENCE"]

GROUP_SIZE = 32  # weights that share a scale in int4-weight
EXTRA = "it takes torchao: pip install 'layerscope[quant]'"
_QUANTISABLE = (torch.float32, torch.bfloat16, torch.float16)


# Another floating-point type -------------------------------------------------------------------


def _cast(model: nn.Module, setting: Setting, *, dtype: torch.dtype) -> nn.Module:
    return copied(model).to(dtype)


def _castable(model: nn.Module, *, dtype: torch.dtype) -> str | None:
    """Say what of a model has no other type to go to."""
    tensors = [*model.named_parameters(), *model.named_buffers()]
    for name, tensor in tensors:
        if is_lazy(tensor):
            return f"{name} is not initialised yet; run the model once"
        if tensor.is_complex():
            return f"{name} is complex, which has no {_short(dtype)}"
        if not _is_plain(tensor):
            return f"{name} is quantised already (a {type(tensor).__name__}), which does not go back"
    if not any(tensor.is_floating_point() for _, tensor in tensors):
        return "it has no floating-point parameter or buffer"
    return None


def _short(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


# Linear layers by torchao ----------------------------------------------------------------------

Config = Callable[[ModuleType], Any]


def _int8_weight(ao: ModuleType) -> Any:
    return ao.Int8WeightOnlyConfig(set_inductor_config=False, version=2)


def _int8_dynamic(ao: ModuleType) -> Any:
    return ao.Int8DynamicActivationInt8WeightConfig(set_inductor_config=False, version=2)


def _int4_weight(ao: ModuleType) -> Any:
    four = torch.int4  # type: ignore[attr-defined]  # made by torch, unknown to its stubs
    return ao.IntxWeightOnlyConfig(weight_dtype=four, granularity=ao.PerGroup(GROUP_SIZE))


def _fp8(ao: ModuleType) -> Any:
    return ao.Float8WeightOnlyConfig(set_inductor_config=False)


def _quantised(model: nn.Module, setting: Setting, *, config: Config, multiple: int = 1) -> nn.Module:
    own = copied(model)
    wanted = {id(linear) for linear in _linears(own, multiple)}

    def is_due(module: nn.Module, name: str) -> bool:
        # A layer that two names share comes up twice, and is quantised once.
        return id(module) in wanted and _is_plain(module.weight)  # type: ignore[arg-type]

    with _quiet():
        ao = _torchao()
        ao.quantize_(own, config(ao), filter_fn=is_due)
    return own


def _quantisable(model: nn.Module, *, multiple: int = 1) -> str | None:
    """Say why there is nothing to quantise."""
    if not any(isinstance(module, nn.Linear) for module in model.modules()):
        return "it has no Linear layer"
    if not any(_linears(model)):
        return "none of its Linear layers has a weight in float32, bfloat16 or float16 to quantise"
    if not any(_linears(model, multiple)):
        widths = sorted({linear.in_features for linear in _linears(model)})
        listed = ", ".join(map(str, widths[:3])) + (", ..." if len(widths) > 3 else "")
        return f"no Linear layer is a multiple of {multiple} wide, which is the size of a group (widths: {listed})"
    if find_spec("torchao") is None:
        raise MissingExtra(EXTRA)
    return None


def _linears(model: nn.Module, multiple: int = 1) -> Iterator[nn.Linear]:
    """Yield the Linear layers whose weights can be quantised.

    The output projection of torch's own attention is used as a bare weight there, which a quantised one cannot be.
    """
    for module in model.modules():
        if not isinstance(module, nn.Linear) or isinstance(module, NonDynamicallyQuantizableLinear):
            continue
        weight = module.weight
        if is_lazy(weight) or not _is_plain(weight) or weight.dtype not in _QUANTISABLE or not weight.numel():
            continue
        if module.in_features % multiple == 0:
            yield module


def _is_plain(tensor: torch.Tensor) -> bool:
    return type(tensor) in (torch.Tensor, nn.Parameter, nn.Buffer)


def _torchao() -> ModuleType:
    try:
        return importlib.import_module("torchao.quantization")
    except ImportError as error:
        raise MissingExtra(f"{EXTRA} (importing it failed: {' '.join(str(error).split())})") from error


@contextmanager
def _quiet() -> Iterator[None]:
    """Keep what torchao says of kernels and deprecations of its own to itself."""
    loggers = [logging.getLogger(name) for name in ("torchao", "torch.utils._pytree")]
    levels = [logger.level for logger in loggers]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            for logger in loggers:
                logger.setLevel(logging.ERROR)
            yield
        finally:
            for logger, level in zip(loggers, levels, strict=True):
                logger.setLevel(level)


# The modes --------------------------------------------------------------------------------------


def _floating(name: str, dtype: torch.dtype, about: str, *groups: str) -> Mode:
    return Mode(
        name,
        about,
        partial(_cast, dtype=dtype),
        partial(_castable, dtype=dtype),
        frozenset({"all", "fp_only", *groups}),
    )


def _narrow(name: str, config: Config, about: str, *groups: str, multiple: int = 1) -> Mode:
    return Mode(
        name,
        about,
        partial(_quantised, config=config, multiple=multiple),
        partial(_quantisable, multiple=multiple),
        frozenset({"all", "quant_only", *groups}),
    )


REFERENCE = _floating("fp32", torch.float32, "every weight and activation in float32: the reference", "essential")
GENERIC: tuple[Mode, ...] = (
    REFERENCE,
    _floating("fp16", torch.float16, "every weight and activation in float16"),
    _floating("bf16", torch.bfloat16, "every weight and activation in bfloat16", "essential"),
    _narrow("int8-weight", _int8_weight, "weights of Linear layers in INT8, a scale for each row", "essential"),
    _narrow(
        "int8-dynamic",
        _int8_dynamic,
        "weights and inputs of Linear layers in INT8, a scale for each row and each token, INT32 sums",
        "essential",
    ),
    _narrow(
        "int4-weight",
        _int4_weight,
        f"weights of Linear layers in INT4, a scale for {GROUP_SIZE} of them; layers of another width stay as they are",
        multiple=GROUP_SIZE,
    ),
    _narrow("fp8", _fp8, "weights of Linear layers in float8 (e4m3), a scale for each row"),
)
