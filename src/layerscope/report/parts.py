"""What a page is made of, before anyone knows what kind of page it will be.

    Document("runs/fp32", (Sentence("complete: 24 points", tone="good"), Table.of("points", columns, rows)))

Parts hold values; renderers write them. A part with a `key` is found under that key in JSON. `Curves`, `HeatMap`,
`Histograms` and `Timeline` are pictures: lines of heights on a terminal, tables in Markdown, SVG on an HTML page.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal, TypeAlias

Audience = Literal["all", "page", "data"]  # "page" is for eyes only, "data" for machines only
Tone = Literal["plain", "good", "warn", "bad", "quiet"]
Kind = Literal["text", "name", "count", "number", "percent", "bytes", "bar"]
Value: TypeAlias = "str | int | float | bool | Sequence[Value] | Mapping[str, Value] | None"


@dataclass(frozen=True, slots=True)
class Heading:
    """A title within the page."""

    text: str


@dataclass(frozen=True, slots=True)
class Sentence:
    """Something to read; its tone is shown by a sign as well as by colour."""

    text: str
    tone: Tone = "plain"
    audience: Audience = "all"


@dataclass(frozen=True, slots=True)
class Notes:
    """Sentences that belong together; a page shows the first `most` and says how many more there are."""

    key: str
    items: tuple[Sentence, ...]
    most: int = 10
    audience: Audience = "all"

    @property
    def shown(self) -> tuple[Sentence, ...]:
        """What a page shows; machines read `items`."""
        rest = len(self.items) - self.most
        if rest < 2:  # "and 1 more" would take the line of the one
            return self.items
        return (*self.items[: self.most], Sentence(f"and {rest:,} more", "quiet"))


@dataclass(frozen=True, slots=True)
class Fact:
    """One label and its value."""

    label: str
    value: Value
    kind: Kind = "text"
    tone: Tone = "plain"
    audience: Audience = "all"


@dataclass(frozen=True, slots=True)
class Facts:
    """Labels and values, one under the other, and what they are called together."""

    key: str
    items: tuple[Fact, ...]
    title: str = ""
    audience: Audience = "all"


@dataclass(frozen=True, slots=True)
class Column:
    """How one column of a table is called, written and given up.

    `rank` 0 is always shown; the higher the rank, the sooner a page too narrow for all leaves the column
    out. `log` draws the bars of a `bar` column on a logarithmic scale.
    """

    key: str
    title: str
    kind: Kind = "text"
    rank: int = 0
    audience: Audience = "all"
    log: bool = False


@dataclass(frozen=True, slots=True)
class Cell:
    """A value in a table; `text` is what a page shows for it, `depth` how far down a tree it stands.

    `link` is a path on the server that serves the page; elsewhere there is none.
    """

    value: Value
    tone: Tone = "plain"
    text: str | None = None
    depth: int | None = None
    link: str = ""


@dataclass(frozen=True, slots=True)
class Table:
    """Rows under columns. `Table.of` takes bare values as well as cells.

    Tables of one key stand apart on a page and are one list in JSON. A page shows the first `most` rows and
    says how many more there are; machines get all. `opens` names for each row the `Fold` that tells more of it, or "".
    """

    key: str
    columns: tuple[Column, ...]
    rows: tuple[tuple[Cell, ...], ...]
    most: int | None = None
    audience: Audience = "all"
    opens: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if self.opens and len(self.opens) != len(self.rows):
            raise ValueError(f"table {self.key!r} has {len(self.rows)} rows and opens {len(self.opens)}")
        for at, row in enumerate(self.rows):
            if len(row) != len(self.columns):
                raise ValueError(f"row {at} of table {self.key!r} has {len(row)} cells for {len(self.columns)} columns")

    @property
    def left_over(self) -> int:
        """How many rows a page leaves out."""
        return max(0, len(self.rows) - self.most) if self.most is not None else 0

    @classmethod
    def of(
        cls,
        key: str,
        columns: Sequence[Column],
        rows: Iterable[Iterable[Cell | Value]],
        *,
        most: int | None = None,
        audience: Audience = "all",
        opens: Iterable[str] = (),
    ) -> Table:
        """Make a table of cells and bare values."""
        cells = (tuple(c if isinstance(c, Cell) else Cell(c) for c in row) for row in rows)
        return cls(key, tuple(columns), tuple(cells), most, audience, tuple(opens))


@dataclass(frozen=True, slots=True)
class Profile:
    """One number over depth or time: drawn as a line on a page, a list in JSON.

    None is where nothing was measured. `log` draws on a logarithmic scale; `span` is the scale's lower and upper end
    where several lines share one, else a line has its own.
    """

    key: str
    title: str
    labels: tuple[str, ...]
    values: tuple[float | None, ...]
    log: bool = False
    span: tuple[float, float] | None = None
    audience: Audience = "all"

    def __post_init__(self) -> None:
        if len(self.labels) != len(self.values):
            raise ValueError(f"profile {self.key!r} has {len(self.labels)} labels for {len(self.values)} values")


# Pictures ---------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Line:
    """One series of `Curves`; `floor` is how much noise alone makes at each place, the upper edge of a band."""

    name: str
    values: tuple[float | None, ...]
    floor: tuple[float | None, ...] = ()


@dataclass(frozen=True, slots=True)
class Curves:
    """Several numbers over depth, time, tokens or channels, on one scale; None is where nothing was measured.

    `labels` names the places, `across` what they are together, `unit` what is measured.
    """

    key: str
    title: str
    labels: tuple[str, ...]
    lines: tuple[Line, ...]
    log: bool = False
    across: str = ""
    unit: str = ""
    audience: Audience = "all"

    def __post_init__(self) -> None:
        for line in self.lines:
            if not len(self.labels) == len(line.values) == len(line.floor or line.values):
                raise ValueError(
                    f"line {line.name!r} of {self.key!r} has {len(line.values)} values and "
                    f"{len(line.floor)} floors for {len(self.labels)} labels"
                )

    @property
    def span(self) -> tuple[float, float] | None:
        """The smallest and the largest finite number to be drawn; None: nothing can be."""
        return _span((v for line in self.lines for v in (*line.values, *line.floor)), log=self.log)

    def profiles(self) -> Iterator[Profile]:
        """Draw each line by itself, on the common scale."""
        for line in self.lines:
            yield Profile(self.key, line.name, self.labels, line.values, self.log, self.span)


@dataclass(frozen=True, slots=True)
class HeatMap:
    """A number for each row and column: layers and modes, layers and steps, queries and keys.

    None is where nothing was measured. `square` draws cells as high as wide. `span` is the scale's lower and upper end
    where it is not that of the values; with `log`, what is not positive lies below the scale.
    """

    key: str
    title: str
    rows: tuple[str, ...]
    columns: tuple[str, ...]
    values: tuple[tuple[float | None, ...], ...]
    log: bool = False
    unit: str = ""
    square: bool = False
    across: str = ""
    audience: Audience = "all"

    def __post_init__(self) -> None:
        if len(self.values) != len(self.rows) or any(len(row) != len(self.columns) for row in self.values):
            raise ValueError(f"heat map {self.key!r} is not {len(self.rows)} rows of {len(self.columns)} values")

    @property
    def span(self) -> tuple[float, float] | None:
        """The smallest and the largest finite number to be drawn; None: nothing can be."""
        return _span((v for row in self.values for v in row), log=self.log)

    def profiles(self) -> Iterator[Profile]:
        """Draw each row as a line of heights, all on one scale."""
        for name, values in zip(self.rows, self.values, strict=True):
            yield Profile(self.key, name, self.columns, values, self.log, self.span)


@dataclass(frozen=True, slots=True)
class Histograms:
    """Counts between edges, of one tensor or of the two sides of a pair: the first is the reference."""

    key: str
    title: str
    edges: tuple[float, ...]
    counts: tuple[tuple[str, tuple[int, ...]], ...]
    audience: Audience = "all"

    def __post_init__(self) -> None:
        if any(len(counts) != len(self.edges) - 1 for _, counts in self.counts):
            raise ValueError(f"histogram {self.key!r} has {len(self.edges)} edges for other numbers of counts")

    @property
    def bins(self) -> tuple[str, ...]:
        """The stretch of each bin, as text."""
        return tuple(f"{a:.4g} to {b:.4g}" for a, b in zip(self.edges, self.edges[1:], strict=False))

    def profiles(self) -> Iterator[Profile]:
        """Draw the counts of each side as a line of heights."""
        most = max((n for _, counts in self.counts for n in counts), default=0)
        for name, counts in self.counts:
            yield Profile(self.key, name, self.bins, counts, log=True, span=(0.5, max(1, most)))


@dataclass(frozen=True, slots=True)
class Event:
    """Something that happened at a place on a timeline."""

    at: int
    text: str
    tone: Tone = "bad"


@dataclass(frozen=True, slots=True)
class Timeline:
    """What happened when, between the first and the last of `span`; `unit` is what is counted."""

    key: str
    title: str
    span: tuple[int, int]
    events: tuple[Event, ...]
    unit: str = "step"
    audience: Audience = "all"


Picture: TypeAlias = Curves | HeatMap | Histograms | Timeline


def _span(values: Iterable[float | None], *, log: bool) -> tuple[float, float] | None:
    there = [v for v in values if v is not None and math.isfinite(v) and (v > 0 or not log)]
    return (min(there), max(there)) if there else None


# What holds other parts -------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Fold:
    """Parts that are read when one asks for them: closed on an HTML page, whole elsewhere; not for machines.

    A row of a table, or the address `#row=KEY`, opens the one of that key.
    """

    title: str
    parts: tuple[Part, ...]
    key: str = ""
    tone: Tone = "plain"


@dataclass(frozen=True, slots=True)
class Select:
    """Parts of which one is looked at: the same map by several measures, several moments; not for machines."""

    title: str
    options: tuple[tuple[str, tuple[Part, ...]], ...]


def renamed(parts: Iterable[Part], prefix: str) -> tuple[Part, ...]:
    """Return the parts with other keys for their folds, so that several pages can stand on one."""
    found: list[Part] = []
    for part in parts:
        match part:
            case Fold():
                key = f"{prefix}{part.key}" if part.key else ""
                found.append(replace(part, parts=renamed(part.parts, prefix), key=key))
            case Select():
                found.append(replace(part, options=tuple((name, renamed(of, prefix)) for name, of in part.options)))
            case Table() if part.opens:
                found.append(replace(part, opens=tuple(f"{prefix}{key}" if key else "" for key in part.opens)))
            case _:
                found.append(part)
    return tuple(found)


@dataclass(frozen=True, slots=True)
class Data:
    """A value for machines alone: it stands under its key in JSON, and no page draws it.

    A function is called when JSON is written; a page does not pay for it.
    """

    key: str
    value: Value | Callable[[], Value]


Part: TypeAlias = "Heading | Sentence | Notes | Facts | Table | Profile | Picture | Fold | Select | Data"
KEYED = Notes | Facts | Table | Profile | Curves | HeatMap | Histograms | Timeline


@dataclass(frozen=True, slots=True)
class Document:
    """A title and its parts, top to bottom."""

    title: str
    parts: tuple[Part, ...]

    def __post_init__(self) -> None:
        # JSON files the parts under their keys; the second of two would hide the first.
        filed = [p for p in self.parts if not isinstance(p, KEYED) or p.audience != "page"]
        keys = ["title", "sentences", *dict.fromkeys(p.key for p in filed if isinstance(p, Table))]
        keys += [p.key for p in filed if isinstance(p, KEYED | Data) and not isinstance(p, Table)]
        twice = sorted({k for k in keys if keys.count(k) > 1})
        if twice:
            raise ValueError(f"two parts of the document {self.title!r} are called {', '.join(twice)}")
