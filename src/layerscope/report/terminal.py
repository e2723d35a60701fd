"""A document on a terminal; plain text where there is no colour, full width where there is no terminal.

terminal.draw(document, Console())
terminal.render(document, width=80)       # the same as a string
"""

from __future__ import annotations

import io
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

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
    Notes,
    Part,
    Profile,
    Select,
    Sentence,
    Table,
    Timeline,
    Tone,
)
from layerscope.report.writing import aligned, bar, landmarks, middle, number, printable, shares, spark, write

if TYPE_CHECKING:
    from rich.console import Console, RenderableType
    from rich.segment import Segments
    from rich.text import Text

SUFFIX = ".txt"
UNLIMITED = 10_000  # the width of a page that is not a terminal: nothing is shortened there
BAR_WIDTH = 14
NAME_WIDTH = 28  # a name keeps this much while there are columns left to give up
WHOLE_NAME, EXPENDABLE = 48, 3  # and this much while there are columns of such a rank
GAP = 2

_STYLES: dict[Tone, str] = {"plain": "", "good": "green", "warn": "yellow", "bad": "bold red", "quiet": "dim"}
_SIGNS: dict[Tone, str] = {"plain": "", "good": "✓ ", "warn": "! ", "bad": "✗ ", "quiet": ""}
_ASCII = {ord(a): b for a, b in zip("…\u00d7·→✓✗─│├└", "~x->+x-||`", strict=True)}


def render(document: Document, *, width: int | None = None, color: bool = False, ascii_only: bool = False) -> str:
    """Write the document as a terminal of that width would show it; None is as wide as need be."""
    from rich.console import Console

    console = Console(
        file=io.StringIO(),
        width=width or UNLIMITED,
        force_terminal=color,
        color_system="standard" if color else None,
        legacy_windows=False,
        _environ={},
    )
    return _TerminalPage(console, ascii_only).written(document)


def draw(document: Document, console: Console) -> None:
    """Print the document on the console, in the characters its encoding has."""
    console.file.write(_TerminalPage(console, console.options.ascii_only).written(document))


@dataclass(frozen=True, slots=True)
class _TerminalPage:
    console: Console
    ascii_only: bool

    def written(self, document: Document) -> str:
        with self.console.capture() as capture:
            for block in self._blocks(document):
                self.console.print(block, highlight=False, markup=False, emoji=False, crop=False)
        return "".join(line.rstrip() + "\n" for line in capture.get().splitlines())

    def _blocks(self, document: Document) -> Iterator[RenderableType]:
        from rich.cells import cell_len

        yield self._text(document.title, "bold")
        before: Part = Sentence("")
        under = max((cell_len(printable(p.title)) for p in document.parts if isinstance(p, Profile)), default=0)
        titled = [p for p in document.parts if isinstance(p, Facts) and _titled(p)]
        beside = max((cell_len(printable(f.label)) for p in titled for f in p.items), default=0)
        for part in document.parts:
            drawn = list(self._part(part, under, beside))
            if not drawn:
                continue
            together = type(part) is type(before) and (isinstance(part, Sentence | Profile) or _titled(part))
            if not together and not isinstance(before, Heading):
                yield self._text("")
            yield from drawn
            before = part

    def _part(self, part: Part, under: int, beside: int) -> Iterator[RenderableType]:
        from rich.cells import cell_len

        match part:
            case Data():
                pass
            case Heading():
                yield self._text(part.text, "bold cyan")
            case Fold():
                yield self._text(part.title, "bold")
                for inner in part.parts:
                    yield from self._part(inner, under, beside)
            case Select():
                for name, chosen in part.options:
                    yield self._text(f"{part.title}: {name}", "bold")
                    for inner in chosen:
                        yield from self._part(inner, under, beside)
            case _ if part.audience == "data":
                pass
            case Sentence():
                yield self._sentence(part)
            case Notes():
                for item in part.shown:
                    yield self._bullet(item)
            case Facts():
                yield from self._facts(part, beside)
            case Table():
                yield from self._table(part)
            case Profile():
                yield from self._profile(part, under)
            case Curves() | HeatMap() | Histograms():
                yield self._text(part.title)
                profiles = list(part.profiles())
                widest = max((cell_len(printable(profile.title)) for profile in profiles), default=0)
                for profile in profiles:
                    yield from self._profile(profile, widest)
            case Timeline():
                yield self._text(part.title)
                for event in part.events:
                    yield self._bullet(Sentence(f"{part.unit} {event.at:,}: {event.text}", event.tone))

    def _sentence(self, sentence: Sentence) -> Text:
        line = self._text(_SIGNS[sentence.tone], _STYLES[sentence.tone])
        style = "" if sentence.tone == "good" else _STYLES[sentence.tone]
        return line.append_text(self._text(sentence.text, style))

    def _bullet(self, item: Sentence) -> RenderableType:
        from rich.padding import Padding

        sign = self._text(_SIGNS[item.tone] or "· ", _STYLES[item.tone])
        return Padding(sign.append_text(self._text(item.text, _STYLES[item.tone])), (0, 0, 0, 1))

    def _facts(self, facts: Facts, beside: int) -> Iterator[RenderableType]:
        """Draw facts; those under titles have labels of one width, `beside` which the values stand."""
        from rich.padding import Padding
        from rich.table import Table as Grid

        shown = [fact for fact in facts.items if fact.audience != "data"]
        if facts.title:
            yield self._text(facts.title)
        grid = Grid.grid(padding=(0, GAP, 0, 0))
        grid.add_column(no_wrap=True, min_width=beside if facts.title else None)
        grid.add_column(overflow="fold")
        for fact in shown:
            value = self._text(write(fact.value, fact.kind), _STYLES[fact.tone])
            grid.add_row(self._text(fact.label, "dim"), value)
        if shown:
            yield Padding(grid, (0, 0, 0, GAP if facts.title else 0))

    def _profile(self, profile: Profile, under: int) -> Iterator[Text]:
        """Draw a profile; `under` is how wide the titles are, so that one line starts under the other."""
        found = landmarks(profile)
        if found is None:
            if profile.labels:
                yield self._text(f"{printable(profile.title)}: not measured", "dim")
            return
        line = self._text(middle(printable(profile.title), self._title_room), "dim")
        line.pad_right(min(under, self._title_room) - line.cell_len + GAP)
        first, last, peak = ((number(value), f"{number(value)} ({label})") for label, value in found)
        most = profile.log and peak not in (first, last)
        wanted = min(60, len(profile.values))
        for ends in (
            f"  {first[1]} → {last[1]}" + (f", at most {peak[1]}" if most else ""),
            f"  {first[0]} → {last[0]}" + (f", at most {peak[0]}" if most else ""),
            f"  {first[0]} → {last[0]}",
        ):
            after = self._text(ends)
            if line.cell_len + wanted + after.cell_len <= self.console.width:
                break
        room = min(60, self.console.width - line.cell_len - after.cell_len)
        drawn = spark(profile.values, max(8, room), log=profile.log, span=profile.span, ascii_only=self.ascii_only)
        yield line.append_text(self._text(drawn, "cyan")).append_text(after)

    @property
    def _title_room(self) -> int:
        return max(8, self.console.width // 3)

    def _table(self, table: Table) -> Iterator[RenderableType]:
        columns = [
            self._written(column, [row[at] for row in table.rows[: table.most]])
            for at, column in enumerate(table.columns)
            if column.audience != "data"
        ]
        kept, name_width = self._fitting(columns)
        yield self._side_by_side(kept, len(table.rows[: table.most]), name_width)
        if table.left_over:
            yield self._text(f"and {table.left_over:,} more", "dim")
        if len(kept) < len(columns):
            titles = " ".join(printable(c.title) for c in columns if c not in kept)
            yield self._text(f"left out for want of width: {titles}", "dim")

    def _side_by_side(self, columns: list[_Written], rows: int, name_width: int) -> Segments:
        """Draw columns as lines of padded texts: rich's own table takes a millisecond for each."""
        from rich.cells import cell_len, set_cell_size
        from rich.segment import Segment, Segments

        texts = [[c.header, *(c.shown(at, name_width) for at in range(rows))] for c in columns]
        widths = [max(map(cell_len, column)) for column in texts]
        while sum(widths) + GAP * (len(widths) - 1) > self.console.width and max(widths) > 1:
            widths[widths.index(max(widths))] -= 1
        drawn: list[Segment] = []
        for at, row in enumerate(zip(*texts, strict=True)):
            for column, text, width in zip(columns, row, widths, strict=True):
                shown = text if cell_len(text) <= width else set_cell_size(text, width - 1) + "…"
                shown = shown.translate(_ASCII) if self.ascii_only else shown
                style = column.styles[at - 1] if at else "dim"
                padding = " " * (width - cell_len(shown))
                before, after = (padding, "") if column.is_right else ("", padding)
                styled = self.console.get_style(style) if style else None
                drawn += [Segment(before), Segment(shown, styled), Segment(f"{after}{'':{GAP}}")]
            drawn.append(Segment.line())
        return Segments(drawn)

    def _fitting(self, columns: list[_Written]) -> tuple[list[_Written], int]:
        """Give up columns, the highest rank first, until the rest fits; names get what width is left.

        A column of a high rank gives way to whole names, one of a low rank only to names of some width: two layers'
        names that are shortened to the same tell less than any number beside them.
        """
        kept = list(columns)

        def too_narrow(for_names: int) -> bool:
            least = sum(min(c.width, for_names) if c.is_name else c.width for c in kept)
            return self.console.width < least + GAP * (len(kept) - 1)

        while any(c.rank for c in kept):
            highest = max(c.rank for c in kept)
            if not too_narrow(NAME_WIDTH if highest < EXPENDABLE else WHOLE_NAME):
                break
            kept = [c for c in kept if c.rank < highest]
        names = [c for c in kept if c.is_name]
        others = sum(c.width for c in kept if not c.is_name) + GAP * (len(kept) - 1)
        return kept, max(8, (self.console.width - others) // max(1, len(names)))

    def _written(self, column: Column, cells: list[Cell]) -> _Written:
        styles = [_STYLES[c.tone] or ("cyan" if column.kind == "bar" else "") for c in cells]
        return _Written(column.title, column.kind, column.rank, tuple(self._texts(column, cells)), tuple(styles))

    def _texts(self, column: Column, cells: list[Cell]) -> list[str]:
        if column.kind == "bar":
            values = [float(c.value) if isinstance(c.value, int | float) else math.nan for c in cells]
            drawn = [bar(s, BAR_WIDTH, ascii_only=self.ascii_only) for s in shares(values, log=column.log)]
            return [d or ("" if c.value == 0 else write(c.value)) for d, c in zip(drawn, cells, strict=True)]
        texts = [printable(c.text) if c.text is not None else write(c.value, column.kind) for c in cells]
        if column.kind in ("number", "percent"):
            return [text.rjust(len(column.title)) for text in aligned(texts)]
        if any(c.depth is not None for c in cells):
            return [g + t for g, t in zip(_guides([c.depth or 0 for c in cells]), texts, strict=True)]
        return texts

    def _text(self, text: str, style: str = "") -> Text:
        from rich.text import Text

        text = printable(text)
        return Text(text.translate(_ASCII) if self.ascii_only else text, style=style)


@dataclass(frozen=True, slots=True)
class _Written:
    """A column whose cells are texts already."""

    title: str
    kind: Kind
    rank: int
    texts: tuple[str, ...]
    styles: tuple[str, ...]

    @property
    def is_name(self) -> bool:
        return self.kind == "name"

    @property
    def is_right(self) -> bool:
        return self.kind in ("count", "bytes")  # numbers are padded already

    @property
    def header(self) -> str:
        return self.title.rjust(self.width) if self.kind in ("number", "percent") else self.title

    @property
    def width(self) -> int:
        from rich.cells import cell_len

        return max(map(cell_len, (*self.texts, self.title)), default=0)

    def shown(self, at: int, name_width: int) -> str:
        return middle(self.texts[at], name_width) if self.is_name else self.texts[at]


def _titled(part: Part) -> bool:
    return isinstance(part, Facts) and bool(part.title)


def _guides(depths: Sequence[int]) -> Iterator[str]:
    """Draw the branches of a tree given how deep each of its lines stands.

    >>> list(_guides([0, 1, 2, 1]))
    ['', '├ ', '│ └ ', '└ ']
    """
    more: dict[int, bool] = {}  # whether a later line hangs from the same branch, by depth
    drawn = []
    for depth in reversed(depths):
        ends = "├ " if more.get(depth) else "└ "
        drawn.append("".join("│ " if more.get(d) else "  " for d in range(1, depth)) + (ends if depth else ""))
        more = {d: True for d in more if d < depth} | {depth: True}
    return reversed(drawn)
