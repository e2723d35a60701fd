"""`layerscope show`: the statistics of a run, layer by layer, and the change from each layer to the next."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

import click

from layerscope.cli import options
from layerscope.cli.over import AXES
from layerscope.cli.over import document as lines
from layerscope.cli.page import counting, leave, put
from layerscope.pages.adjacent import Change, chains, changes
from layerscope.pages.completeness import completeness_parts, damage_of, run_facts
from layerscope.pages.selection import Given, at, spans
from layerscope.pages.statistics import PointRow, broken_parts, name_cell, point_tables, rows_at
from layerscope.points import Moment, Point
from layerscope.progress import Progress
from layerscope.report.parts import Cell, Column, Document, Heading, Part, Sentence, Table, Tone, Value
from layerscope.report.writing import NOTHING, number

if TYPE_CHECKING:
    from layerscope.store import Damage, Run

EXAMPLES = options.examples(
    "layerscope show runs/fp32",
    "layerscope show runs/fp32 'model.layers.*' --adjacent",
    "layerscope show runs/fp32 'model.layers.*:grad_output' --step 3 --json",
    "layerscope show runs/fp32 --over steps --point model.layers.3",
    "layerscope show runs/fp32 --channels",
)


@click.command(short_help="Show the statistics of a run, layer by layer.", epilog=EXAMPLES)
@click.argument("run", metavar="RUN")
@click.argument("patterns", metavar="[PATTERN]...", nargs=-1)
@click.option("--adjacent", is_flag=True, help="Show the change from each layer to the next as well.")
@click.option("--channels", is_flag=True, help="Show which channels stand out, over all records, and what they cost.")
@click.option("--over", type=click.Choice([*AXES]), help="Draw a line for each statistic of one point.")
@click.option("--point", metavar="POINT", help="The point that --over follows.")
@options.moments
@options.as_html
@options.as_json
@click.option("--markdown", "as_markdown", is_flag=True, help="Print Markdown.")
def command(
    run: str,
    patterns: tuple[str, ...],
    adjacent: bool,
    channels: bool,
    over: str | None,
    point: str | None,
    html_to: str | None,
    as_json: bool,
    as_markdown: bool,
    **given: int | None,
) -> int:
    """Show the statistics of RUN, layer by layer, of the points that PATTERNs name.

    Exit code 2 when something of RUN cannot be read; the rest is shown.
    """
    from layerscope.store import open_run

    if as_json and as_markdown:
        raise click.UsageError("--json and --markdown are two pages; ask for one of them.")
    if channels and (adjacent or over):
        raise click.UsageError("--channels is a page of its own; leave out --adjacent and --over.")
    if (over is None) != (point is None) or (over and (patterns or adjacent)):
        raise click.UsageError("a line is asked for with --over steps --point POINT, and shows that point alone.")
    with counting("reading") as progress:
        if channels:
            page, damaged = channel_document(open_run(run), run, patterns=patterns, given=given, progress=progress)
        elif over is not None and point is not None:
            page, damaged = lines(open_run(run), run, over=over, point=point, given=given, progress=progress)
        else:
            page, damaged = document(
                open_run(run), run, patterns=patterns, given=given, adjacent=adjacent, progress=progress
            )
    if html_to is not None:
        shown = None if channels or over else open_run(run)
        leave(page if shown is None else _report(shown, run, patterns, given, adjacent=adjacent), html_to)
    put(page, "json" if as_json else "markdown" if as_markdown else "terminal")
    return 2 if damaged else 0


def _report(run: Run, name: str, patterns: Sequence[str], given: Given, *, adjacent: bool) -> Document:
    """Build the report of a run, with the changes from layer to layer where they are asked for."""
    from layerscope.pages.run import page
    from layerscope.store import selected

    with counting("reading") as progress:
        extra: list[Part] = []
        if adjacent and run.points:
            points = selected(run, patterns)
            rows, _ = rows_at(run, points, at(run, points, given)[1], progress)
            extra = [*adjacent_parts(rows, layers_only=not patterns, progress=progress)]
        return page(run, name, patterns=patterns, given=given, extra=extra, progress=progress)


def document(
    run: Run, name: str, *, patterns: Sequence[str], given: Given, adjacent: bool, progress: Progress
) -> tuple[Document, list[Damage]]:
    """Build the page of a run: how complete it is, the statistics at one moment, and the changes when asked.

    Returned with it is what cannot be read; some of that shows only when the statistics are made.
    """
    from layerscope.store import selected

    parts: list[Part] = []
    unread: list[Damage] = []
    if run.points:
        points = selected(run, patterns)
        moment, entries = at(run, points, given)
        rows, unread = rows_at(run, points, entries, progress)
        parts += [Sentence(text, "quiet") for text in _which(run, points, moment, given, rows)]
        parts += broken_parts(rows)
        parts += point_tables(rows)
        if adjacent:
            parts += adjacent_parts(rows, layers_only=not patterns, progress=progress)
    damaged = _all_damaged(run, unread)
    return Document(name, (*completeness_parts(run, name, damaged=damaged), run_facts(run), *parts)), damaged


def channel_document(
    run: Run, name: str, *, patterns: Sequence[str], given: Given, progress: Progress
) -> tuple[Document, list[Damage]]:
    """Build the page of the channels that stand out, and return with it what cannot be read."""
    from layerscope.compare import outliers

    parts: list[Part] = []
    unread: list[Damage] = []
    if run.points:
        when: dict[str, Any] = dict(given)
        found = outliers(run, patterns, progress=progress, **when)
        parts, unread = [*found.parts()], [*found.damaged]
    damaged = _all_damaged(run, unread)
    return Document(name, (*completeness_parts(run, name, damaged=damaged), run_facts(run), *parts)), damaged


def _all_damaged(run: Run, unread: Sequence[Damage]) -> list[Damage]:
    damaged = damage_of(run)
    known = {(d.point, d.moment) for d in damaged}
    return damaged + [d for d in unread if (d.point, d.moment) not in known]


def _which(run: Run, points: Sequence[Point], moment: Moment, given: Given, rows: Sequence[PointRow]) -> Iterator[str]:
    """Say which moment this is, and what it leaves out."""
    steps = {m.step for m in run.moments}
    text = str(moment).replace("=", " ").replace(" batch", ", batch").replace(" step", ", step")
    said = {k for k, v in given.items() if v is not None}
    if len(steps) > 1:
        if said & {"step", "epoch", "batch"}:
            yield f"{text}; the run has step {spans(steps)}"
        elif moment.step == max(steps):
            yield f"{text}, the latest of {spans(steps)} (--step N shows another)"
        else:
            yield f"{text}, the latest with these points; the run has step {spans(steps)}"
    elif moment.epoch is not None:
        yield text
    here = {row.point for row in rows}
    if len(here) < len(points):
        yield f"{len(points) - len(here)} of {len(points)} points have no record at this moment"
    ranks = {e.moment.rank for row in rows for e in row.entries}
    if len(ranks) > 1:
        yield f"ranks {spans(ranks)} added up (--rank N shows one)"


def adjacent_parts(rows: Sequence[PointRow], *, layers_only: bool, progress: Progress) -> Iterator[Part]:
    """Build the tables of changes from each layer to the next, one for each chain of layers."""
    entries = [row.entries[0] for row in rows if row.point.side == "output" or not layers_only]
    found = chains(entries, layers_only=layers_only)
    links = sum(len(chain) - 1 for chain in found)
    done = 0

    def told(place: str) -> None:
        nonlocal done
        progress(place, done, links)
        done += 1

    if not found:
        yield Sentence(
            "no two of these points are neighbours: numbered modules with values of one shape, "
            "as `model.layers.*` names them",
            "warn",
        )
    if any(len(row.entries) > 1 for row in rows):
        yield Sentence("of the first rank alone; --rank N shows another", "quiet")
    measured = [(chain, list(changes(chain, told))) for chain in found]
    if any(c.basis == "summaries" for _, several in measured for c in several):
        yield Sentence(
            "where tensors were not kept, the change is at least what the summaries show, marked with >=; "
            "record with --keep both for the change itself",
            "warn",
        )
    for reason in dict.fromkeys(c.because for _, several in measured for c in several if c.because):
        yield Sentence(reason, "warn")
    for chain, several in measured:
        yield Heading(f"change from each layer to the next, from {chain[0].point.place} on")
        yield _change_table(several)


def _change_table(several: Sequence[Change]) -> Table:
    columns = [
        Column("after", "layer", "name"),
        Column("max_abs", "max change", "number", rank=2),
        Column("mean_abs", "mean change", "number", rank=4),
        Column("relative_l2", "relative L2", "number"),
        Column("cosine", "cosine", "number", rank=3),
        Column("bar", "over depth", "bar", rank=1, audience="page"),
        Column(
            "nonfinite", "nan/inf", "count", rank=3, audience="all" if any(c.nonfinite for c in several) else "data"
        ),
        Column("before", "before", audience="data"),
        Column("basis", "basis", audience="data"),
        Column("because", "because", audience="data"),
    ]
    return Table.of("adjacent", columns, (_change_cells(change) for change in several))


def _change_cells(change: Change) -> Iterator[Cell | Value]:
    point = change.after.point
    at_least = ">=" if change.basis == "summaries" else ""
    tone: Tone = "bad" if change.nonfinite else "plain"
    yield name_cell(point, tone)
    for value in (change.max_abs, change.mean_abs, change.relative_l2):
        yield _bound(value, at_least)
    yield _bound(change.cosine, "")
    yield 0.0 if math.isnan(change.relative_l2) else change.relative_l2
    yield Cell(change.nonfinite, tone)
    yield str(change.before.point)
    yield change.basis
    yield change.because or None


def _bound(value: float, at_least: str) -> Cell:
    if math.isnan(value):
        return Cell(None, text=NOTHING)
    return Cell(value, "quiet" if at_least else "plain", text=at_least + number(value) if at_least else None)
