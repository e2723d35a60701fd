"""The statistics of a run at one moment, as tables over depth."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import reduce
from operator import add
from typing import TYPE_CHECKING, NamedTuple

from layerscope.errors import LayerscopeError
from layerscope.pages.selection import by_depth, spans
from layerscope.points import SIDE_TITLES, Point, leaf_text
from layerscope.progress import Progress
from layerscope.report.parts import Cell, Column, Heading, Part, Sentence, Table, Tone, Value
from layerscope.report.writing import many

if TYPE_CHECKING:
    from layerscope.stats import Summary
    from layerscope.store import Damage, Entry, Run

TIMES = "\u00d7"
# What is drawn, over depth and over steps, and whether by powers of ten; None where it was not kept.
STATISTICS: dict[str, tuple[Callable[[Summary], float | None], bool]] = {
    "rms": (lambda s: s.rms, True),
    "absmax": (lambda s: s.absmax, True),
    "mean": (lambda s: s.mean, False),
    "std": (lambda s: s.std, True),
    "min": (lambda s: s.min, False),
    "p1": (lambda s: _percentile(s, 1), False),
    "p50": (lambda s: _percentile(s, 50), False),
    "p99": (lambda s: _percentile(s, 99), False),
    "max": (lambda s: s.max, False),
    "l1": (lambda s: s.l1, True),
    "l2": (lambda s: s.l2, True),
    "share of zeros": (lambda s: s.zeros / s.count if s.count else None, False),
    "not finite": (lambda s: float(s.count - s.finite), False),
}
MOSTLY_ZERO = ("share of zeros", "not finite")  # drawn where any is not
# Beyond this ratio between the largest and the smallest, a linear bar shows the largest alone.
LOG_FROM = 200


class PointRow(NamedTuple):
    """One line of the table: a point, one of its calls, and the statistics of all ranks together."""

    point: Point
    call: int
    entries: tuple[Entry, ...]
    summary: Summary


class PointRows(NamedTuple):
    """The lines of the tables in the order of depth, and the records that cannot be read."""

    rows: list[PointRow]
    damaged: list[Damage]


def rows_at(run: Run, points: Iterable[Point], entries: Iterable[Entry], progress: Progress) -> PointRows:
    """Gather the records of one step by point and call, the ranks' summaries added up."""
    from layerscope.store import Damage

    found: dict[tuple[Point, int], list[Entry]] = {}
    for entry in entries:
        found.setdefault((entry.point, entry.moment.call), []).append(entry)
    depth = {point: i for i, point in enumerate(by_depth(points))}
    ordered = sorted(found.items(), key=lambda item: (depth[item[0][0]], item[0][1]))
    answer = PointRows([], [])
    for i, ((point, call), several) in enumerate(ordered):
        progress(point.place, i, len(ordered))
        readable: list[tuple[Entry, Summary]] = []
        for entry in several:
            try:
                readable.append((entry, summary_of(run, entry)))
            except LayerscopeError as error:  # one bad record does not hide the others
                answer.damaged.append(Damage(run.address, str(error), str(entry.point), str(entry.moment)))
        if readable:
            summary = reduce(add, (s for _, s in readable))
            answer.rows.append(PointRow(point, call, tuple(e for e, _ in readable), summary))
    return answer


def summary_of(run: Run, entry: Entry) -> Summary:
    """Return the summary that was kept, or the one of the tensor that was."""
    when = entry.moment
    return entry.summary or run.summary(
        str(entry.point), epoch=when.epoch, step=when.step, batch=when.batch, call=when.call, rank=when.rank
    )


def _percentile(s: Summary, q: int) -> float | None:
    return s.percentile(q) if s.sketch is not None else None


def broken_parts(rows: Sequence[PointRow]) -> Iterator[Part]:
    """Say where values are not finite: the first by depth is where to look, the others may only pass it on."""
    broken = [row for row in rows if row.summary.finite < row.summary.count]
    if broken:
        first = broken[0]
        others = f"; in {many(len(broken), 'point')} altogether" if len(broken) > 1 else ""
        yield Sentence(f"not finite: first in {first.point}, {_not_finite(first.summary)}{others}", "bad")


def point_tables(rows: Sequence[PointRow]) -> Iterator[Part]:
    """Yield one table for each side: inputs, outputs and gradients live on different scales."""
    sides = [side for side in SIDE_TITLES if any(row.point.side == side for row in rows)]
    for side in sides:
        if len(sides) > 1:
            yield Heading(SIDE_TITLES[side])
        yield _table([row for row in rows if row.point.side == side])


def _table(rows: Sequence[PointRow]) -> Table:
    rms = [row.summary.rms for row in rows]
    positive = [v for v in rms if 0 < v < math.inf]
    log = bool(positive) and max(positive) > LOG_FROM * min(positive)
    sick = any(row.summary.finite < row.summary.count for row in rows)
    calls = any(row.call for row in rows)
    ranks = any(len(row.entries) > 1 for row in rows)
    columns = [
        Column("point", "point", "name"),
        Column("call", "call", "count", audience="all" if calls else "data"),
        Column("ranks", "ranks", audience="all" if ranks else "data"),
        Column("shape", "shape", rank=5),
        Column("dtype", "dtype", rank=7),
        Column("mean", "mean", "number", rank=4),
        Column("std", "std", "number", rank=3),
        Column("min", "min", "number", rank=2),
        Column("p1", "p1", "number", rank=9),
        Column("p50", "p50", "number", rank=8),
        Column("p99", "p99", "number", rank=9),
        Column("max", "max", "number", rank=2),
        Column("zeros_share", "zeros", "percent", rank=6),
        Column("not_finite", "nan/inf", rank=0 if sick else 10, audience="page"),
        Column("rms", "rms", "number", rank=1),
        Column("bar", "rms over depth" + (", log" if log else ""), "bar", audience="page", log=log),
        *(Column(key, key, audience="data") for key in _DATA),
    ]
    return Table.of("points", columns, (_cells(row) for row in rows))


# For machines: the rest of a summary, and where it was seen.
_DATA = (
    *("name", "side", "leaf", "epoch", "step", "batch"),
    *("tensors", "count", "finite", "nan", "posinf", "neginf", "zeros", "has_nan", "has_inf"),
    *("absmax", "l1", "l2", "p5", "p95", "first_10", "fingerprint", "placed"),
)


def _cells(row: PointRow) -> Iterator[Cell | Value]:
    point, s, moment = row.point, row.summary, row.entries[0].moment
    flat = s.row()
    tone: Tone = "bad" if s.finite < s.count else "plain"
    share = s.zeros / s.count if s.count else math.nan
    data = {
        **flat,
        "name": point.name,
        "side": point.side,
        "leaf": list(point.leaf),
        "epoch": moment.epoch,
        "step": moment.step,
        "batch": moment.batch,
    }
    yield name_cell(point, tone)
    yield row.call
    yield Cell([e.moment.rank for e in row.entries], text=spans(e.moment.rank for e in row.entries))
    yield Cell(None if s.shape is None else list(s.shape), text=shape_text(s.shape))
    yield Cell(s.dtype, "quiet")
    yield from (_number(flat.get(key)) for key in ("mean", "std", "min", "p1", "p50", "p99", "max"))
    yield Cell(share, "warn" if share > 0.99 else "plain")
    yield Cell(None, tone if tone == "bad" else "quiet", text=_not_finite(s))
    yield _number(s.rms)
    yield Cell(s.rms, "bad" if not math.isfinite(s.rms) else "plain")
    yield from (Cell(data.get(key)) for key in _DATA)  # type: ignore[arg-type]


def name_cell(point: Point, tone: Tone = "plain") -> Cell:
    """Return a point's cell: a page leaves the side to the heading."""
    return Cell(str(point), tone, text=point.place + leaf_text(point.leaf))


def _number(value: object) -> Cell:
    if not isinstance(value, int | float):
        return Cell(None)
    return Cell(value, "plain" if math.isfinite(value) else "bad")


def shape_text(shape: Sequence[int] | None) -> str:
    """Write a shape; tensors of several were added up where there is none."""
    return "mixed" if shape is None else TIMES.join(map(str, shape)) or "scalar"


def _not_finite(s: Summary) -> str:
    counts = (("nan", s.nan), ("inf", s.posinf), ("-inf", s.neginf))
    return " ".join(f"{n:,} {word}" for word, n in counts if n) or "0"
