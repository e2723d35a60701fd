"""One operation of a module's own code that makes a difference, in words.

role_of(calls[36], calls)      # "softmax scale": what people call an operation, from what stands around it
tell_numbers(ours, theirs, calls, error, floor).because      # "it multiplies by 0.3 where the reference ..."
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch

from layerscope.diagnose.judge.measurement import BLOCKED, apart
from layerscope.diagnose.operations.trace import Called


@dataclass(frozen=True, slots=True)
class Operation:
    """An operation, what people call it there (mask, rope, residual, ...), and a clause that follows the module's name.

    `error` is its result's relative L2 error, `floor` what rounding explains of it; None where it has no counterpart.
    `index` is its place among the operations of the candidate's own code, or of the reference's where only that has it.
    """

    name: str
    what: str
    because: str
    error: float | None
    floor: float | None
    index: int

    def __str__(self) -> str:
        return self.because


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


_VERBS = {"mul": "multiplies by", "div": "divides by", "add": "adds", "sub": "subtracts"}
_SPEAK_FOR_THEMSELVES = ("operation", "transposition", "cast")


def tell_numbers(ours: Called, theirs: Called, calls: Sequence[Called], error: float, floor: float) -> Operation | None:
    """The same operation with another number, axis or flag; None where they are the same."""
    had, got = ours.scalars, theirs.scalars
    off = [name for name in {**had, **got} if not _same_value(had.get(name), got.get(name))]
    if "size" in off and [t.shape for t in ours.inputs] != [t.shape for t in theirs.inputs]:
        off.remove("size")
    if not off:
        return None
    name, role = off[0], role_of(ours, calls)
    if ours.name == "attention":
        role = "softmax scale" if name == "scale" else "mask" if name == "is_causal" else role
    one, two = _number(got.get(name)), _number(had.get(name))
    if ours.name in _VERBS and name == "other":
        because = f"it {_VERBS[ours.name]} {one} where the reference {_VERBS[ours.name]} {two}"
    elif role == "transposition":
        because = f"it exchanges axes {_axes(got)} where the reference exchanges {_axes(had)}"
    elif ours.name == "pow" and name == "self":
        because = f"it has powers of {one} where the reference has powers of {two}"
    else:
        because = f"its {ours.name} has {name} {one} where the reference has {two}"
    return Operation(theirs.name, role, _with_role(because, role), error, floor, theirs.index)


def tell_exchanged(ours: Called, theirs: Called, calls: Sequence[Called]) -> Operation:
    """One operation stands in the place of another."""
    role = role_of(ours, calls)
    because = f"it has {_called(theirs)} where the reference has {_called(ours)}"
    return Operation(theirs.name, role, _with_role(because, role), None, None, theirs.index)


def tell_gone(call: Called, calls: Sequence[Called]) -> Operation:
    """An operation that only the reference has."""
    role = role_of(call, calls)
    because = _with_role(f"it lacks the reference's {_called(call)}", role)
    if role == "residual":
        because = "it lacks the reference's add: its input is not added, a missing residual"
    return Operation(call.name, role, because, None, None, call.index)


def tell_extra(call: Called, calls: Sequence[Called]) -> Operation:
    """An operation that only the candidate has."""
    role = role_of(call, calls)
    because = _with_role(f"it has {_called(call)} that the reference has not", role)
    return Operation(call.name, role, because, None, None, call.index)


def tell_result(ours: Called, theirs: Called, calls: Sequence[Called], error: float, floor: float) -> Operation:
    """The same operation with the same numbers and another result."""
    role = role_of(ours, calls)
    inputs = [apart((b,), (a,)) for a, b in zip(ours.inputs, theirs.inputs, strict=False)]
    worst = max(inputs, default=0.0)
    masks = [moved for a, b in zip(ours.inputs, theirs.inputs, strict=False) if (moved := _mask_moved(a, b))]
    turned = _transposed(ours.outputs[0], theirs.outputs[0], 3 * floor)
    if masks:
        role, because = "mask", masks[0]
    elif ours.shape != theirs.shape:
        role, because = (
            "transposition",
            f"its {ours.name} gives {theirs.shape} where the reference's gives {ours.shape}",
        )
    elif turned:
        role, because = "transposition", f"the result of its {ours.name} has axes {turned} exchanged"
    elif worst > 3 * floor:
        because = f"operand {inputs.index(worst)} of its {ours.name} is another tensor than the reference's"
    else:
        because = f"its {ours.name} gives another result on the same inputs: off by {error:.3g}"
    return Operation(theirs.name, role, _with_role(because, role), error, floor, theirs.index)


def _mask_moved(one: torch.Tensor, two: torch.Tensor) -> str:
    """Say by how much two masks are off each other; nothing where they are no masks, or the same."""
    ours, theirs = blocked(one), blocked(two)
    if ours is None or theirs is None or ours.shape != theirs.shape or torch.equal(ours, theirs):
        return ""
    off = f"{int((ours != theirs).sum()):,} of {ours.numel():,} places differ"
    for axis in (ours.ndim - 1, ours.ndim - 2):
        for step in (1, -1):
            early, late = (slice(None, -1), slice(1, None))[::step]
            if torch.equal(ours.movedim(axis, 0)[early], theirs.movedim(axis, 0)[late]):
                return f"its mask is off by one along axis {axis}: {off}"
    return f"its mask is another one: {off}"


def _transposed(one: torch.Tensor, two: torch.Tensor, allowed: float) -> str:
    for a in range(one.ndim):
        for b in range(a + 1, one.ndim):
            if one.shape[a] == one.shape[b] > 1 and apart((two,), (one.transpose(a, b),)) <= allowed:
                return f"{a} and {b}"
    return ""


def _with_role(because: str, role: str) -> str:
    return because if role in _SPEAK_FOR_THEMSELVES or role in because else f"{because}: the {role}"


def _called(call: Called) -> str:
    if call.name == "to":
        return f"a cast to {str(call.scalars.get('dtype')).removeprefix('torch.')}"
    other = call.scalars.get("other")
    return f"{call.name} by {_number(other)}" if call.name in ("mul", "div") and other is not None else call.name


def _number(value: object) -> str:
    return "its default" if value is None else f"{value:.4g}" if isinstance(value, float) else str(value)


def _axes(scalars: Mapping[str, object]) -> str:
    values = list(scalars.values())
    return str(values[0] if len(values) == 1 else tuple(values))


def _same_value(one: object, two: object) -> bool:
    """Whether two arguments say the same; two dtypes do where one is not given, two masks' values always."""
    if isinstance(one, torch.dtype) or isinstance(two, torch.dtype):
        return one == two or None in (one, two)
    if isinstance(one, float | int) and isinstance(two, float | int):
        return math.isclose(one, two, rel_tol=1e-6) or max(one, two) <= BLOCKED
    return one == two
