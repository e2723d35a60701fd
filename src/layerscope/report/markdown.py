"""A document as Markdown (GitHub's dialect, for its tables); nothing is shortened or left out for width.

Path("report.md").write_text(markdown.render(document))
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator

from layerscope.report.parts import (
    Cell,
    Column,
    Curves,
    Data,
    Document,
    Fact,
    Facts,
    Fold,
    Heading,
    HeatMap,
    Histograms,
    Kind,
    Notes,
    Part,
    Picture,
    Profile,
    Select,
    Sentence,
    Table,
    Timeline,
)
from layerscope.report.writing import bar, landmarks, number, printable, shares, spark, write

SUFFIX = ".md"
BAR_WIDTH = 12
SPARK_WIDTH = 60

_SIGNS = {"plain": "", "quiet": "", "good": "✓ ", "warn": "⚠ ", "bad": "✗ "}
_RIGHT = ("count", "number", "percent", "bytes")


def render(document: Document) -> str:
    """Write the document as Markdown that shows every name as it is."""
    blocks = [f"# {_text(document.title)}", *_blocks(document.parts)]
    return "\n\n".join(b for b in blocks if b) + "\n"


def _blocks(parts: Iterable[Part]) -> Iterator[str]:
    for part in parts:
        match part:
            case Data():
                pass
            case Heading():
                yield f"## {_text(part.text)}"
            case Fold():
                yield f"### {_text(part.title)}"
                yield from _blocks(part.parts)
            case Select():
                for name, chosen in part.options:
                    yield f"**{_text(part.title)}: {_text(name)}**"
                    yield from _blocks(chosen)
            case _ if part.audience == "data":
                pass
            case Sentence():
                yield _sentence(part)
            case Notes():
                yield "\n".join(f"- {_sentence(s)}" for s in part.shown)
            case Facts():
                yield _text(part.title)
                yield "\n".join(_fact(fact) for fact in part.items if fact.audience != "data")
            case Table():
                yield _table(part)
            case Profile():
                yield _profile(part)
            case Curves() | HeatMap() | Histograms() | Timeline():
                yield f"**{_text(part.title)}**"
                yield _table(_as_table(part))


def _as_table(picture: Picture) -> Table:
    """Return the numbers of a picture: a row for each place, event or bin."""
    at = Column("at", "", "name")
    match picture:
        case Curves():
            lines = [(line.name, line.values) for line in picture.lines]
            lines += [(f"floor of {line.name}", line.floor) for line in picture.lines if line.floor]
            columns = [Column(str(i), name, "number") for i, (name, _) in enumerate(lines)]
            rows = zip(picture.labels, *(values for _, values in lines), strict=True)
            return Table.of(picture.key, [at, *columns], rows)
        case HeatMap():
            columns = [Column(str(i), name, "number") for i, name in enumerate(picture.columns)]
            cells = ((name, *values) for name, values in zip(picture.rows, picture.values, strict=True))
            return Table.of(picture.key, [at, *columns], cells)
        case Histograms():
            columns = [Column(str(i), name, "count") for i, (name, _) in enumerate(picture.counts)]
            bins = zip(picture.bins, *(counts for _, counts in picture.counts), strict=True)
            return Table.of(picture.key, [at, *columns], bins)
        case Timeline():
            columns = [Column("at", picture.unit, "count"), Column("what", "what")]
            return Table.of(
                picture.key, columns, ((event.at, Cell(event.text, event.tone)) for event in picture.events)
            )


def _sentence(sentence: Sentence) -> str:
    # A line may start like a list, a rule or a number of one.
    return _SIGNS[sentence.tone] + re.sub(r"^(\d*)([-+=.)])", r"\1\\\2", _text(sentence.text))


def _fact(fact: Fact) -> str:
    label = f"**{_text(fact.label)}**" + ("" if fact.label.endswith(":") else ":")
    return f"- {label} {_written(write(fact.value, fact.kind), fact.kind)}"


def _written(text: str, kind: Kind) -> str:
    return _code(text) if kind == "name" else _text(text)


def _table(table: Table) -> str:
    shown = [(i, c) for i, c in enumerate(table.columns) if c.audience != "data"]
    lines = [
        "| " + " | ".join(_text(c.title) for _, c in shown) + " |",
        "| " + " | ".join("---:" if c.kind in _RIGHT else "---" for _, c in shown) + " |",
    ]
    rows = table.rows[: table.most]
    written = {i: _column(c, [row[i] for row in rows]) for i, c in shown}
    for at in range(len(rows)):
        lines.append("| " + " | ".join(written[i][at] for i, _ in shown) + " |")
    return "\n".join(lines) + (f"\n\nand {table.left_over:,} more" if table.left_over else "")


def _column(column: Column, cells: list[Cell]) -> list[str]:
    if column.kind == "bar":
        values = [float(c.value) if isinstance(c.value, int | float) else float("nan") for c in cells]
        return [
            bar(s, BAR_WIDTH) or _text(write(c.value))
            for s, c in zip(shares(values, log=column.log), cells, strict=True)
        ]
    return [_cell(column, c) for c in cells]


def _cell(column: Column, cell: Cell) -> str:
    written = printable(cell.text) if cell.text is not None else write(cell.value, column.kind)
    body = _written(written, column.kind)
    if cell.tone in ("bad", "warn"):
        body = f"**{body}**"
    return "&emsp;" * (cell.depth or 0) + body


def _profile(profile: Profile) -> str:
    line = f"**{_text(profile.title)}**"
    found = landmarks(profile)
    if found is None:
        return line
    drawn = spark(profile.values, SPARK_WIDTH, log=profile.log, span=profile.span)
    first, last, peak = ((number(value), _text(label)) for label, value in found)
    most = f", at most {peak[0]} ({peak[1]})" if profile.log and peak not in (first, last) else ""
    return f"{line} {_code(drawn)} from {first[0]} ({first[1]}) to {last[0]} ({last[1]}){most}"


def _text(text: str) -> str:
    """Escape what Markdown or HTML would read as more than text.

    Underscores within words are left alone: GitHub leaves them too, and names are full of them. Pipes are
    entities because readers disagree on what a backslash before one means in a table.
    """
    text = re.sub(r"[\\`*\[\]~$#@]|(?<![^\W_])_|_(?![^\W_])", r"\\\g<0>", printable(text).replace("&", "&amp;"))
    for char, entity in (("<", "&lt;"), (">", "&gt;"), ("|", "&#124;"), ("://", "&#58;//")):
        text = text.replace(char, entity)
    return text


def _code(text: str) -> str:
    """Quote a name so that Markdown shows it unchanged; one with a pipe or a backtick is escaped instead."""
    text = printable(text)
    return _text(text) if {"|", "`"} & set(text) or not text.strip() else f"`{text}`"
