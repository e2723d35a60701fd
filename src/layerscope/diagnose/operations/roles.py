"""What people call an operation, from what stands around it: mask, rope, softmax scale, residual, transposition.

role_of(calls[36], calls)      # "softmax scale"
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from layerscope.diagnose.operations.distances import BLOCKED
from layerscope.diagnose.operations.tracing import Called

_AHEAD = 10  # operations between a scale and its softmax, an angle and its cosine
_MASKING = frozenset(
    {"triu", "tril", "masked_fill", "where", "logical_not", "bitwise_not", "bitwise_and", "logical_and"}
)


def role_of(call: Called, calls: Sequence[Called]) -> str:
    """Return the word for a call of this log."""
    after = [other.name for other in calls[call.index + 1 : call.index + 1 + _AHEAD]]
    before = [other.name for other in calls[max(0, call.index - 6) : call.index]]
    if call.name == "to":
        return "cast"
    if call.name in ("transpose", "permute", "movedim"):
        return "transposition"
    if call.name in ("softmax", "attention"):
        return "attention"
    if call.name in _MASKING or _boolean(call) or any(blocked(tensor) is not None for tensor in call.inputs):
        return "mask"
    if call.name in ("cos", "sin") or {"cos", "sin"} & set(after):
        return "rope"
    if call.name in ("rsqrt", "sqrt") or (call.name == "add" and {"rsqrt", "sqrt"} & set(after[:2])):
        return "epsilon" if call.name == "add" else "norm"
    if _rotates(call, before, after):
        return "rope"
    if call.name in ("mul", "div") and _numbers(call) and "softmax" in after:
        return "softmax scale"
    if call.name == "add" and _joins(call):
        return "residual"
    return "operation"


def blocked(tensor: torch.Tensor) -> torch.Tensor | None:
    """Return where a mask forbids, as booleans; None where the tensor is no mask."""
    if tensor.dtype is torch.bool:
        return tensor if tensor.ndim > 1 else None
    if not tensor.is_floating_point() or tensor.ndim < 2:
        return None
    where = tensor <= BLOCKED
    return where if bool(where.any()) else None


def _boolean(call: Called) -> bool:
    return bool(call.outputs) and call.outputs[0].dtype is torch.bool


def _numbers(call: Called) -> bool:
    return any(isinstance(value, float | int) for value in call.scalars.values())


def _rotates(call: Called, before: Sequence[str], after: Sequence[str]) -> bool:
    """Whether a call belongs to `x * cos + cat(-x2, x1) * sin`, in either of its layouts."""
    if call.name in ("neg", "cat", "slice"):
        return {"neg", "cat", "mul", "add"} <= {call.name, *before, *after[:6]}
    return (call.name in ("mul", "add", "sub") and {"neg", "cat"} <= set(before)) or (
        call.name == "mul" and {"neg", "cat"} <= set(after[:5])
    )


def _joins(call: Called) -> bool:
    """Whether two streams of one shape are added, one of which came from outside."""
    return len(call.inputs) == 2 and call.inputs[0].shape == call.inputs[1].shape and None in call.sources
