"""Ratios on a machine whose speed changes while one looks: every lap stands between two laps of the plain run.

    ratios, plain = paired(step, {"recorded": recorded}, rounds=21)
    print(table("prefill", ratios, plain=plain, limits={"recorded": 1.02}))

A lap returns its seconds per step. A ratio is that of one lap to the mean of its two neighbours, so that what changes
slower than a lap is in all three; the median is taken over rounds. Where a step is all Python, plain and other steps
can take turns within a lap (`alternating`), and what changes slower than a few steps is in both.
"""

from __future__ import annotations

import gc
import math
import statistics
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

__all__ = ["Lap", "alternating", "in_turn", "judged", "paired", "table"]

Lap = Callable[[], float]

_TURN = 5  # steps


def paired(plain: Lap, variants: Mapping[str, Lap], *, rounds: int) -> tuple[dict[str, list[float]], list[float]]:
    """Return the ratios of every variant, one per round, and all laps of the plain run, of which one more is run.

    Garbage is collected between laps, never in one.
    """
    ratios: dict[str, list[float]] = {name: [] for name in variants}
    laps = [plain()]
    for name in in_turn(variants, rounds):
        lap = variants[name]()
        laps.append(plain())
        ratios[name].append(lap / statistics.fmean(laps[-2:]))
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
    """Return the ratio of steps that take turns with plain ones, five of them at a time, back to back.

    Five hold what is paid in one step of five. What they leave to a thread or to the device falls into the plain step
    after them, and is counted as theirs. The median is taken over turns. A step is over when it returns: this is for
    steps that the host takes longer to ask for than the device to do.
    """
    ratios = []
    before = _seconds(plain, _TURN)
    for _ in range(turns):
        others, next_one, after = _seconds(other, _TURN), _seconds(plain, 1), _seconds(plain, _TURN)
        usual = (before + after) / 2
        ratios.append((others + next_one) / usual - 1 / _TURN)
        before = after
    return statistics.median(ratios)


def _seconds(step: Callable[[], object], count: int) -> float:
    began = time.perf_counter()
    for _ in range(count):
        step()
    return time.perf_counter() - began


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
