"""Numbers of modules as node data that Google's Model Explorer lays over its graphs: a file for each overlay.

    write_overlays(comparison, "overlays")        # overlays/int8-relative_l2.json, ...

A node's key is the module's name. What is not finite is left out, because JSON has no word for it; how many are is
returned.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import NamedTuple

from layerscope.compare import Comparison
from layerscope.pages.statistics import STATISTICS
from layerscope.stats import Summary
from layerscope.store import Run

GRAPH = "main"  # the graph's id, as most of its adapters name the one they make
# Which measures, and which of several values of a module is the worst.
MEASURES: dict[str, Callable[[float, float], float]] = {
    "relative_l2": max,
    "max_abs": max,
    "mse": max,
    "cosine": min,
    "sqnr": min,
}
# Light for little, dark for much: single-hued, so that it reads without colour.
GRADIENT = [{"stop": 0, "bgColor": "#f2f6fb"}, {"stop": 1, "bgColor": "#08285a", "textColor": "#ffffff"}]


class Overlays(NamedTuple):
    """The files that were written, and how many numbers were left out because they are not finite."""

    files: tuple[Path, ...]
    left_out: int


def write_overlays(result: Comparison | Run, folder: Path) -> Overlays:
    """Write an overlay for each measure of each candidate, or for each statistic of a run's latest outputs."""
    folder.mkdir(parents=True, exist_ok=True)
    files: list[Path] = []
    left_out = 0
    for name, values in _overlays(result):
        finite = {key: value for key, value in values.items() if math.isfinite(value)}
        left_out += len(values) - len(finite)
        if not finite:
            continue
        file = folder / f"{_safe(name)}.json"
        while file in files:
            file = file.with_stem(f"{file.stem}-")
        data = {GRAPH: {"results": {key: {"value": value} for key, value in finite.items()}, "gradient": GRADIENT}}
        file.write_text(json.dumps(data, indent=1, allow_nan=False), encoding="ascii")
        files.append(file)
    return Overlays(tuple(files), left_out)


def _overlays(result: Comparison | Run) -> Iterator[tuple[str, Mapping[str, float]]]:
    if isinstance(result, Comparison):
        for against in result:
            rows = [row for row in against.compared if row.point.side == "output" and not row.point.op]
            for measure, worse in MEASURES.items():
                values = ((row.name, getattr(row.metrics, measure)) for row in rows)
                yield f"{against.candidate}-{measure}", _worst(values, worse)
            ratios = ((row.name, row.ratio) for row in rows if row.ratio is not None)
            yield f"{against.candidate}-ratio", _worst(ratios, max)
        return
    summaries: dict[str, Summary] = {}
    for entry in result.records():
        if entry.point.side == "output" and not entry.point.op:
            point, when = entry.point, entry.moment
            summaries[point.name] = entry.summary or result.summary(
                point, epoch=when.epoch, step=when.step, batch=when.batch, call=when.call, rank=when.rank
            )
    for statistic, (of, _) in STATISTICS.items():
        values = ((name, of(summary)) for name, summary in summaries.items())
        yield statistic.replace(" ", "_"), {name: value for name, value in values if value is not None}


def _worst(values: Iterator[tuple[str, float]], worse: Callable[[float, float], float]) -> dict[str, float]:
    """Return one number for each module: the worst, over its moments and leaves."""
    found: dict[str, float] = {}
    for name, value in values:
        found[name] = worse(found[name], value) if name in found else value
    return found


def _safe(name: str) -> str:
    """Return a file's name that a candidate's name cannot lead elsewhere."""
    return re.sub(r"[^\w.-]+", "_", name).strip(".")[:100] or "overlay"
