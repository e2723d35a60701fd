"""The page of a run: how complete it is, its statistics over depth, its training, its channels, what made it.

    html.save(page(run, "runs/fp32"), "report.html")

It is made of the statistics that the run holds: tensors are read only where no statistics were kept, and not for long.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from itertools import pairwise
from typing import Any

from layerscope.compare.outlier_channels import Outliers, outliers
from layerscope.compare.page.closeups import curve
from layerscope.compare.page.provenance import provenance
from layerscope.errors import LayerscopeError
from layerscope.pages.adjacent import chains
from layerscope.pages.alarm_timeline import kept
from layerscope.pages.completeness import completeness_parts, damage_of, run_facts
from layerscope.pages.selection import Given, at, by_depth
from layerscope.pages.statistics import MOSTLY_ZERO, STATISTICS, PointRow, broken_parts, rows_at, shape_text
from layerscope.pages.training import alarm_parts, training
from layerscope.points import SIDE_TITLES, Point, caption, leaf_text
from layerscope.progress import Progress, no_progress
from layerscope.report.parts import (
    Cell,
    Column,
    Curves,
    Document,
    Fact,
    Facts,
    Fold,
    Heading,
    Histograms,
    Line,
    Part,
    Select,
    Sentence,
    Table,
    Value,
)
from layerscope.report.writing import many
from layerscope.store import Damage, Entry, Run, selected

DETAILED = 300  # points with a histogram; more would make a file that no mail takes
READ = 256 << 20  # bytes of tensors that are read for the statistics of a page, where none were kept
OCTAVES = 16
CHANNELED = 6  # points whose channels are drawn, those that cost a quantiser most
_FACTS = ("count", "mean", "std", "min", "p1", "p5", "p50", "p95", "p99", "max", "absmax", "rms", "l1", "l2", "zeros")


def page(
    run: Run,
    name: str,
    *,
    patterns: Sequence[str] = (),
    given: Given | None = None,
    extra: Sequence[Part] = (),
    alarms: Sequence[Mapping[str, Any]] | None = None,
    progress: Progress = no_progress,
) -> Document:
    """Build the page of a run, of the points that `patterns` name, at the latest moment that fits `given`.

    `extra` are parts that stand before what made the run; `alarms` are those beside it, where none are given.
    """
    parts: list[Part] = []
    unread: list[Damage] = []
    if run.points:
        points = selected(run, list(patterns))
        moment, entries = at(run, points, given or {})
        entries, said = _affordable(entries)
        rows, unread = rows_at(run, points, entries, progress)
        parts += broken_parts(rows)
        parts += training(run, points, progress)
        parts += [Heading(f"statistics at {moment}"), *said]
        parts += _pictures(rows)
        parts += _growth(rows)
        parts += _channels(run, rows)
        parts += _table(rows)
    known = {(d.point, d.moment) for d in damage_of(run)}
    damaged = damage_of(run) + [d for d in unread if (d.point, d.moment) not in known]
    told = alarm_parts(kept(run) if alarms is None else alarms, run.moments)
    opening = (*told, *completeness_parts(run, name, damaged=damaged), run_facts(run))
    return Document(name, (*opening, *parts, *extra, Heading("provenance"), provenance(run, name)))


def summary(run: Run) -> Document:
    """Build what a notebook shows: how complete the run is, and its tree of points."""
    columns = [Column("point", "point", "name"), Column("side", "side"), Column("shape", "shape")]
    shapes: dict[Point, Entry] = {}
    points = by_depth(run.points)
    moments = run.moments
    if moments:
        first = moments[0]
        for entry in run.records(epoch=first.epoch, step=first.step, batch=first.batch):
            shapes.setdefault(entry.point, entry)
    lines: list[tuple[Cell | Value, ...]] = []
    seen: set[str] = set()
    for point in points:
        above = point.name.split(".")
        for n in range(1, len(above)):
            name = ".".join(above[:n])
            if name not in seen and not any(other.name == name for other in points):
                lines.append((Cell(name, "quiet", text=above[n - 1], depth=n - 1), "", ""))
            seen.add(name)
        seen.add(point.name)
        one = shapes.get(point)
        shape = shape_text(one.shape) if one is not None and one.shape is not None else None
        text = (point.place.rpartition(".")[2] or "the model") + leaf_text(point.leaf)
        lines.append((Cell(str(point), text=text, depth=len(above) - 1), point.side, shape))
    parts = (*completeness_parts(run, run.address), run_facts(run), Table.of("tree", columns, lines, audience="page"))
    return Document(run.address, parts)


def pictures(
    run: Run, statistic: str = "rms", *, patterns: Sequence[str] = (), given: Given | None = None
) -> list[Curves]:
    """Return one statistic over depth, a picture for each side."""
    if statistic not in STATISTICS:
        raise ValueError(f"there is no statistic {statistic!r}; there is {', '.join(STATISTICS)}.")
    points = selected(run, list(patterns))
    _, entries = at(run, points, given or {})
    rows, _ = rows_at(run, points, entries, no_progress)
    return [one for side in SIDE_TITLES if (one := _curves(rows, side, statistic)) is not None]


def _affordable(entries: Sequence[Entry]) -> tuple[list[Entry], list[Part]]:
    """Leave out tensors without statistics once so many bytes of them are to be read, and say so."""
    kept: list[Entry] = []
    left, dear = READ, 0
    for entry in entries:
        try:
            cost = 0 if entry.summary is not None else entry.nbytes
        except LayerscopeError:
            cost = 0  # it is named among what cannot be read
        if cost > left:
            dear += 1
        else:
            left -= cost
            kept.append(entry)
    said = f"{many(dear, 'tensor')} without statistics left out: too much to read; record with --keep both"
    return kept, [Sentence(said, "warn")] * bool(dear)


# Over depth -------------------------------------------------------------------------------------


def _pictures(rows: Sequence[PointRow]) -> Iterator[Part]:
    for side, title in SIDE_TITLES.items():
        drawn = [(name, one) for name in STATISTICS if (one := _curves(rows, side, name)) is not None]
        if drawn:
            yield Select(f"{title}, over depth", tuple((name, (one,)) for name, one in drawn))


def _curves(rows: Sequence[PointRow], side: str, statistic: str) -> Curves | None:
    of, log = STATISTICS[statistic]
    there = [row for row in rows if row.point.side == side]
    labels = tuple(_named(row) for row in there)
    values = tuple(of(row.summary) for row in there)
    if len(there) < 2 or all(v is None for v in values) or (statistic in MOSTLY_ZERO and not any(values)):
        return None
    line = Line(statistic, values)
    return Curves("depth", f"{statistic}, {SIDE_TITLES[there[0].point.side]}", labels, (line,), log, audience="page")


def _named(row: PointRow) -> str:
    return caption(row.point) + (f", call {row.call}" if row.call else "")


def _growth(rows: Sequence[PointRow]) -> Iterator[Part]:
    """Draw how much larger each layer's values are than those of the layer before, of one shape."""
    sizes = {id(row.entries[0]): row.summary.rms for row in rows}
    outputs = [row.entries[0] for row in rows if row.point.side == "output"]
    drawn = False
    for chain in chains(outputs, layers_only=True):
        pairs = [(sizes[id(a)], sizes[id(b)], b.point) for a, b in pairwise(chain) if sizes[id(a)] > 0]
        if len(pairs) > 1:
            labels = tuple(caption(point) for _, _, point in pairs)
            line = Line("growth", tuple(after / before for before, after, _ in pairs))
            title = "rms of each layer over that of the layer before"
            yield Curves("growth", title, labels, (line,), log=True, audience="page")
            drawn = True
    if drawn:
        yield Sentence("`layerscope show --adjacent` measures the change of each element, from tensors", "quiet")


# Channels ---------------------------------------------------------------------------------------


def _channels(run: Run, rows: Sequence[PointRow]) -> Iterator[Part]:
    """Show which channels carry the largest values: what a quantiser looks for."""
    yield Heading("channels that stand out")
    if not any(row.summary.channels is not None for row in rows):
        yield Sentence("the run has no statistics of channels; record with --statistics channels to have them", "quiet")
        return
    first = rows[0].entries[0].moment
    there = [str(row.point) for row in rows if row.summary.channels is not None]
    found: Outliers = outliers(run, there, epoch=first.epoch, step=first.step, batch=first.batch)
    told = [*found.parts()]
    tables = next(at for at, part in enumerate(told) if isinstance(part, Table))
    yield from told[:tables]
    yield from _ranges(found, rows)
    yield from told[tables:]


def _ranges(found: Outliers, rows: Sequence[PointRow]) -> Iterator[Part]:
    """Draw the range of each layer with and without the channels that stand out, and these among the others."""
    layers = [*found.layers]
    if len(layers) > 1:
        largest = Line("largest channel", tuple(layer["absmax"] for layer in layers))
        rest = Line("without those that stand out", tuple(layer["without"] for layer in layers))
        labels = tuple(caption(Point.parse(layer["point"])) for layer in layers)
        yield Curves("range", "range of each layer", labels, (largest, rest), True, unit="absmax", audience="page")
    worst = sorted((layer for layer in layers if layer["outliers"]), key=lambda layer: -layer["bits"])[:CHANNELED]
    channels = {str(row.point): row.summary.channels for row in rows}
    drawn = [(name, of) for layer in worst if (of := channels.get(name := layer["point"])) is not None]
    options = [(name, tuple(curve("absmax of each channel", "channel", of.absmax, "absmax"))) for name, of in drawn]
    if options:
        yield Select("the channels of those that cost most", tuple(options))


# Every point ------------------------------------------------------------------------------------


def _table(rows: Sequence[PointRow]) -> Iterator[Part]:
    """Show every point in one table; the first of them open to their histograms."""
    columns = [
        Column("point", "point", "name"),
        Column("side", "side"),
        *([Column("call", "call", "count")] if any(row.call for row in rows) else []),
        Column("shape", "shape"),
        Column("dtype", "dtype"),
        *(Column(key, key, "number") for key in ("mean", "std", "min", "p50", "max", "rms", "absmax")),
        Column("bar", "rms", "bar", log=True),
        Column("zeros", "zeros", "percent"),
        Column("broken", "nan/inf", "count"),
    ]
    opens = [str(at) if at < DETAILED else "" for at in range(len(rows))]
    yield Heading("points")
    yield Table.of("every", columns, (_cells(row, columns) for row in rows), audience="page", opens=opens)
    if len(rows) > DETAILED:
        yield Sentence(f"the first {DETAILED:,} of {len(rows):,} points open to their histograms", "quiet")
    folds = tuple(_fold(row, key) for row, key in zip(rows, opens, strict=True) if key)
    yield Fold(f"{many(len(folds), 'point')} in detail", folds)


def _cells(row: PointRow, columns: Sequence[Column]) -> Iterator[Cell | Value]:
    s = row.summary
    flat = s.row()
    sick = s.finite < s.count
    for column in columns:
        match column.key:
            case "point":
                yield Cell(row.point.place + leaf_text(row.point.leaf), "bad" if sick else "plain")
            case "side":
                yield row.point.side
            case "call":
                yield row.call
            case "shape":
                yield Cell(None, text=shape_text(s.shape))
            case "dtype":
                yield Cell(s.dtype, "quiet")
            case "bar":
                yield s.rms if math.isfinite(s.rms) else None
            case "zeros":
                yield s.zeros / s.count if s.count else None
            case "broken":
                yield Cell(s.count - s.finite, "bad" if sick else "plain")
            case key:
                value = flat.get(key)
                yield value if isinstance(value, int | float) else None


def _fold(row: PointRow, key: str) -> Fold:
    s = row.summary
    flat = s.row()
    facts = [Fact(name, _plain(flat.get(name)), "number") for name in _FACTS if flat.get(name) is not None]
    facts += [Fact(name, getattr(s, name), "count", "bad") for name in ("nan", "posinf", "neginf") if getattr(s, name)]
    facts += [Fact("first values", list(s.first))] if s.first else []
    parts: list[Part] = []
    if s.sketch is not None and s.finite:
        edges, counts = s.histogram(octaves=OCTAVES)
        parts.append(Histograms("histogram", "values", edges, (("values", counts),), "page"))
    elif s.finite:
        parts.append(Sentence("no histogram was kept; record with --statistics full to have it", "quiet"))
    parts.append(Facts("facts", tuple(facts), audience="page"))
    side = "" if row.point.side == "output" else f" {row.point.side}"
    return Fold(f"{_named(row)}{side}", tuple(parts), key, "bad" if s.finite < s.count else "plain")


def _plain(value: object) -> int | float | None:
    return value if isinstance(value, int | float) else None
