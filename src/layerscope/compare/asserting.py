"""Two runs must match, or the test fails and says where they part.

assert_runs_match("runs/fp32", "runs/compiled", noise="runs/bf16")
mismatch(compare("runs/fp32", "runs/compiled"))       # the text of the failure, or None
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence

from layerscope.compare.align.pairing import PairingRule
from layerscope.compare.comparing import compare
from layerscope.compare.noise_floor import LIMIT
from layerscope.compare.result import Against, Comparison, Row
from layerscope.report import Cell, Column, Document, Notes, Part, Sentence, Table, terminal
from layerscope.report.parts import Value
from layerscope.store import Run
from layerscope.store.address import Address

_AFTER = 2  # rows shown behind the first that parted
_LISTED = 5
_WIDTH = 110

_COLUMNS = (
    Column("point", "point", "name"),
    Column("moment", "moment", rank=1),
    Column("kind", "is"),
    Column("error", "relative L2", "number"),
    Column("ratio", "times the floor", "number", rank=2),
    Column("max_abs", "max |d|", "number", rank=3),
)


def assert_runs_match(
    reference: Address | Run,
    candidate: Address | Run,
    *,
    noise: Address | Run | Sequence[Address | Run] = (),
    pairing: str | os.PathLike[str] | Sequence[PairingRule] = (),
    limit: float = LIMIT,
    points: str | Sequence[str] = (),
    allow_partial: bool = False,
) -> None:
    """Raise AssertionError unless the candidate is the same as the reference, or differs by no more than noise.

    What only one of the two runs has, or what no relative error can be given of, is a failure as well, unless
    `allow_partial`. Raises Incomparable when nothing can be compared. The other arguments are those of `compare`.
    """
    __tracebackhide__ = True
    found = compare(reference, candidate, noise=noise, pairing=pairing, limit=limit, points=points)
    text = mismatch(found, allow_partial=allow_partial)
    if text is not None:
        raise AssertionError(text)


def mismatch(comparison: Comparison, *, allow_partial: bool = False) -> str | None:
    """Say where the runs part and what is not comparable; None when they match."""
    if not len(comparison):
        return "nothing was compared: there is no candidate"
    texts = [_told(comparison, against) for against in comparison if not _matches(against, allow_partial)]
    return "\n".join(texts).rstrip() or None


def _matches(against: Against, allow_partial: bool) -> bool:
    unjudged = _unjudged(against)
    if against.verdict.word == "differs" or len(unjudged) == len(against.rows):
        return False
    return allow_partial or not unjudged


def _unjudged(against: Against) -> list[Row]:
    """Return the rows that say nothing about a match: only one run has them, or no relative error means anything."""
    return [row for row in against.rows if row.kind in ("missing", "unpaired", "degenerate")]


def _told(comparison: Comparison, against: Against) -> str:
    unjudged = _unjudged(against)
    document = Document(_verdict(against, unjudged), tuple(_parts(comparison, against, unjudged)))
    return terminal.render(document, width=_WIDTH)


def _verdict(against: Against, unjudged: Sequence[Row]) -> str:
    if len(unjudged) == len(against.rows):
        return f"nothing could be compared: none of {len(against.rows)} rows has an answer"
    if against.verdict.word == "differs":
        return f"differs: {against.verdict.because}"
    return f"partial: {len(unjudged)} of {len(against.rows)} rows have no answer, the first is {unjudged[0]}"


def _parts(comparison: Comparison, against: Against, unjudged: Sequence[Row]) -> Iterator[Part]:
    first = against.first_divergence or next((row for row in against.rows if row.parted), None)
    if first is not None:
        yield _table(against, first)
    if unjudged:
        told = (Sentence(f"{row} is {row.kind}: {row.because}", "warn") for row in unjudged)
        yield Notes("unjudged", tuple(told), most=_LISTED)
    if against.notes:
        yield Notes("notes", tuple(Sentence(note) for note in against.notes), most=_LISTED)
    yield Sentence(f"candidate: {against.candidate}, {against.address}")
    yield Sentence(f"reference: {comparison.reference}, {comparison.address}")
    yield Sentence(f"rests on: {against.basis}")


def _table(against: Against, first: Row) -> Table:
    """Show the last healthy row, the first that parted, and the next ones."""
    rows = against.rows
    at = next(index for index, row in enumerate(rows) if row is first)
    healthy = [row for row in rows[:at] if row.kind in ("same", "noise")][-1:]
    shown = [*healthy, *rows[at : at + 1 + _AFTER]]
    columns = [column for column in _COLUMNS if column.key != "moment" or len({row.moment for row in rows}) > 1]
    cells = (_cells(row, bad=row is first) for row in shown)
    return Table.of("rows", columns, [[of[column.key] for column in columns] for of in cells])


def _cells(row: Row, *, bad: bool) -> dict[str, Cell | Value]:
    metrics = row.metrics
    return {
        "point": Cell(str(row), "bad" if bad else "plain"),
        "moment": str(row.moment),
        "kind": row.kind,
        "error": None if metrics is None else metrics.relative_l2,
        "ratio": row.ratio,
        "max_abs": None if metrics is None else metrics.max_abs,
    }
