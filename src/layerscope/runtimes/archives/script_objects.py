"""The objects of a TorchScript file, from its pickle, which is followed and not run.

    root = script_objects(archive.read("data.pkl", most=1 << 20))
    root.kind, root.attributes          # "__torch__.Model", {"layers": ScriptObject(...)}

A pickle is a program; `pickletools` lists its instructions, and nothing is called that they name. Those known here are
the ones that torch writes: tensors become how large they are, objects their attributes, all other calls a name.
"""

from __future__ import annotations

import io
import pickletools
from dataclasses import dataclass, field
from math import prod
from typing import Any


@dataclass(slots=True, eq=False)
class ScriptObject:
    """An object: its class, and its attributes where those are what was pickled of it; else it is opaque."""

    kind: str
    attributes: dict[str, Any] = field(default_factory=dict)
    opaque: bool = False


@dataclass(frozen=True, slots=True)
class ScriptTensor:
    """A tensor: where its bytes are told from those of others, and how many elements it has."""

    identity: tuple[object, int]
    count: int


def script_objects(content: bytes) -> Any:
    """Return what the pickle stands for; raises an error of whatever kind where it is none that torch writes."""
    stack: list[Any] = []
    memo: dict[Any, Any] = {}
    for code, value, _ in pickletools.genops(io.BytesIO(content)):
        name = code.name
        if name == "STOP":
            return stack.pop()
        if name in _PUSHED:
            stack.append(value)
        elif name in _FRESH:
            stack.append(_FRESH[name]())
        elif name in _TUPLES:
            stack.append(_popped(stack, _TUPLES[name]))
        elif name in ("BINPUT", "LONG_BINPUT"):
            memo[value] = stack[-1]
        elif name in ("BINGET", "LONG_BINGET"):
            stack.append(memo[value])
        elif name == "TUPLE":
            stack.append(_above_mark(stack))
        elif name == "APPENDS":
            items = _above_mark(stack)
            stack[-1].extend(items)
        elif name == "SETITEMS":
            items = _above_mark(stack)
            # Tuples within tuples take long to hash: they may double at each level.
            pairs = zip(items[::2], items[1::2], strict=True)
            stack[-1].update({key: item for key, item in pairs if isinstance(key, (str, int, float))})
        elif name == "GLOBAL":
            stack.append(".".join(str(value).split(" ", 1)))
        elif name in ("REDUCE", "NEWOBJ"):
            function, arguments = _popped(stack, 2)
            stack.append(_made(function, arguments))
        elif name == "BUILD":
            state = stack.pop()
            _build(stack[-1], state)
        elif name == "BINPERSID":
            _, _, key, *_ = stack.pop()
            stack.append(key)
        elif name not in ("PROTO", "FRAME"):
            raise ValueError(f"a pickle instruction {name} that torch does not write")
    raise EOFError("it has no end")


def _popped(stack: list[Any], count: int) -> tuple[Any, ...]:
    items = tuple(stack[len(stack) - count :])
    del stack[len(stack) - count :]
    return items


def _above_mark(stack: list[Any]) -> tuple[Any, ...]:
    at = len(stack) - 1
    while stack[at] is not _MARK:
        at -= 1
        if at < 0:
            raise ValueError("a pickle that closes what it did not open")
    _, *items = _popped(stack, len(stack) - at)
    return tuple(items)


def _made(function: Any, arguments: Any) -> Any:
    """Return what a call would give, where that is of interest; else the name of what is called."""
    if not isinstance(function, str):
        raise TypeError("a call of what is no name")
    if function.startswith("__torch__."):
        return ScriptObject(function)
    if function == "torch._utils._rebuild_parameter":
        return arguments[0]
    if function.startswith("torch._utils._rebuild_") and function.endswith(("tensor", "tensor_v2", "tensor_v3")):
        key, offset, shape, *_ = arguments
        if not all(type(n) is int and 0 <= n < 1 << 63 for n in (offset, *shape)):
            raise ValueError("a tensor whose shape is none")
        return ScriptTensor((key, offset), prod(shape))
    return function


def _build(target: Any, state: Any) -> None:
    """Give an object its attributes; anything else is for a `__setstate__` to make sense of."""
    if isinstance(target, ScriptObject):
        if isinstance(state, dict) and all(isinstance(key, str) for key in state):
            target.attributes = state
        else:
            target.opaque = True


_MARK = object()
_PUSHED = {
    *("BININT", "BININT1", "BININT2", "LONG1", "LONG4", "BINFLOAT"),
    *("BINSTRING", "SHORT_BINSTRING", "BINUNICODE", "BINUNICODE8"),
}
_FRESH: dict[str, Any] = {
    "NONE": lambda: None,
    "NEWTRUE": lambda: True,
    "NEWFALSE": lambda: False,
    "MARK": lambda: _MARK,
    "EMPTY_LIST": list,
    "EMPTY_DICT": dict,
    "EMPTY_TUPLE": tuple,
}
_TUPLES = {"TUPLE1": 1, "TUPLE2": 2, "TUPLE3": 3}
