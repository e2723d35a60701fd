"""Put into words what differs between two operations, or that one of them is missing.

tell_numbers(ours, theirs, calls, error, floor).because      # "it multiplies by 0.3 where the reference ..."
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch

from layerscope.diagnose.operations.distances import apart, same_value
from layerscope.diagnose.operations.operation import Operation
from layerscope.diagnose.operations.roles import blocked, role_of
from layerscope.diagnose.operations.tracing import Called

_VERBS = {"mul": "multiplies by", "div": "divides by", "add": "adds", "sub": "subtracts"}
_SPEAK_FOR_THEMSELVES = ("operation", "transposition", "cast")


def tell_numbers(ours: Called, theirs: Called, calls: Sequence[Called], error: float, floor: float) -> Operation | None:
    """The same operation with another number, axis or flag; None where they are the same."""
    had, got = ours.scalars, theirs.scalars
    off = [name for name in {**had, **got} if not same_value(had.get(name), got.get(name))]
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
