"""Ratios on a machine whose speed changes while one looks: every lap stands between two laps of the plain run.

    ratios, plain = paired(step, {"recorded": recorded}, rounds=21)
    print(table("prefill", ratios, plain=plain, limits={"recorded": 1.02}))

A lap returns its seconds per step. A ratio is that of one lap to the mean of its two neighbours, so that what changes
slower than a lap is in all three; the median is taken over rounds. Where a step is all Python, plain and other steps
can take turns within a lap (`alternating`), and what changes slower than a step is in both.
"""

from __future__ import annotations

import gc
import math
import statistics
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

__all__ = ["Lap", "alternating", "in_turn", "judged", "paired", "table"]

Lap = Callable[[], float]


def paired(plain: Lap, variants: Mapping[str, Lap], *, rounds: int) -> tuple[dict[str, list[float]], list[float]]:
    """Return the ratios of every variant, one per round, and all laps of the plain run.

    Garbage is collected between laps, never in one.
    """
    ratios: dict[str, list[float]] = {name: [] for name in variants}
    laps: list[float] = []
    for name in in_turn(variants, rounds):
        before, lap, after = plain(), variants[name](), plain()
        ratios[name].append(lap / ((before + after) / 2))
        laps += [before, after]
    return ratios, laps


def in_turn(variants: Iterable[str], rounds: int) -> Iterator[str]:
    """Name the variants, every other round backwards; while one is used, no garbage is collected."""
    names = list(variants)
    for turn in range(rounds):
        for name in names[:: -1 if turn % 2 else 1]:
            gc.collect()
            gc.disable()
            try:
                yield name
            finally:
                gc.enable()


def alternating(plain: Callable[[], object], other: Callable[[], object], *, turns: int) -> float:
    """Return the ratio of steps that take turns with plain ones, back to back.

    Two plain ones follow each. What it leaves to a thread or to the device falls into the first of them, and is counted
    as its own; the second says what a step takes. The mean is taken: what is paid in one step of ten is paid. A turn is
    over when it returns: this is for steps that the host takes longer to ask for than the device to do.
    """
    seconds: list[float] = []
    began = time.perf_counter()
    for turn in range(3 * turns + 1):
        (other if turn % 3 == 1 else plain)()
        now = time.perf_counter()
        seconds.append(now - began)
        began = now
    other_one, next_one, usual = (statistics.fmean(seconds[at::3]) for at in (1, 2, 0))
    return (other_one + next_one) / usual - 1


def judged(value: float, limit: float | None, *, least: bool = False) -> str:
    """Write a limit and how a value stands to it as two cells of a table; `least` is for what is to be reached."""
    if limit is None:
        return " | "
    if least:
        return f"{limit:g} | {'ok' if value >= limit else 'under'}"
    return f"{limit:g} | {'ok' if value <= limit else 'over'}"


def table(
    title: str, ratios: Mapping[str, Sequence[float]], *, plain: Sequence[float], limits: Mapping[str, float]
) -> str:
    """Write ratios as Markdown: median, its standard error, quartiles, and the limit where there is one."""
    lines = [
        f"### {title}: plain step {statistics.median(plain) * 1e3:.2f} ms, the fastest lap {min(plain) * 1e3:.2f} ms",
        "",
        "| variant | ratio | error | quartiles | limit | |",
        "|---|---:|---:|---:|---:|---|",
    ]
    for name, found in ratios.items():
        middle = statistics.median(found)
        error = 1.25 * statistics.stdev(found) / math.sqrt(len(found))
        low, _, high = statistics.quantiles(found, n=4, method="inclusive")
        lines.append(
            f"| {name} | {middle:.4f} | {error:.4f} | {low:.3f}-{high:.3f} | {judged(middle, limits.get(name))} |"
        )
    return "\n".join(lines) + "\n"
