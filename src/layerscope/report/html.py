"""A document as one HTML file: no request, no remote code, text as text; whole without its script.

Path("report.html").write_text(html.render(document), encoding="utf-8")
html.fragment(document)        # for a notebook: the same parts and their style, without a script

The page's Content-Security-Policy allows nothing but the style and the script that stand in it, by their hashes. Exact
numbers lie in an inert JSON block, which the script reads for what it shows under the pointer.
"""

from __future__ import annotations

import base64
import hashlib
import itertools
import json
import math
import os
import re
from collections.abc import Iterable, Iterator
from functools import cache
from pathlib import Path

from layerscope.report.json import JSON, strict
from layerscope.report.parts import (
    Cell,
    Column,
    Curves,
    Data,
    Document,
    Facts,
    Fold,
    Heading,
    HeatMap,
    Histograms,
    Kind,
    Line,
    Notes,
    Part,
    Profile,
    Select,
    Sentence,
    Table,
    Timeline,
    Tone,
)
from layerscope.report.svg import figure, quoted
from layerscope.report.writing import printable, shares, write

SUFFIX = ".html"
STATIC = 300  # rows of a table that stand in the page; a longer one has its rows in the data, and a window on them
LONG = 42  # characters of a text that may be broken over lines
BESIDE = (18, 26)  # characters of a label and its value that share their line with others
BARE = ' aria-label="drawn"'  # a column of bars beside their numbers needs no title
_RIGHT: tuple[Kind, ...] = ("count", "number", "percent", "bytes")
_SIGNS: dict[Tone, str] = {"plain": "", "quiet": "", "good": "\u2713", "warn": "\u26a0", "bad": "\u2717"}
_numbers = itertools.count(1)


def render(document: Document, *, live: str = "", seen: str = "") -> str:
    """Write the document as a page; a `live` one is served, and follows what its server tells at that path.

    `seen` is what the server would tell now: only something else makes the page fetch itself again.
    """
    page = _HtmlPage()
    body = "".join(page.blocks(document.parts))
    events = f' data-events="{quoted(live)}" data-seen="{quoted(seen)}"' if live else ""
    style, script = _asset("page.css"), _asset("page.js")
    if live:
        script += _asset("live.js")
    return (
        '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        f'<meta http-equiv="Content-Security-Policy" content="{policy(live=bool(live))}">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        '<meta name="color-scheme" content="light dark">\n'
        f"<title>{quoted(document.title)}</title>\n<style>{style}</style>\n</head>\n"
        f'<body class="layerscope"{events}>\n<main><h1>{quoted(document.title)}</h1>\n{body}</main>\n'
        f'<p id="tip" role="status" aria-live="polite" hidden></p>\n{page.island()}\n<script>{script}</script>\n'
        "</body>\n</html>\n"
    )


def fragment(document: Document) -> str:
    """Write the document for a notebook's cell, which has a page and a policy of its own."""
    page = _HtmlPage(static=True, prefix=f"choice{next(_numbers)}")
    body = "".join(page.blocks(document.parts))
    title = f"<h3>{quoted(document.title)}</h3>" if document.title else ""
    return f'<div class="layerscope"><style>{_asset("page.css")}</style>{title}{body}</div>'


def save(document: Document, path: str | os.PathLike[str]) -> None:
    """Write the page to a file, whole or not at all, into folders that are made where there are none."""
    to = Path(path)
    to.parent.mkdir(parents=True, exist_ok=True)
    beside = to.with_name(f".{to.name[:100]}.{os.getpid()}")
    try:
        beside.write_text(render(document), encoding="utf-8")
        beside.replace(to)
    except OSError as error:
        raise OSError(error.errno, error.strerror, str(to)) from error
    finally:
        beside.unlink(missing_ok=True)


@cache
def policy(*, live: bool = False) -> str:
    """Return the Content-Security-Policy of a page: its own style and script, nothing else; a live one may listen."""
    script = _asset("page.js") + (_asset("live.js") if live else "")
    allowed = ["default-src 'none'", f"style-src {_hash(_asset('page.css'))}", f"script-src {_hash(script)}"]
    return "; ".join([*allowed, *["connect-src 'self'"] * live, "base-uri 'none'", "form-action 'none'"])


def _hash(text: str) -> str:
    return f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'"


@cache
def _asset(name: str) -> str:
    return Path(__file__).with_name("assets").joinpath(name).read_text(encoding="utf-8")


class _HtmlPage:
    """The parts as HTML, one after the other; what the script needs gathers in `figures` and `tables`.

    A `static` page has no script: its tables are whole, or say how many rows they leave out.
    """

    def __init__(self, *, static: bool = False, prefix: str = "choice") -> None:
        self._groups = (f"{prefix}-{nth}" for nth in itertools.count())
        self.static = static
        self.figures: list[JSON] = []
        self.tables: list[JSON] = []

    def island(self) -> str:
        """Return the data in a block that no browser runs, with nothing in it that could end it."""
        text = json.dumps({"figures": self.figures, "tables": self.tables}, allow_nan=False, separators=(",", ":"))
        for char in "<>&":
            text = text.replace(char, f"\\u{ord(char):04x}")
        return f'<script type="application/json" id="data">{text}</script>'

    def blocks(self, parts: Iterable[Part]) -> Iterator[str]:
        """Write each part; profiles that follow each other are the lines of one picture."""
        profiles: list[Profile] = []
        for part in parts:
            if isinstance(part, Profile) and part.audience != "data":
                if profiles and (profiles[0].labels, profiles[0].log) != (part.labels, part.log):
                    yield self._lines(profiles)
                    profiles = []
                profiles.append(part)
                continue
            if profiles:
                yield self._lines(profiles)
                profiles = []
            yield self._block(part)
        if profiles:
            yield self._lines(profiles)

    def _lines(self, profiles: list[Profile]) -> str:
        first = profiles[0]
        lines = tuple(Line(profile.title, profile.values) for profile in profiles)
        return figure(Curves(first.key, "", first.labels, lines, log=first.log), self.figures)

    def _block(self, part: Part) -> str:
        match part:
            case Data() | Profile():
                return ""
            case Heading():
                return f"<h2>{quoted(part.text)}</h2>"
            case Fold():
                return self._fold(part)
            case Select():
                return self._choice(part)
            case _ if part.audience == "data":
                return ""
            case Sentence():
                return f"<p{_class(part.tone)}>{_said(part)}</p>"
            case Notes():
                items = "".join(f"<li{_class(one.tone)}>{_said(one)}</li>" for one in part.items)
                return f'<ul class="notes">{items}</ul>'
            case Facts():
                return _facts(part)
            case Table():
                return self._table(part)
            case Curves() | HeatMap() | Histograms() | Timeline():
                return figure(part, self.figures)

    def _fold(self, fold: Fold) -> str:
        name = f' id="row-{quoted(fold.key)}"' if fold.key else ""
        sign = f'<span aria-hidden="true">{_SIGNS[fold.tone]} </span>' if _SIGNS[fold.tone] else ""
        return (
            f"<details{name}{_class('fold', fold.tone)}><summary>{sign}{quoted(fold.title)}</summary>"
            f"{''.join(self.blocks(fold.parts))}</details>"
        )

    def _choice(self, choice: Select) -> str:
        """Write each panel behind its radio button: style alone shows the one that is chosen, below all the buttons."""
        if len(choice.options) == 1:
            return "".join(self.blocks(choice.options[0][1]))
        group = next(self._groups)
        options = "".join(
            f'<input type="radio" name="{group}" id="{group}-{nth}"{" checked" if nth == 0 else ""}>'
            f'<label for="{group}-{nth}">{quoted(name)}</label><div>{"".join(self.blocks(parts))}</div>'
            for nth, (name, parts) in enumerate(choice.options)
        )
        return f'<fieldset class="choice"><legend>{quoted(choice.title)}</legend><div>{options}</div></fieldset>'

    # Tables -------------------------------------------------------------------------------------

    def _table(self, table: Table) -> str:
        shown = [(at, column) for at, column in enumerate(table.columns) if column.audience != "data"]
        rows = table.rows
        columns = [self._column(column, [row[at] for row in rows]) for at, column in shown]
        depths = [next((cell.depth for cell in row if cell.depth is not None), None) for row in rows]
        static = len(rows) <= STATIC
        listed = range(len(rows) if static else STATIC)
        heads = "".join(
            f'<th scope="col"{_class("right" if column.kind in _RIGHT else "")}{"" if column.title else BARE}>'
            f"{quoted(column.title)}</th>"
            for _, column in shown
        )
        tree = any(depths)
        body = "".join(self._row(table, at, depths[at], [column[at] for column in columns]) for at in listed)
        after = name = ""
        if not static:
            after = (
                f'<p class="quiet rest">the first {STATIC:,} of {len(rows):,} rows; '
                f"{'machines get them all' if self.static else 'with scripts on, all of them'}</p>"
            )
            if not self.static:
                every = range(len(rows))
                self.tables.append([[[_slim(c[at]) for c in columns], _opens(table, at), depths[at]] for at in every])
                name = f' data-table="{len(self.tables) - 1}"'
        kind = _class(*(["tree"] if tree else []))
        inner = f"<thead><tr>{heads}</tr></thead><tbody>{body}</tbody>"
        return f'<div class="table"><table{kind}{name}>{inner}</table></div>{after}'

    def _row(self, table: Table, at: int, depth: int | None, cells: list[_Shown]) -> str:
        opens = _opens(table, at)
        marks = f' data-opens="{quoted(opens)}"' if opens else ""
        marks += f' data-depth="{depth}"' if depth is not None else ""
        written = "".join(_cell(cell, "" if nth else opens) for nth, cell in enumerate(cells))
        return f"<tr{marks}>{written}</tr>"

    def _column(self, column: Column, cells: list[Cell]) -> list[_Shown]:
        if column.kind == "bar":
            values = [float(c.value) if isinstance(c.value, int | float) else math.nan for c in cells]
            lengths = shares(values, log=column.log)
            return [
                _Shown(cell, "", strict(cell.value), column.kind, length)
                for cell, length in zip(cells, lengths, strict=True)
            ]
        return [
            _Shown(
                cell,
                printable(cell.text) if cell.text is not None else write(cell.value, column.kind),
                strict(cell.value) if isinstance(cell.value, int | float) else None,
                column.kind,
            )
            for cell in cells
        ]


class _Shown:
    """A cell as it is written: its text, the number it is sorted by, how long its bar is."""

    __slots__ = ("cell", "kind", "length", "text", "value")

    def __init__(self, cell: Cell, text: str, value: JSON, kind: Kind, length: float | None = None) -> None:
        self.cell, self.text, self.value, self.kind, self.length = cell, text, value, kind, length

    @property
    def tone(self) -> Tone:
        return self.cell.tone


def _opens(table: Table, at: int) -> str:
    return table.opens[at] if table.opens else ""


def _cell(shown: _Shown, opens: str) -> str:
    """Write a cell, with a link to what it opens; spaces set it in by its depth, because a copied table keeps them."""
    tone = shown.tone if shown.tone != "plain" else ""
    right = shown.kind in _RIGHT and shown.value is None  # a number stands to the right by itself
    long = shown.kind == "text" and len(shown.text) > LONG
    kinds = [k for k in ("right" if right else "name" if shown.kind == "name" else "long" if long else "", tone) if k]
    value = f' data-v="{shown.value}"' if shown.value is not None and not isinstance(shown.value, str) else ""
    if isinstance(shown.value, str):
        value = f' data-v="{quoted(shown.value)}"'
    if shown.length is not None:
        rect = f'<rect width="{shown.length * 100:.1f}" height="10"/>'
        bar = f'<svg class="bar" aria-hidden="true" viewBox="0 0 100 10" preserveAspectRatio="none">{rect}</svg>'
        return f"<td{_class(*kinds)}{value}>{bar if shown.length > 0 else ''}</td>"
    indent = "\u2003\u2003" * (shown.cell.depth or 0)
    sign = _SIGNS[shown.tone] if shown.kind != "name" and shown.tone in ("warn", "bad", "good") and shown.text else ""
    mark = f'<span aria-hidden="true">{sign} </span>' if sign else ""
    to = f"#row-{opens}" if opens else shown.cell.link
    text = f'<a href="{quoted(to)}">{quoted(shown.text)}</a>' if to else quoted(shown.text)
    return f"<td{_class(*kinds)}{value}>{indent}{mark}{text}</td>"


def _slim(shown: _Shown) -> JSON:
    """Return a cell for the script, as short as it can be: text, number, tone, length of its bar."""
    if shown.length is not None:
        return ["", shown.value, shown.tone if shown.tone != "plain" else "", round(shown.length, 3)]
    if shown.tone != "plain":
        return [shown.text, shown.value, shown.tone]
    return [shown.text, shown.value] if shown.value is not None else shown.text


def _facts(facts: Facts) -> str:
    shown = [fact for fact in facts.items if fact.audience != "data"]
    if not shown:
        return ""
    title = f"<h3>{quoted(facts.title.rstrip(':'))}</h3>" if facts.title else ""
    items = []
    for fact in shown:
        label, text = fact.label.rstrip(":"), write(fact.value, fact.kind)
        alone = "" if len(label) <= BESIDE[0] and len(text) <= BESIDE[1] else "long"
        items.append(f"<li{_class(alone)}><b>{quoted(label)}</b><i{_class(fact.tone)}>{quoted(text)}</i></li>")
    return f'<section class="facts">{title}<ul>{"".join(items)}</ul></section>'


def _said(sentence: Sentence) -> str:
    sign = _SIGNS[sentence.tone]
    text = re.sub("`([^`]+)`", r"<code>\1</code>", quoted(sentence.text))
    return (f'<span aria-hidden="true">{sign} </span>' if sign else "") + text


def _class(*names: str) -> str:
    kept = " ".join(name for name in names if name and name != "plain")
    return f' class="{kept}"' if kept else ""
