"""Modes that any model has: other floating-point types, and Linear layers quantised by torchao.

    variant(model, "bf16")
    variant(model, "int8-dynamic")

A quantised Linear layer computes in the model's own dtype with weights (`int8-dynamic`: and activations) that went
through the narrow type, on whatever device the model is. What torchao offers for one kind of device alone is not used,
so that a mode means the same everywhere.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterator
from functools import partial
from importlib.util import find_spec
from types import MethodType, ModuleType
from typing import Any

import torch
from torch import nn
from torch.nn.modules.linear import NonDynamicallyQuantizableLinear
from torch.nn.parameter import is_lazy

from layerscope.errors import MissingExtra
from layerscope.models.quiet import quiet
from layerscope.modes.registry import Mode, Setting, copied

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


def _as_it_is(linear: nn.Linear) -> None:
    """Mend nothing."""


def _give_zero_rows_a_scale(linear: nn.Linear) -> None:
    """Make zeros of the rows of an fp8 weight whose scale is 0, which torchao divided by.

    The scale is the largest value over 448, in the weight's dtype: 0 for zeros, and for what is as good as zero.
    """
    weight: Any = linear.weight
    nothing = weight.scale == 0
    weight.qdata.view(torch.uint8).masked_fill_(nothing, 0)
    weight.scale.masked_fill_(nothing, 1)


def _take_empty_batches(linear: nn.Linear) -> None:
    """Let a Linear whose inputs are quantised give what a float one does where there is no input to take a scale of."""
    if getattr(linear.forward, "__func__", None) is nn.Linear.forward:
        linear.forward = MethodType(_forward_of_any_batch, linear)  # type: ignore[method-assign]


def _forward_of_any_batch(linear: nn.Linear, input: torch.Tensor) -> torch.Tensor:
    if input.numel() == 0:
        weight = input.new_zeros(()).expand(linear.out_features, linear.in_features)
        return nn.functional.linear(input, weight, linear.bias)
    return nn.Linear.forward(linear, input)


def _quantised(
    model: nn.Module,
    setting: Setting,
    *,
    config: Config,
    multiple: int = 1,
    mend: Callable[[nn.Linear], None] = _as_it_is,
) -> nn.Module:
    own = copied(model)
    linears = list(_linears(own, multiple))
    wanted = {id(linear) for linear in linears}

    def is_due(module: nn.Module, name: str) -> bool:
        # A layer that two names share comes up twice, and is quantised once.
        return id(module) in wanted and _is_plain(module.weight)  # type: ignore[arg-type]

    with quiet():
        ao = _torchao()
        ao.quantize_(own, config(ao), filter_fn=is_due)
    for linear in linears:
        mend(linear)
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


# The modes --------------------------------------------------------------------------------------


def _floating(name: str, dtype: torch.dtype, about: str, *groups: str) -> Mode:
    return Mode(
        name,
        about,
        partial(_cast, dtype=dtype),
        partial(_castable, dtype=dtype),
        frozenset({"all", "fp_only", *groups}),
    )


def _narrow(
    name: str,
    config: Config,
    about: str,
    *groups: str,
    multiple: int = 1,
    mend: Callable[[nn.Linear], None] = _as_it_is,
) -> Mode:
    return Mode(
        name,
        about,
        partial(_quantised, config=config, multiple=multiple, mend=mend),
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
        mend=_take_empty_batches,
    ),
    _narrow(
        "int4-weight",
        _int4_weight,
        f"weights of Linear layers in INT4, a scale for {GROUP_SIZE} of them; layers of another width stay as they are",
        multiple=GROUP_SIZE,
    ),
    _narrow(
        "fp8",
        _fp8,
        "weights of Linear layers in float8 (e4m3), a scale for each row",
        mend=_give_zero_rows_a_scale,
    ),
)
