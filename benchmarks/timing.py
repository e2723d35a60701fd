"""Time variants of one job against each other: interleaved, rotated, medians of per-round ratios.

    rows = interleave({"plain": plain, "recorded": recorded}, against="plain", rounds=15)

Wall time and CPU time (all threads of the process) are both taken. On a shared machine only ratios within one round
mean anything, so every ratio is formed inside its round first, and the median is taken over rounds.
"""

from __future__ import annotations

import gc
import os
import platform
import statistics
import time
from collections.abc import Callable, Mapping
from typing import NamedTuple

__all__ = ["Lap", "Row", "interleave", "machine", "stopwatch", "table"]


class Lap(NamedTuple):
    """What a variant returns that times itself, because not all it does should count."""

    wall: float
    cpu: float


def stopwatch() -> Callable[[], Lap]:
    """Start a watch; calling it tells the lap."""
    began, worked = time.perf_counter(), time.process_time()
    return lambda: Lap(time.perf_counter() - began, time.process_time() - worked)


class Row(NamedTuple):
    """One variant: median seconds, and median ratios to the reference with their range over rounds."""

    name: str
    wall: float
    cpu: float
    wall_ratio: float
    cpu_ratio: float
    low: float
    high: float


def interleave(
    variants: Mapping[str, Callable[[], object]], *, against: str, rounds: int = 15, warmup: int = 2
) -> list[Row]:
    """Run every variant once per round, starting with another one each round."""
    names = list(variants)
    wall: dict[str, list[float]] = {name: [] for name in names}
    cpu: dict[str, list[float]] = {name: [] for name in names}
    for turn in range(-warmup, rounds):
        shift = turn % len(names)
        for name in names[shift:] + names[:shift]:
            gc.collect()
            gc.disable()
            watch = stopwatch()
            kept = variants[name]()
            lap = kept if isinstance(kept, Lap) else watch()
            gc.enable()
            del kept
            if turn >= 0:
                wall[name].append(lap.wall)
                cpu[name].append(lap.cpu)
    rows = []
    for name in names:
        ratios = [mine / plain for mine, plain in zip(wall[name], wall[against], strict=True)]
        used_ratios = [mine / plain for mine, plain in zip(cpu[name], cpu[against], strict=True)]
        rows.append(
            Row(
                name,
                statistics.median(wall[name]),
                statistics.median(cpu[name]),
                statistics.median(ratios),
                statistics.median(used_ratios),
                min(ratios),
                max(ratios),
            )
        )
    return rows


def table(title: str, rows: list[Row]) -> str:
    """Write rows as Markdown."""
    lines = [
        f"### {title}",
        "",
        "| variant | wall ms | CPU ms | wall ratio (range) | CPU ratio |",
        "|---|---:|---:|---:|---:|",
    ]
    for row in rows:
        lines.append(
            f"| {row.name} | {row.wall * 1e3:.1f} | {row.cpu * 1e3:.1f} "
            f"| {row.wall_ratio:.3f} ({row.low:.2f}-{row.high:.2f}) | {row.cpu_ratio:.3f} |"
        )
    return "\n".join(lines) + "\n"


def machine() -> str:
    """Say where and under what load this runs."""
    load = ", ".join(f"{value:.1f}" for value in os.getloadavg())
    return f"{os.cpu_count()} cores, {platform.machine()}, Python {platform.python_version()}, load {load}"
