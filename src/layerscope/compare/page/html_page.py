"""A comparison to look at: pictures of all candidates first, then each row with everything there is about it.

    html.save(page(comparison), "report.html")

The terminal's page (`document.py`) says the same in fewer words. Nothing is left out without a sentence that says so.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace

from layerscope.compare.measure.metrics import Metrics
from layerscope.compare.page.bands import PUBLISHED, Bands
from layerscope.compare.page.blocks import TONES, block, near_one
from layerscope.compare.page.closeups import CloseUps
from layerscope.compare.page.document import BY_WEIGHT, modes_table, opening
from layerscope.compare.result import Against, Comparison, Row
from layerscope.points import SIDE_TITLES, Moment, Point, caption
from layerscope.report.parts import (
    Cell,
    Column,
    Curves,
    Document,
    Fold,
    Heading,
    HeatMap,
    Line,
    Part,
    Select,
    Sentence,
    Table,
    Value,
)
from layerscope.report.writing import many

DETAILED = 400  # rows with everything there is about them; more would make a file that no mail takes
ALIKE = 0.1  # of floors: what differs by less is one band
HOW = {
    "same": "equal bit for bit",
    "noise": "equal up to noise",
    "quantised": "quantised, with no layer that stands out",
}
TALL = 200  # lines of a heat map; what is more is drawn by the worst of some neighbours
# The measures that a map can show, and whether by their powers of ten.
MEASURES: dict[str, tuple[Callable[[Row, Metrics], float | None], bool]] = {
    "relative L2": (lambda row, m: m.relative_l2, True),
    "ratio to the floor": (lambda row, m: row.ratio, True),
    "1 - cosine": (lambda row, m: abs(1 - m.cosine), True),
    "max abs": (lambda row, m: m.max_abs, True),
    "MSE": (lambda row, m: m.mse, True),
    "elements that differ": (lambda row, m: 1 - m.fraction_equal, False),
}


def page(comparison: Comparison, *, bands: Bands = PUBLISHED) -> Document:
    """Build the page; the runs are opened where they still are, for what rows do not hold: histograms, provenance."""
    closeups = CloseUps(comparison)
    names = ", ".join(against.candidate for against in comparison)
    parts: list[Part] = [*_opening(comparison)]
    if len(comparison) > 1:
        parts += modes_table(comparison)
    parts += profile(comparison)
    parts += _maps(comparison)
    parts += _over_moments(comparison)
    parts += _trees(comparison)
    parts += _rows(comparison, bands, closeups)
    parts += _apart(comparison)
    parts += closeups.provenance()
    return Document(f"{comparison.reference} against {names}", tuple(parts))


# Depth ------------------------------------------------------------------------------------------


def summary(comparison: Comparison) -> Document:
    """Build what a notebook shows: the verdicts and the error over depth."""
    names = ", ".join(against.candidate for against in comparison)
    table = modes_table(comparison) if len(comparison) > 1 else ()
    return Document(f"{comparison.reference} against {names}", (*_opening(comparison), *table, *profile(comparison)))


def _opening(comparison: Comparison) -> Iterator[Part]:
    """Say the verdict in a sentence; of several candidates, each one's own is a click away."""
    said = [*opening(comparison)]
    if len(comparison) < 2:
        yield from said
        return
    words = Counter[str](against.verdict.word for against in comparison)
    differ, unknown, all_of = words["differs"], words["cannot tell"], len(comparison)
    first = comparison.first_divergence
    if differ:
        where = f"; the first divergence is {first}, in {first.candidate}: {first.because}" if first else ""
        yield Sentence(f"{differ} of {all_of} candidates differ from {comparison.reference}{where}", "bad")
    elif unknown:
        because = comparison.verdict.because
        yield Sentence(
            f"whether {unknown} of {all_of} candidates agree with {comparison.reference} cannot be told: {because}",
            "warn",
        )
    else:
        how = ", ".join(f"{count} {HOW[word]}" for word, count in words.items())
        partial = any(_tone(part) == "warn" for part in said)
        yield Sentence(f"no candidate differs from {comparison.reference}: {how}", "warn" if partial else "good")
    yield Fold("each candidate's verdict", tuple(part for part in said if _tone(part) not in ("quiet", "warn")))
    yield from (part for part in said if _tone(part) in ("quiet", "warn"))


def _tone(part: Part) -> str:
    return part.tone if isinstance(part, Sentence) else ""


def profile(comparison: Comparison) -> list[Part]:
    """Draw each candidate's error over depth with the floor, a picture for each side."""
    options: list[tuple[str, tuple[Part, ...]]] = []
    for one in curves(comparison):
        options.append((one.title, (one,)))
        if any(line.floor for line in one.lines):  # far below the errors it flattens what tells them apart
            alone = tuple(replace(line, floor=()) for line in one.lines)
            options.append((f"{one.title} without the floor", (replace(one, lines=alone),)))
    return [Heading("error over depth"), Select("error of", tuple(options))] if options else []


def curves(comparison: Comparison) -> list[Curves]:
    """Return the error over depth, a picture for each side that has two points or more."""
    pictures = []
    for side, title in SIDE_TITLES.items():
        names = _named(comparison.rows, side)
        if len(names) < 2:
            continue
        drawn: list[tuple[str, tuple[float | None, ...]]] = []
        floors: dict[str, list[float | None]] = {}
        for against in comparison:
            worst = _worst(against.compared, side, lambda row, m: m.relative_l2)
            if not worst:
                continue
            expected = _worst(against.compared, side, lambda row, m: row.floor.error if row.floor else None)
            floor = [expected.get(name) for name in names]
            alike = next((whose for whose, known in floors.items() if _alike(known, floor)), None)
            if alike is not None:  # candidates of one dtype share a floor: it is drawn once, wherever any has it
                floors[alike] = [b if a is None else a for a, b in zip(floors[alike], floor, strict=True)]
            elif any(floor):
                floors[against.candidate] = floor
            drawn.append((against.candidate, tuple(worst.get(name) for name in names)))
        if drawn:
            lines = tuple(Line(name, values, tuple(floors.get(name, ()))) for name, values in drawn)
            unit = "relative L2"
            pictures.append(Curves("profile", title, tuple(names), lines, True, unit=unit, audience="page"))
    return pictures


def _alike(floor: Sequence[float | None], other: Sequence[float | None]) -> bool:
    """Tell whether one band shows both: wherever both are known, they are within the width of a line."""
    both = [(a, b) for a, b in zip(floor, other, strict=True) if a is not None and b is not None]
    return bool(both) and all(abs(a - b) <= ALIKE * max(a, b) for a, b in both)


def _named(rows: Iterable[Row], side: str) -> list[str]:
    there = (row for row in rows if row.point.side == side and row.metrics is not None)
    return list(dict.fromkeys(caption(row.point) for row in there))


def _worst(rows: Iterable[Row], side: str, of: Callable[[Row, Metrics], float | None]) -> dict[str, float]:
    """Return the largest value of each point over its moments; what is not finite stands out."""
    found: dict[str, float] = {}
    for row in rows:
        value = of(row, row.metrics) if row.metrics is not None and row.point.side == side else None
        if value is None:
            continue
        if row.kind == "nonfinite":
            value = math.nan
        name = caption(row.point)
        before = found.get(name)
        if before is None or math.isnan(value) or (not math.isnan(before) and value > before):
            found[name] = value
    return found


def _maps(comparison: Comparison) -> Iterator[Part]:
    """Draw layers and candidates, by each measure."""
    if len(comparison) < 2:
        return
    yield Heading("layers and candidates")
    sides = [side for side in SIDE_TITLES if _named(comparison.rows, side)]
    columns = tuple(against.candidate for against in comparison)
    options: list[tuple[str, tuple[Part, ...]]] = []
    for measure, (of, log) in MEASURES.items():
        drawn: list[Part] = []
        for side in sides:
            names = _named(comparison.rows, side)
            worst = [_worst(against.compared, side, of) for against in comparison]
            table = [tuple(one.get(name) for one in worst) for name in names]
            title = f"{measure}, {SIDE_TITLES[side]}" if len(sides) > 1 else measure
            drawn += _map(title, names, columns, table, log=log)
        if any(
            value is not None for part in drawn if isinstance(part, HeatMap) for row in part.values for value in row
        ):
            options.append((measure, tuple(drawn)))
    yield Select("measure", tuple(options))


def _map(
    title: str, names: Sequence[str], columns: tuple[str, ...], table: Sequence[tuple[float | None, ...]], *, log: bool
) -> Iterator[Part]:
    """Draw a map; of more lines than a picture has room for, each is the worst of some neighbours."""
    if len(names) > TALL:
        every = math.ceil(len(names) / TALL)
        edges = range(0, len(names), every)
        table = [_pooled(table[at : at + every]) for at in edges]
        names = [f"{names[at]} +{min(every, len(names) - at) - 1}" for at in edges]
        yield Sentence(f"each line is the worst of {every} neighbours, of which the first is named", "quiet")
    yield HeatMap("map", title, tuple(names), columns, tuple(table), log=log, audience="page")


def _pooled(rows: Sequence[tuple[float | None, ...]]) -> tuple[float | None, ...]:
    columns = zip(*rows, strict=True)
    return tuple(max((v for v in column if v is not None), key=_nan_last, default=None) for column in columns)


def _nan_last(value: float) -> float:
    return math.inf if math.isnan(value) else value


def _over_moments(comparison: Comparison) -> Iterator[Part]:
    """Draw layers and moments of each candidate, where there are several."""
    moments = sorted({row.moment for row in comparison.rows if row.metrics is not None})
    if len(moments) < 2:
        return
    options: list[tuple[str, tuple[Part, ...]]] = []
    for against in comparison:
        found: dict[str, dict[Moment, float]] = {}
        for row in against.compared:
            if row.point.side == "output" and row.metrics is not None:
                value = math.nan if row.kind == "nonfinite" else row.metrics.relative_l2
                found.setdefault(caption(row.point), {})[row.moment] = value
        table = [tuple(of.get(moment) for moment in moments) for of in found.values()]
        drawn = _map("relative L2", [*found], tuple(map(_when, moments)), table, log=True)
        options.append((against.candidate, tuple(drawn)))
    yield Heading("layers and moments")
    yield Select("candidate", tuple(options))


def _when(moment: Moment) -> str:
    words = (("epoch", moment.epoch), ("step", moment.step), ("call", moment.call), ("rank", moment.rank))
    return " ".join(f"{word} {n}" for word, n in words if n or word == "step")


# The tree ---------------------------------------------------------------------------------------


def _trees(comparison: Comparison) -> Iterator[Part]:
    options = [(against.candidate, tuple(_tree(against))) for against in comparison if against.compared]
    if options:
        yield Heading("modules")
        yield Select("candidate", tuple(options))


def _tree(against: Against) -> Iterator[Part]:
    """Show the modules with the worst verdict inside each; where the difference begins is said first."""
    worst: dict[str, Row] = {}
    inside: dict[str, int] = {}
    children: dict[str, list[str]] = {}
    for row in against.rows:
        for name in _above(row.point):
            if name not in worst:
                children.setdefault(name.rpartition(".")[0] if name else "\0", []).append(name)
            if name not in worst or _weight(row) < _weight(worst[name]):
                worst[name] = row
            inside[name] = inside.get(name, 0) + 1
    root = against.first_divergence
    if root is not None:
        yield Sentence(f"begins at {root}: {root.because}", TONES[root.kind])
    columns = [
        Column("module", "module", "name"),
        Column("kind", "worst inside"),
        Column("relative_l2", "relative L2", "number"),
        Column("ratio", "ratio", "number"),
        Column("bar", "", "bar", log=True),
        Column("rows", "rows", "count"),
        Column("where", "where", "name"),
    ]
    lines: list[tuple[Cell | Value, ...]] = []
    waiting = [(name, 0) for name in reversed([n for n in children.get("\0", []) + children.get("", []) if n in worst])]
    seen: set[str] = set()
    while waiting:
        name, depth = waiting.pop()
        if name in seen:
            continue
        seen.add(name)
        row = worst[name]
        metrics, leaf = row.metrics, name.rpartition(".")[2] or "the model"
        lines.append(
            (
                Cell(name, "bad" if TONES[row.kind] == "bad" else "plain", text=leaf, depth=depth),
                Cell(row.kind, TONES[row.kind]),
                metrics.relative_l2 if metrics is not None else None,
                row.ratio,
                metrics.relative_l2 if metrics is not None and math.isfinite(metrics.relative_l2) else None,
                inside[name],
                Cell(str(row), "quiet", text="" if row.point.name == name or row.kind == "same" else str(row)),
            )
        )
        waiting += [(child, depth + 1) for child in reversed(children.get(name, [])) if name]
    yield Table.of("tree", columns, lines, audience="page")


def _above(point: Point) -> list[str]:
    """Return the module and those it lies in, the outermost first; an operation lies in its module."""
    parts = point.name.split(".") if point.name else []
    return [".".join(parts[:n]) for n in range(1, len(parts) + 1)] or [""]


def _weight(row: Row) -> tuple[int, float]:
    error = row.ratio if row.ratio is not None else row.metrics.relative_l2 if row.metrics is not None else 0.0
    return BY_WEIGHT.index(row.kind), -(-1.0 if math.isnan(error) else error)


# The rows ---------------------------------------------------------------------------------------


def _rows(comparison: Comparison, bands: Bands, closeups: CloseUps) -> Iterator[Part]:
    """Show every row in one table; those that matter most open."""
    rows = [row for row in comparison.rows if row.kind not in ("missing", "unpaired")]
    if not rows:
        return
    detailed = sorted((row for row in rows if row.metrics is not None), key=_weight)
    ends = [one for against in comparison for one in (*against.compared[:1], *against.compared[-1:])]
    chosen = {id(row): row for row in (*_roots(comparison), *ends, *detailed)}
    kept = dict(list(chosen.items())[:DETAILED])
    keys = {at: str(nth) for nth, at in enumerate(id(row) for row in rows) if at in kept}
    yield Heading("rows")
    yield Sentence("a row opens: both sides' statistics, histograms, the worst elements", "quiet")
    yield _table(comparison, rows, [keys.get(id(row), "") for row in rows])
    if len(detailed) > len(keys):
        yield Sentence(
            f"{len(detailed) - len(keys):,} rows of {len(detailed):,} do not open, the least conspicuous: their "
            "numbers are in the table, and all of them in `layerscope compare --detail all`",
            "quiet",
        )
    several, moments = len(comparison) > 1, len({row.moment for row in rows}) > 1
    folds = []
    # The worst first, because the budget for reading tensors may not last for all.
    for row in kept.values():
        title = f"{row} {f'in {row.candidate} ' if several else ''}{f'at {row.moment} ' if moments else ''}"
        parts = [*block(row, str(row), reference=comparison.reference, bands=bands)][1:]
        near = closeups.of(row)
        if row.counterpart == row.point and row.method in ("", "exact"):
            near.append(Sentence("paired with the point of its name", "quiet"))
        fold = Fold(f"{title.strip()}: {row.kind}", (*near, *parts), keys[id(row)], TONES[row.kind])
        folds.append((int(keys[id(row)]), fold))
    yield from (Sentence(text, "quiet") for text in closeups.left_out())
    yield Fold(f"{many(len(folds), 'row')} in detail", tuple(fold for _, fold in sorted(folds, key=lambda one: one[0])))


def _roots(comparison: Comparison) -> list[Row]:
    return [row for row in comparison.rows if row.kind in ("root", "nonfinite") and row.metrics is not None]


def _table(comparison: Comparison, rows: Sequence[Row], opens: Sequence[str]) -> Table:
    several = len(comparison) > 1
    moments = len({row.moment for row in rows}) > 1
    renamed = any(row.counterpart is not None and row.counterpart != row.point for row in rows)
    paired = any(row.method not in ("", "exact") for row in rows)
    columns = [
        Column("point", "point", "name"),
        *([Column("candidate", "candidate")] if several else []),
        *([Column("moment", "moment")] if moments else []),
        Column("kind", "kind"),
        Column("ratio", "ratio", "number"),
        Column("relative_l2", "relative L2", "number"),
        Column("bar", "", "bar", log=_wide(rows)),
        Column("max_abs", "max abs", "number"),
        Column("mean_abs", "mean abs", "number"),
        Column("mse", "MSE", "number"),
        Column("cosine", "cosine", "number"),
        Column("correlation", "correlation", "number"),
        Column("sqnr", "SQNR dB", "number"),
        Column("fraction_equal", "equal", "percent"),
        *([Column("counterpart", "candidate's name", "name")] if renamed else []),
        *([Column("method", "paired by")] if paired else []),
    ]
    return Table.of("rows", columns, (_cells(row, columns) for row in rows), audience="page", opens=opens)


def _wide(rows: Sequence[Row]) -> bool:
    errors = [row.metrics.relative_l2 for row in rows if row.metrics is not None]
    positive = [e for e in errors if 0 < e < math.inf]
    return bool(positive) and max(positive) > 10 * min(positive)


def _cells(row: Row, columns: Sequence[Column]) -> Iterator[Cell | Value]:
    tone, metrics = TONES[row.kind], row.metrics
    for column in columns:
        match column.key:
            case "point":
                yield Cell(str(row), tone if tone == "bad" else "plain")
            case "candidate" | "ratio" | "method" as key:
                yield getattr(row, key)
            case "moment":
                yield str(row.moment)
            case "kind":
                yield Cell(row.kind, tone)
            case "counterpart":
                yield str(row.counterpart or "").removesuffix(":output")
            case _ if metrics is None:
                yield None
            case "bar":
                yield metrics.relative_l2 if math.isfinite(metrics.relative_l2) else None
            case "correlation" | "cosine" as key:
                yield Cell(getattr(metrics, key), text=near_one(getattr(metrics, key)))
            case key:
                yield getattr(metrics, key)


def _apart(comparison: Comparison) -> Iterator[Part]:
    """List what was not compared, and what could not be read, all of it."""
    lonely = [row for row in comparison.rows if row.kind in ("missing", "unpaired")]
    unread = [(against.candidate, text) for against in comparison for text in against.unread]
    if lonely:
        columns = [Column("point", "point", "name"), Column("candidate", "candidate"), Column("moment", "moment")]
        columns += [Column("kind", "kind"), Column("because", "because")]
        cells = ((str(r), r.candidate, str(r.moment), Cell(r.kind, TONES[r.kind]), r.because) for r in lonely)
        yield Heading(f"not compared: {many(len(lonely), 'row')}")
        yield Table.of("apart", columns, cells, audience="page")
    if unread:
        yield Heading("not read")
        columns = [Column("candidate", "candidate"), Column("why", "why")]
        yield Table.of("unread", columns, unread, audience="page")
