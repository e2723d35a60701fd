"""A diagnosis to look at: the root and the proof, every module against its floor, the evidence, every row.

html.save(page(finding), "report.html")
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import cast

from layerscope.diagnose.finding import Finding, Judged, called
from layerscope.diagnose.page.document import TONES, document
from layerscope.report.parts import (
    Cell,
    Column,
    Curves,
    Document,
    Fact,
    Facts,
    Heading,
    Line,
    Part,
    Sentence,
    Table,
    Value,
)
from layerscope.report.writing import percent


def page(finding: Finding, *, title: str = "diagnosis") -> Document:
    """Build the report; `title` says of which models."""
    told = [*document(finding, title=title).parts]
    first = next((at for at, part in enumerate(told) if isinstance(part, Heading)), len(told))
    parts: list[Part] = [*told[:first], *_proof(finding), *curves(finding), *told[first:]]
    parts += _evidence(finding)
    if finding.rows:
        parts += [Heading("every call of every module"), _rows(finding)]
    if finding.provenance:
        facts = tuple(Fact(key, value) for key, value in finding.provenance.items() if value)
        parts += [Heading("provenance"), Facts("provenance", facts, audience="page")]
    return Document(title, tuple(parts))


def curves(finding: Finding) -> list[Curves]:
    """Return the error of every judged module, in the order they ran, with the floor; nothing for fewer than two."""
    rows = [row for row in finding.rows if row.error is not None]
    if len(rows) < 2:
        return []
    labels = tuple(_named(row) for row in rows)
    line = Line("error", tuple(row.error for row in rows), tuple(row.floor for row in rows))
    title = "each module on what the reference gave it, against its floor"
    return [Curves("modules", title, labels, (line,), log=True, unit="relative L2", audience="page")]


def _named(row: Judged) -> str:
    return called(row.name) + (f", call {row.call}" if row.call else "")


def _proof(finding: Finding) -> Iterator[Part]:
    """Say how much of the final error goes when what is to blame is put right."""
    final = finding.final
    facts = [Fact("final error", final.error, "number"), Fact("its floor", final.floor, "number")]
    if final.removed is not None:
        facts.append(Fact("goes when all to blame are put right", percent(final.removed), tone="good"))
    facts += [
        Fact(f"goes with {called(blame.name)} alone", percent(blame.removed))
        for blame in finding.roots
        if blame.removed is not None
    ]
    shown = tuple(fact for fact in facts if fact.value is not None)
    if shown:
        yield Facts("proof", shown, audience="page")


def _evidence(finding: Finding) -> Iterator[Part]:
    for blame in finding.roots:
        if blame.cause.evidence:
            yield Heading(f"evidence: {called(blame.name)}, {blame.cause.kind}")
            yield Sentence(blame.cause.because)
            facts = tuple(Fact(key, cast("Value", value)) for key, value in blame.cause.evidence.items())
            yield Facts("evidence", facts, audience="page")


def _rows(finding: Finding) -> Table:
    renamed = any(row.counterpart not in (None, row.name) for row in finding.rows)
    columns = [
        Column("module", "module", "name"),
        Column("kind", "verdict"),
        Column("ratio", "error / floor", "number"),
        Column("error", "error", "number"),
        Column("bar", "", "bar", log=True),
        Column("floor", "floor", "number"),
        Column("where", "where"),
        *([Column("counterpart", "in the candidate", "name")] if renamed else []),
        Column("because", "because"),
    ]
    return Table.of("every", columns, (_cells(row, renamed=renamed) for row in finding.rows), audience="page")


def _cells(row: Judged, *, renamed: bool) -> Iterator[Cell | Value]:
    tone = TONES[row.kind]
    yield Cell(_named(row), tone if tone == "bad" else "plain")
    yield Cell(row.kind, tone)
    yield from (row.ratio, row.error, row.error, row.floor, row.where)
    if renamed:
        yield row.counterpart if row.counterpart != row.name else None
    yield row.because
