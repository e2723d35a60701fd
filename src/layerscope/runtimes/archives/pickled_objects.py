"""A pickle's instructions followed without running it, for listing what is in a file that is a program.

A pickle is a program; `pickletools` lists its instructions, and here nobody calls what they name: what a call would
give is for the subclass to say, and a name stays a name.
"""

from __future__ import annotations

import io
import pickletools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class Named:
    """A class or a function that a pickle names, and nobody looks up."""

    name: str


_MARK = object()


class PickleFollower:
    """Follows one pickle's instructions, and calls nothing that it names.

    A subclass says what an object, its state and a persistent id stand for.
    """

    def __init__(self, stream: io.BytesIO) -> None:
        self._stream = stream
        self._stack: list[Any] = []
        self._memo: dict[int, Any] = {}

    def run(self) -> Any:
        """Return what the pickle stands for; raises an error of whatever kind where it is none."""
        for code, value, _ in pickletools.genops(self._stream):
            if code.name == "STOP":
                return self._stack.pop()
            self._step(code.name, value)
        raise EOFError("it has no end")

    def _step(self, name: str, value: Any) -> None:
        stack = self._stack
        if name in ("PROTO", "FRAME"):
            return
        if name in _PUSHED:
            stack.append(value)
        elif name in _FRESH:
            stack.append(_FRESH[name]())
        elif name in _TUPLES:
            count = _TUPLES[name]
            stack[len(stack) - count :] = [tuple(stack[len(stack) - count :])]
        elif name in ("BINPUT", "LONG_BINPUT", "PUT", "MEMOIZE"):
            self._memo[len(self._memo) if name == "MEMOIZE" else int(value)] = stack[-1]
        elif name in ("BINGET", "LONG_BINGET", "GET"):
            stack.append(self._memo[int(value)])
        elif name == "MARK":
            stack.append(_MARK)
        elif name == "POP":
            stack.pop()
        elif name == "TUPLE":
            items = self._marked()
            stack.append(tuple(items))
        elif name in ("APPENDS", "SETITEMS", "ADDITEMS"):
            self._fill(self._marked())
        elif name == "APPEND":
            self._fill([stack.pop()])
        elif name == "SETITEM":
            item, key = stack.pop(), stack.pop()
            self._fill([key, item])
        elif name == "GLOBAL":
            stack.append(_named(*str(value).split(" ", 1)))
        elif name == "STACK_GLOBAL":
            word, module = stack.pop(), stack.pop()
            stack.append(_named(_text(module), _text(word)))
        elif name in ("REDUCE", "NEWOBJ"):
            arguments, function = stack.pop(), stack.pop()
            stack.append(self.made(function, arguments))
        elif name == "BUILD":
            state = stack.pop()
            self.built(stack[-1], state)
        elif name == "BINPERSID":
            stack.append(self.stored(stack.pop()))
        else:
            raise ValueError(f"a pickle instruction {name} that no tensor needs")

    def _marked(self) -> list[Any]:
        at = len(self._stack) - 1
        while self._stack[at] is not _MARK:
            at -= 1
            if at < 0:
                raise ValueError("a pickle that closes what it did not open")
        items = self._stack[at + 1 :]
        del self._stack[at:]
        return items

    def _fill(self, items: list[Any]) -> None:
        target = self._stack[-1]
        if isinstance(target, list):
            target.extend(items)
        elif isinstance(target, dict):
            target.update(zip(map(_key, items[::2]), items[1::2], strict=True))
        elif isinstance(target, set):
            target.update(map(_key, items))
        elif not isinstance(target, Named):
            raise TypeError(f"{type(target).__name__} takes no items")

    def built(self, target: Any, state: Any) -> None:
        """Pass over the state of what is only a name."""

    def stored(self, identity: Any) -> Any:
        """Return what a persistent id stands for."""
        return identity

    def made(self, function: Any, arguments: Any) -> Any:
        """Return what a call would give, of the few calls that are known; what others would give stays their name."""
        name = function.name if isinstance(function, Named) else ""
        if name == "torch._utils._rebuild_parameter":
            return arguments[0]
        if name == "collections.OrderedDict":
            return {_key(key): item for pairs in arguments for key, item in pairs}
        if name in ("builtins.set", "__builtin__.set"):
            return {_key(item) for items in arguments for item in items}
        if name == "_codecs.encode":
            return arguments[0].encode("latin-1")  # how the older protocols write bytes
        if name == "torch.Size":
            return tuple(arguments[0])
        if name == "torch.device":
            return ":".join(str(_key(part)) for part in arguments)
        return function


def _named(module: str, word: str) -> Named:
    return Named(f"{module}.{word}")


def _text(value: Any) -> str:
    if not isinstance(value, str):
        raise TypeError(f"a name that is {type(value).__name__}")
    return value


def _key(value: Any) -> Any:
    """Refuse what is long to hash or to print: tuples within tuples may double at each level."""
    parts = value if isinstance(value, tuple) else (value,)
    if not all(part is None or isinstance(part, (str, int, float, bytes, Named)) for part in parts):
        raise TypeError("a key that is neither text nor number")
    return value


_PUSHED = {
    *("INT", "BININT", "BININT1", "BININT2", "LONG", "LONG1", "LONG4", "FLOAT", "BINFLOAT"),
    *("STRING", "BINSTRING", "SHORT_BINSTRING", "UNICODE", "BINUNICODE", "SHORT_BINUNICODE", "BINUNICODE8"),
    *("BINBYTES", "SHORT_BINBYTES", "BINBYTES8", "BYTEARRAY8"),
}
_FRESH: dict[str, Callable[[], Any]] = {
    "NONE": lambda: None,
    "NEWTRUE": lambda: True,
    "NEWFALSE": lambda: False,
    "EMPTY_LIST": list,
    "EMPTY_DICT": dict,
    "EMPTY_TUPLE": tuple,
    "EMPTY_SET": set,
}
_TUPLES = {"TUPLE1": 1, "TUPLE2": 2, "TUPLE3": 3}
