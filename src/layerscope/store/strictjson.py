r"""JSON that any parser reads: non-finite numbers are named strings, and read back as themselves.

    dumps({"loss": float("nan")})       # '{"loss":"NaN"}'
    loads('{"loss":"NaN"}')             # {'loss': nan}

A text that happens to be such a name is written with a backslash before it, and read back without.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping, Sequence
from numbers import Integral, Real
from typing import Any, TypeAlias

JSON: TypeAlias = "bool | int | float | str | Sequence[JSON] | Mapping[str, JSON] | None"

_NAMED = {"NaN": math.nan, "Infinity": math.inf, "-Infinity": -math.inf}
_ESCAPED = re.compile(r"\\*(NaN|-?Infinity)")


def dumps(value: JSON, *, indent: int | None = None) -> str:
    """Write a value; raises TypeError for what JSON has no word for, and for keys that are not text."""
    separators = (",", ":") if indent is None else None
    return json.dumps(encoded(value), allow_nan=False, indent=indent, separators=separators)


def loads(text: str | bytes | bytearray) -> Any:
    """Read what `dumps` wrote; raises ValueError for a bare NaN or Infinity, as JSON has none."""
    return decoded(json.loads(text, parse_constant=_refuse))


def encoded(value: JSON) -> Any:
    """Replace non-finite numbers by their names, so that the plain `json` module can write the value."""
    if value is None or isinstance(value, bool):
        return value
    if isinstance(value, Integral):  # numpy's numbers too
        return int(value)
    if isinstance(value, Real):
        number = float(value)
        if math.isfinite(number):
            return number
        return "NaN" if math.isnan(number) else "Infinity" if number > 0 else "-Infinity"
    if isinstance(value, str):
        return "\\" + value if _ESCAPED.fullmatch(value) else value
    if isinstance(value, Mapping):
        for key in value:
            if not isinstance(key, str):
                raise TypeError(f"a JSON object's keys are text; {key!r} is {type(key).__name__}")
        return {key: encoded(item) for key, item in value.items()}
    if isinstance(value, Sequence) and not isinstance(value, (bytes, bytearray)):
        return [encoded(item) for item in value]
    raise TypeError(f"{value!r} is {type(value).__name__}, which JSON has no word for")


def decoded(value: Any) -> Any:
    """Undo `encoded`."""
    if isinstance(value, str):
        if value in _NAMED:
            return _NAMED[value]
        return value[1:] if _ESCAPED.fullmatch(value) else value
    if isinstance(value, dict):
        return {key: decoded(item) for key, item in value.items()}
    if isinstance(value, list):
        return [decoded(item) for item in value]
    return value


def _refuse(name: str) -> Any:
    raise ValueError(f"{name} is not JSON")
