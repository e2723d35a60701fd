"""Ratios on a machine whose speed changes while one looks: steps of two kinds take turns.

    laps = [taking_turns(recorded, plain, turns=4, of=6) for _ in range(20)]
    ratio_of_turns(laps, of=6)               # Ratio(value=1.021, error=0.002)

What changes slower than a few steps is in both kinds of them. Laps are of two kinds as well, one after the other: two
models that are alike are not equally fast, so each is the plain one in every other lap.
"""

from __future__ import annotations

import gc
import math
import statistics
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np

__all__ = [
    "HOST",
    "Clock",
    "Ratio",
    "Seconds",
    "in_turn",
    "judged",
    "plain_of",
    "ratio_of_turns",
    "table",
    "taking_turns",
]

Step = Callable[[], object]
Seconds = np.ndarray[Any, np.dtype[np.float64]]

_RESAMPLED = 200


class Ratio(NamedTuple):
    """A ratio, and its standard error."""

    value: float
    error: float


class Clock(NamedTuple):
    """Marks a moment; tells the seconds from an earlier mark to a later one, when all steps have been asked for."""

    mark: Callable[[], Any]
    between: Callable[[Any, Any], float]


HOST = Clock(lambda: time.perf_counter(), lambda earlier, later: later - earlier)


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


def taking_turns(other: Step, plain: Step, *, turns: int, of: int, clock: Clock = HOST) -> Seconds:
    """Return the seconds of steps, so many of a kind back to back: plain, other, plain, other, ... plain.

    By the host's clock a step is over when it returns: that is for steps that the host takes longer to ask for than the
    device to do.
    """
    marks = [clock.mark()]
    for step in [plain] * of + ([other] * of + [plain] * of) * turns:
        step()
        marks.append(clock.mark())
    return np.array([clock.between(*both) for both in pairwise(marks)])


def ratio_of_turns(laps: Sequence[Seconds], *, of: int) -> Ratio:
    """Return the ratio of steps that took turns with plain ones.

    The first of each turn is left out: it pays for the change. The others are set against the plain ones on both sides,
    the median of each is taken over the laps, and of those the mean: what is paid in the fifth step of every lap is
    paid, as is what a step leaves to a thread and the next one feels; what happens in one lap of many is the machine's.
    That is done for laps of each kind apart: a median of both is that of the one or of the other.
    """
    turns = _turns(np.log(np.array(laps)), of)
    kinds = [turns[0::2], turns[1::2]]
    random = np.random.default_rng(0)
    drawn = [[kind[random.integers(0, len(kind), len(kind))] for kind in kinds] for _ in range(_RESAMPLED)]
    return Ratio(_ratio(kinds), statistics.stdev(map(_ratio, drawn)))


def plain_of(laps: Sequence[Seconds], *, of: int) -> list[float]:
    """Return the seconds of all plain steps that count."""
    return _turns(np.array(laps), of)[:, 0::2].ravel().tolist()


def _turns(laps: Seconds, of: int) -> Seconds:
    """Cut laps into turns, without the first step of each."""
    return laps.reshape(len(laps), -1, of)[:, :, 1:]


def _ratio(kinds: Sequence[Seconds]) -> float:
    return math.sqrt(math.prod(map(_ratio_of_one_kind, kinds)))


def _ratio_of_one_kind(logarithms: Seconds) -> float:
    plain, others = logarithms[:, 0::2], logarithms[:, 1::2]
    usual = np.median(np.concatenate([plain[:, :-1], plain[:, 1:]], 2), 2, keepdims=True)
    return float(np.exp(np.median(others - usual, 0)).mean())


def judged(value: float, limit: float | None, *, least: bool = False) -> str:
    """Write a limit and how a value stands to it as two cells of a table; `least` is for what is to be reached."""
    if limit is None:
        return " | "
    if least:
        return f"{limit:g} | {'ok' if value >= limit else 'under'}"
    return f"{limit:g} | {'ok' if value <= limit else 'over'}"


def table(
    title: str, ratios: Mapping[str, Ratio], *, plain: Mapping[str, Sequence[float]], limits: Mapping[str, float]
) -> str:
    """Write ratios as Markdown, each with its standard error, the limit where there is one, and its own plain steps.

    These show what lasts longer than a turn, and so slows the plain steps beside it too.
    """
    lines = [f"### {title}", "", "| variant | ratio | error | limit | | plain, ms |", "|---|---:|---:|---:|---|---:|"]
    for name, (value, error) in ratios.items():
        beside = statistics.median(plain[name]) * 1e3
        lines.append(f"| {name} | {value:.4f} | {error:.4f} | {judged(value, limits.get(name))} | {beside:.2f} |")
    return "\n".join(lines) + "\n"
