"""The statistics that dumps carry in JSON and `.pt` files: how they are written, and when they make a Summary again.

    described(summary)                  # {"shape": [1, 512, 768], "mean": ..., "std": ..., "first_10": [...], ...}
    summary_of(described(summary))      # a Summary; None when too little is there

Users' scripts read `shape mean std min max first_10 dtype has_nan has_inf`; the counts beside them are what a Summary
takes on top.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from layerscope.errors import Damaged
from layerscope.store import strictjson
from layerscope.store.address import Folder

if TYPE_CHECKING:
    from layerscope.stats import Summary

_LARGEST = 256 << 20
_COUNTS = ("count", "nan", "posinf", "neginf", "zeros")
_MOMENTS = ("mean", "std", "min", "max", "l1")


def described(summary: Summary, *, written: str | None = None, sample: bool = False) -> dict[str, Any]:
    """Write a summary for users' scripts; `written` is the dtype of the file where that is not the recorded one.

    `std` is the population's, as numpy gives it, or with `sample` the sample's, as `tensor.std()` does; `std_ddof` says
    which.
    """
    shape = [] if summary.shape is None else list(summary.shape)
    entry: dict[str, Any] = {"shape": shape, **{name: float(getattr(summary, name)) for name in _MOMENTS}}
    if sample:
        n = summary.finite
        entry["std"] = float(summary.std) * math.sqrt(n / (n - 1)) if n > 1 else math.nan
    entry["std_ddof"] = int(sample)
    entry["first_10"] = [float(value) for value in summary.first]
    entry["dtype"] = written or summary.dtype
    if written is not None and written != summary.dtype:
        entry["recorded_dtype"] = summary.dtype
    entry |= {"has_nan": bool(summary.has_nan), "has_inf": bool(summary.has_inf)}
    return entry | {name: int(getattr(summary, name)) for name in _COUNTS}


def summary_of(entry: object) -> Summary | None:
    """Read a summary back; None where only some of its numbers were written, as most scripts do."""
    if not isinstance(entry, Mapping) or not {*_COUNTS, *_MOMENTS, "shape", "first_10", "dtype"} <= entry.keys():
        return None
    from layerscope.stats import Summary

    dtype = str(entry.get("recorded_dtype", entry["dtype"])).removeprefix("torch.")
    try:
        counts = {name: int(entry[name]) for name in _COUNTS}
        moments = {name: float(entry[name]) for name in _MOMENTS}
        if entry.get("std_ddof") == 1:
            n = counts["count"] - counts["nan"] - counts["posinf"] - counts["neginf"]
            moments["std"] = moments["std"] * math.sqrt((n - 1) / n) if n > 1 else (0.0 if n else math.nan)
        first = tuple(float(value) for value in entry["first_10"])
        shape = tuple(int(n) for n in entry["shape"])
    except (TypeError, ValueError, OverflowError):
        return None
    if counts["count"] != math.prod(shape):
        return None
    return Summary(**counts, **moments, first=first, dtype=dtype, shape=shape)  # type: ignore[arg-type]


def object_in(files: Folder, name: str) -> dict[str, Any]:
    """Read a JSON object; scripts that write a bare NaN, as Python's `json` does, are understood."""
    place = f"{files.address}/{name}"
    if files.size(name) > _LARGEST:
        raise Damaged(f"{place} has {files.size(name)} bytes, more than any statistics file")
    try:
        value = strictjson.decoded(json.loads(files.read(name)))
    except (ValueError, RecursionError) as error:
        raise Damaged(f"{place} is not JSON ({error})") from error
    if not isinstance(value, dict):
        raise Damaged(f"{place} holds a JSON {type(value).__name__}, and an object is expected")
    return value
