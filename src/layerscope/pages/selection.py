"""Which moment of a run a page is about, and in which order its points are shown.

moment, entries = at(run, points, {"epoch": 2})
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING

from layerscope.errors import NoSuchPoint
from layerscope.points import Moment, Point

if TYPE_CHECKING:
    from layerscope.store import Entry, Run

Given = Mapping[str, int | None]  # epoch, step, batch, call, rank: as far as the caller said


def at(run: Run, points: Iterable[Point], given: Given) -> tuple[Moment, list[Entry]]:
    """Return the latest moment that fits what the caller said, and the records of the points there.

    The moment is that of the step: its records may be of several calls and ranks.
    """
    wanted = set(points)
    fitting = [m for m in run.moments if all(v is None or getattr(m, k) == v for k, v in given.items())]
    steps = sorted({Moment(m.epoch, m.step, m.batch) for m in fitting}, reverse=True)
    # A point may have a schedule of its own, so the latest step of the run need not be one of theirs.
    for step in steps:
        found = [
            entry
            for entry in run.records(
                epoch=step.epoch, step=step.step, batch=step.batch, call=given.get("call"), rank=given.get("rank")
            )
            if entry.point in wanted and entry.moment.epoch == step.epoch
        ]
        if found:
            return step, found
    asked = " ".join(f"--{k} {v}" for k, v in given.items() if v is not None)
    raise NoSuchPoint(
        f"nothing was recorded there at {asked or 'any moment'}; {_there_is(run)}."
        if run.moments
        else f"{run.address} holds no record yet."
    )


def by_depth(points: Iterable[Point]) -> list[Point]:
    """Order points as the model runs, whatever their side: gradients arrive from the last layer to the first."""
    points = list(points)
    forward = [p for p in points if not p.side.startswith("grad")]
    backward = [p for p in points if p.side.startswith("grad")]
    depth: dict[tuple[bool, str], int] = {}
    for point in (*forward, *reversed(backward)):
        depth.setdefault((point.op, point.name), len(depth))
    return sorted(points, key=lambda p: depth[p.op, p.name])


def spans(numbers: Iterable[int]) -> str:
    """Write whole numbers shortly.

    >>> spans([0, 1, 2, 3, 7, 100])
    '0-3, 7, 100'
    """
    runs: list[list[int]] = []
    for n in sorted(set(numbers)):
        if runs and n == runs[-1][-1] + 1:
            runs[-1][1:] = [n]
        else:
            runs.append([n])
    written = ["-".join(map(str, run)) for run in runs]
    return ", ".join(written if len(written) <= 8 else [*written[:4], "...", *written[-3:]])


def _there_is(run: Run) -> str:
    words = []
    for word in ("epoch", "step", "batch", "call", "rank"):
        numbers = {n for n in (getattr(m, word) for m in run.moments) if n is not None}
        if numbers and (word == "step" or numbers != {0}):
            words.append(f"{word} {spans(numbers)}")
    return "there is " + ", ".join(words)
