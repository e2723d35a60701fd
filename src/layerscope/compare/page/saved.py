"""A comparison read back from the JSON that `layerscope compare --save_comparison` writes.

comparison = loads(Path("comparison.json").read_bytes())
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from typing import Any

from layerscope.checks import ErrorNumbers
from layerscope.compare.measure.metrics import Metrics
from layerscope.compare.result import KINDS, Against, Comparison, Floor, Row, Verdict
from layerscope.errors import BadText, LayerscopeError
from layerscope.points import Moment, Point

_NAMED = {"NaN": math.nan, "Infinity": math.inf, "-Infinity": -math.inf}


def loads(text: str | bytes, *, name: str = "this") -> Comparison:
    """Read a saved comparison; raises BadText for anything else."""
    try:
        value = json.loads(text)
        reference = value["reference"]
        rows: dict[str, list[Row]] = {}
        for row in value["rows"]:
            rows.setdefault(row["candidate"], []).append(_row(row))
        return Comparison(
            reference["name"],
            reference["address"],
            reference["layout"],
            tuple(_against(one, rows.get(one["candidate"], [])) for one in value["candidates"]),
            tuple(value["noise"]),
        )
    except (KeyError, TypeError, ValueError, AttributeError, RecursionError, LayerscopeError) as error:
        raise BadText(f"{name} is no saved comparison ({error!r}); `compare --save_comparison` writes one.") from error


def _against(value: Mapping[str, Any], rows: list[Row]) -> Against:
    return Against(
        value["candidate"],
        value["address"],
        value["layout"],
        tuple(rows),
        Verdict(value["verdict"], value["because"]),
        value["basis"],
        tuple(value["notes"]),
        tuple(value["unread"]),
    )


def _row(value: Mapping[str, Any]) -> Row:
    floor, metrics, ratio = value["floor"], value["metrics"], value["ratio"]
    if value["kind"] not in KINDS:
        raise BadText(f"there is no kind {value['kind']!r}")
    return Row(
        point=Point.parse(value["point"]),
        moment=Moment(**value["moment"]),
        candidate=value["candidate"],
        kind=value["kind"],
        because=value["because"],
        counterpart=None if value["counterpart"] is None else Point.parse(value["counterpart"]),
        method=value["method"],
        metrics=None if metrics is None else Metrics.from_json(_numbers(metrics)),
        floor=None if floor is None else Floor(_number(floor["error"]), floor["source"]),
        ratio=None if ratio is None else _number(ratio),
        reference_has=value["reference_has"],
        excess=None if value["excess"] is None else _number(value["excess"]),
        evidence=value["evidence"],
        checked=None if value["checked"] is None else _number(value["checked"]),
        arithmetic=value["arithmetic"],
        chaotic=value["chaotic"],
        numbers=None if value["numbers"] is None else ErrorNumbers(**_numbers(value["numbers"])),
    )


def _number(value: float | str) -> float:
    return _NAMED[value] if isinstance(value, str) else value


def _numbers(value: Any) -> Any:
    """Put the numbers back that JSON has no word for; a dtype is the only text among metrics."""
    if isinstance(value, dict):
        return {key: one if key == "dtype" else _numbers(one) for key, one in value.items()}
    if isinstance(value, list):
        return [_numbers(one) for one in value]
    return _NAMED.get(value, value) if isinstance(value, str) else value
