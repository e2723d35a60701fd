"""One point of a run over its steps, epochs or batches: a line for each statistic."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from itertools import pairwise
from statistics import median
from typing import TYPE_CHECKING, Literal, NamedTuple

from layerscope.errors import Ambiguous, LayerscopeError, NoSuchPoint
from layerscope.pages.completeness import completeness_parts, damage_of
from layerscope.pages.selection import Given, spans
from layerscope.pages.statistics import LOG_FROM, summary_of
from layerscope.points import Moment, Point
from layerscope.progress import Progress
from layerscope.report.parts import Column, Document, Part, Profile, Sentence, Table, Value
from layerscope.report.writing import many, number

if TYPE_CHECKING:
    from layerscope.stats import Summary
    from layerscope.store import Damage, Run

Axis = Literal["step", "epoch", "batch"]
AXES: dict[str, Axis] = {"steps": "step", "epochs": "epoch", "batches": "batch"}
POINTS = 60  # of a line; more do not fit on a page
OUTSTANDING = 10  # times the median

_LINES = ("mean", "std", "min", "max", "absmax", "l2")
_DATA = (
    *("tensors", "count", "finite", "nan", "posinf", "neginf", "zeros", "mean", "std", "min", "max", "absmax"),
    *("l1", "l2", "rms", "p1", "p5", "p50", "p95", "p99"),
)


class AxisPlace(NamedTuple):
    """One place on the axis, with the statistics of everything there added up."""

    number: int
    moment: Moment  # of the first record there
    summary: Summary


def document(
    run: Run, name: str, *, over: str, point: str, given: Given, progress: Progress
) -> tuple[Document, list[Damage]]:
    """Build the page of one point over an axis, and return with it what cannot be read."""
    axis = AXES[over]
    one = _point(run, point)
    places, unread = _places(run, one, axis, given, progress)
    damaged = damage_of(run)
    known = {(d.point, d.moment) for d in damaged}
    damaged += [d for d in unread if (d.point, d.moment) not in known]
    parts: list[Part] = [*completeness_parts(run, name, damaged=damaged), *_said(run, one, places, axis, over)]
    parts += _lines(places, axis) if len(places) > 1 else []
    return Document(name, (*parts, _table(places, axis))), damaged


def _point(run: Run, text: str) -> Point:
    from layerscope.store import selected

    found = selected(run, [text])
    if len(found) > 1:
        more = f" and {len(found) - 5} more" if len(found) > 5 else ""
        raise Ambiguous(f"--point {text} names {len(found)} points, and lines are of one: {_listed(found[:5])}{more}.")
    return found[0]


def _places(
    run: Run, point: Point, axis: Axis, given: Given, progress: Progress
) -> tuple[list[AxisPlace], list[Damage]]:
    from layerscope.store import Damage

    found: dict[int, tuple[Moment, Summary]] = {}
    unread: list[Damage] = []
    entries = list(run.records(point, **given))
    for done, entry in enumerate(entries):
        progress(str(entry.moment), done, len(entries))
        at = getattr(entry.moment, axis)
        if at is None:
            raise NoSuchPoint(f"no epoch was named while {point} was recorded; --over steps shows it.")
        try:
            summary = summary_of(run, entry)
        except LayerscopeError as error:  # one bad record does not hide the others
            unread.append(Damage(run.address, str(error), str(entry.point), str(entry.moment)))
            continue
        before = found.get(at)
        found[at] = (entry.moment, summary) if before is None else (before[0], before[1] + summary)
    if not entries:
        asked = " ".join(f"--{k} {v}" for k, v in given.items() if v is not None)
        moments = spans(m.step for m in run.moments)
        raise NoSuchPoint(f"{point} has no record at {asked or 'any moment'}; the run has step {moments}.")
    return [AxisPlace(at, *found[at]) for at in sorted(found)], unread


def _said(run: Run, point: Point, places: Sequence[AxisPlace], axis: Axis, over: str) -> Iterator[Part]:
    numbers = [place.number for place in places]
    yield Sentence(f"{point} over {many(len(places), axis).replace('batchs', 'batches')}: {spans(numbers)}", "quiet")
    if len(places) == 1:
        yield Sentence(
            f"there is one {axis} only, and no line to draw; --json has its numbers, `layerscope show` a table", "warn"
        )
    broken = [place for place in places if place.summary.finite < place.summary.count]
    if broken:
        s = broken[0].summary
        others = f"; in {len(broken):,} of {len(places):,} {over} altogether" if len(broken) > 1 else ""
        yield Sentence(
            f"not finite: first at {axis} {broken[0].number}, {s.count - s.finite:,} of {s.count:,} values{others}",
            "bad",
        )
    yield from _standing_out([p for p in places if math.isfinite(p.summary.absmax)], axis)


def _standing_out(places: Sequence[AxisPlace], axis: Axis) -> Iterator[Part]:
    """Name the place where values leave their usual size, and the one where they are largest."""
    usual = median([p.summary.absmax for p in places]) if places else 0.0
    far = [p for p in places if p.summary.absmax > OUTSTANDING * usual > 0]
    if far:
        first, most = far[0], max(far, key=lambda p: p.summary.absmax)
        text = f"absmax leaves its median of {number(usual)} at {axis} {first.number} ({number(first.summary.absmax)})"
        text += f"; largest at {axis} {most.number} ({number(most.summary.absmax)})" if most is not first else ""
        yield Sentence(text, "warn")


def _lines(places: Sequence[AxisPlace], axis: Axis) -> Iterator[Profile]:
    lines = {word: [float(getattr(place.summary, word)) for place in places] for word in _LINES}
    zeros = [p.summary.zeros / p.summary.count if p.summary.count else math.nan for p in places]
    lines |= {"zeros": zeros} if any(zeros) else {}
    odd = [float(p.summary.count - p.summary.finite) for p in places]
    lines |= {"nan/inf": odd} if any(odd) else {}
    for word, values in lines.items():
        log = _is_wide(values)
        kept = _outstanding(values)
        yield Profile(
            word,
            f"{word}, log" if log else word,
            tuple(f"{axis} {places[at].number}" for at in kept),
            tuple(values[at] for at in kept),
            log=log,
            audience="page",
        )


def _is_wide(values: Iterable[float]) -> bool:
    """Whether only a logarithmic scale shows more than the largest."""
    there = [v for v in values if math.isfinite(v)]
    return bool(there) and min(there) > 0 and max(there) > LOG_FROM * min(there)


def _outstanding(values: Sequence[float]) -> list[int]:
    """Return which values to draw: the first, the last, and in each stretch between the one furthest from the usual.

    A spike of one step among thousands is what one looks for; an average would hide it.
    """
    if len(values) <= POINTS:
        return list(range(len(values)))
    usual = median([v for v in values if math.isfinite(v)] or [0.0])

    def how_far(at: int) -> float:
        return abs(values[at] - usual) if math.isfinite(values[at]) else math.inf

    last = len(values) - 1
    edges = [1 + i * (last - 1) // (POINTS - 2) for i in range(POINTS - 1)]
    return [0, *(max(range(a, b), key=how_far) for a, b in pairwise(edges)), last]


def _table(places: Sequence[AxisPlace], axis: Axis) -> Table:
    columns = [Column(key, key, audience="data") for key in ("epoch", "step", "batch", *_DATA)]
    return Table.of("over", columns, (_cells(place, axis) for place in places), audience="data")


def _cells(place: AxisPlace, axis: Axis) -> Iterator[Value]:
    moment, row = place.moment, place.summary.row()
    yield moment.epoch
    yield moment.step if axis == "step" else None
    yield moment.batch if axis != "epoch" else None
    yield from (row[key] for key in _DATA)  # type: ignore[misc]


def _listed(points: Iterable[Point]) -> str:
    return ", ".join(map(str, points))
