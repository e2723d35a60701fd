"""Ratios on a machine whose speed changes while one looks: whatever is timed stands between plain runs of the same.

    ratios, plain = paired(step, {"recorded": recorded}, rounds=21)
    print(table("prefill", ratios, plain=plain, limits={"recorded": 1.02}))

A lap returns its seconds per step, and its ratio is that to the mean of the plain laps before and after it: what
changes slower than a lap is in all three. The median is taken over rounds. Where a step is all Python, steps take turns
within a lap (`taking_turns`), and what changes slower than a few of them is in all.
"""

from __future__ import annotations

import gc
import math
import statistics
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

__all__ = ["Lap", "Ratio", "Seconds", "in_turn", "judged", "paired", "ratio_of_turns", "table", "taking_turns"]

Lap = Callable[[], float]
Step = Callable[[], object]
Seconds = np.ndarray[Any, np.dtype[np.float64]]

_TURN = 6  # steps
_RESAMPLED = 200


class Ratio(NamedTuple):
    """A ratio, and its standard error."""

    value: float
    error: float


def paired(plain: Lap, variants: Mapping[str, Lap], *, rounds: int) -> tuple[dict[str, Ratio], list[float]]:
    """Return the ratio of every variant, and all laps of the plain run, of which one more is run.

    Garbage is collected between laps, never in one.
    """
    found: dict[str, list[float]] = {name: [] for name in variants}
    laps = [plain()]
    for name in in_turn(variants, rounds):
        lap = variants[name]()
        laps.append(plain())
        found[name].append(lap / statistics.fmean(laps[-2:]))
    return {name: _median(ratios) for name, ratios in found.items()}, laps


def _median(ratios: Sequence[float]) -> Ratio:
    return Ratio(statistics.median(ratios), 1.25 * statistics.stdev(ratios) / math.sqrt(len(ratios)))


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


def taking_turns(other: Step, plain: Step, *, turns: int) -> Seconds:
    """Return the seconds of steps that take turns, six of a kind back to back: plain, other, plain, other, ... plain.

    A step is over when it returns: this is for steps that the host takes longer to ask for than the device to do.
    """
    marks = [time.perf_counter()]
    for step in [plain] * _TURN + ([other] * _TURN + [plain] * _TURN) * turns:
        step()
        marks.append(time.perf_counter())
    return np.diff(marks)


def ratio_of_turns(laps: Sequence[Seconds]) -> Ratio:
    """Return the ratio of steps that took turns with plain ones.

    The first of each six is left out: it pays for the change. The others are set against the plain ones on both sides,
    the median of each is taken over the laps, and of those the mean: what is paid in the fifth step of every lap is
    paid, as is what a step leaves to a thread and the next one feels; what happens in one lap of many is the machine's.
    """
    logarithms = np.log(np.array(laps))
    drawn = np.random.default_rng(0).integers(0, len(laps), (_RESAMPLED, len(laps)))
    return Ratio(_of_turns(logarithms), statistics.stdev(_of_turns(logarithms[which]) for which in drawn))


def _of_turns(logarithms: Seconds) -> float:
    laps = len(logarithms)
    sixes = logarithms.reshape(laps, -1, _TURN)[:, :, 1:]
    plain, others = sixes[:, 0::2], sixes[:, 1::2]
    usual = np.median(np.concatenate([plain[:, :-1], plain[:, 1:]], 2), 2, keepdims=True)
    return float(np.exp(np.median(others - usual, 0)).mean())


def judged(value: float, limit: float | None, *, least: bool = False) -> str:
    """Write a limit and how a value stands to it as two cells of a table; `least` is for what is to be reached."""
    if limit is None:
        return " | "
    if least:
        return f"{limit:g} | {'ok' if value >= limit else 'under'}"
    return f"{limit:g} | {'ok' if value <= limit else 'over'}"


def table(title: str, ratios: Mapping[str, Ratio], *, plain: Sequence[float], limits: Mapping[str, float]) -> str:
    """Write ratios as Markdown, each with its standard error, and the limit where there is one."""
    lines = [
        f"### {title}: plain step {statistics.median(plain) * 1e3:.2f} ms, the fastest {min(plain) * 1e3:.2f} ms",
        "",
        "| variant | ratio | error | limit | |",
        "|---|---:|---:|---:|---|",
    ]
    for name, (value, error) in ratios.items():
        lines.append(f"| {name} | {value:.4f} | {error:.4f} | {judged(value, limits.get(name))} |")
    return "\n".join(lines) + "\n"
