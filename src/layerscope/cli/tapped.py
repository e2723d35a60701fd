"""What a compiled model in a folder can give: the table of its taps, without loading its graph."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from layerscope.errors import Unsupported
from layerscope.patterns import Place, select, split
from layerscope.points import Point
from layerscope.report.parts import Column, Document, Fact, Facts, Part, Sentence, Table
from layerscope.report.writing import many

if TYPE_CHECKING:
    from layerscope.compile_taps.compiled_folder import Saved

LOGITS = "logits"
AGAIN = "these were tapped when the model was compiled; layerscope.compile(...) again for others"


def tapped_document(saved: Saved, name: str, patterns: Sequence[str]) -> Document:
    """List what the model in a folder gives: its taps, its inputs and outputs; with patterns, what they select."""
    table = saved.table
    rows = list(_rows(saved))
    if patterns:
        rows = _selected(rows, patterns)
    columns = [
        Column("point", "point", "name"),
        Column("is", "is"),
        Column("call", "call", "count", audience="all" if any(row[2] for row in rows) else "data"),
    ]
    said = f"{many(len(rows), 'point')} selected" if patterns else many(len(table.taps), "tap")
    parts: list[Part] = [
        Sentence(f"{said}; compiled by {saved.backend}"),
        Sentence(AGAIN, "quiet"),
        *(Sentence(note, "warn") for note in table.notes),
        Facts("compiled", (Fact("takes", ", ".join(table.takes)),)),
        Table.of("points", columns, rows),
    ]
    if table.missing:
        missing = [Column("point", "missing", "name"), Column("reason", "because")]
        parts.append(Table.of("missing", missing, ((each.point, each.reason) for each in table.missing)))
    return Document(name, tuple(parts))


def _rows(saved: Saved) -> Iterator[tuple[str, str, int]]:
    table = saved.table
    states = {at: number for number, at in enumerate(table.hidden)}
    yield ".:input", "what it is called with", 0
    for at, tap in enumerate(table.taps):
        state = states.get(at)
        embedding = ", the embedding" if state == 0 and table.embedded else ""
        yield tap.point, "" if state is None else f"hidden state {state}{embedding}", tap.call
    yield ".:output", "what it returns", 0
    if table.logits is not None:
        yield f"{LOGITS}:output", "the logits", 0


def _selected(rows: Sequence[tuple[str, str, int]], patterns: Sequence[str]) -> list[tuple[str, str, int]]:
    modules, ops = split(patterns)
    if ops:
        raise Unsupported(f"{ops[0]}: a compiled model has no operations to watch; {AGAIN}.")
    there: dict[tuple[str, str], list[tuple[str, str, int]]] = {}
    for row in rows:
        point = Point.parse(row[0])
        there.setdefault((point.name, point.side), []).append(row)
    asked = select(modules, [Place(name) for name in dict.fromkeys(name for name, _ in there)])
    lacking = [point for point in asked if (point.name, point.side) not in there]
    if lacking:
        raise Unsupported(f"{lacking[0]} was not tapped; {AGAIN}.")
    return [row for point in asked for row in there[point.name, point.side]]
