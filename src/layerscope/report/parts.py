"""What a page is made of, before anyone knows what kind of page it will be.

    Document("runs/fp32", (Sentence("complete: 24 points", tone="good"), Table.of("points", columns, rows)))

Parts hold values; renderers write them. A part with a `key` is found under that key in JSON.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, TypeAlias

__all__ = [
    "Audience",
    "Cell",
    "Column",
    "Data",
    "Document",
    "Fact",
    "Facts",
    "Heading",
    "Kind",
    "Notes",
    "Part",
    "Profile",
    "Sentence",
    "Table",
    "Tone",
    "Value",
]

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
    """A value in a table; `text` is what a page shows for it, `depth` how far down a tree it stands."""

    value: Value
    tone: Tone = "plain"
    text: str | None = None
    depth: int | None = None


@dataclass(frozen=True, slots=True)
class Table:
    """Rows under columns. `Table.of` takes bare values as well as cells.

    Tables of one key stand apart on a page and are one list in JSON. A page shows the first `most` rows and
    says how many more there are; machines get all.
    """

    key: str
    columns: tuple[Column, ...]
    rows: tuple[tuple[Cell, ...], ...]
    most: int | None = None
    audience: Audience = "all"

    def __post_init__(self) -> None:
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
    ) -> Table:
        """Make a table of cells and bare values."""
        cells = (tuple(c if isinstance(c, Cell) else Cell(c) for c in row) for row in rows)
        return cls(key, tuple(columns), tuple(cells), most, audience)


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


@dataclass(frozen=True, slots=True)
class Data:
    """A value for machines alone: it stands under its key in JSON, and no page draws it.

    A function is called when JSON is written; a page does not pay for it.
    """

    key: str
    value: Value | Callable[[], Value]


Part: TypeAlias = Heading | Sentence | Notes | Facts | Table | Profile | Data


@dataclass(frozen=True, slots=True)
class Document:
    """A title and its parts, top to bottom."""

    title: str
    parts: tuple[Part, ...]

    def __post_init__(self) -> None:
        # JSON files the parts under their keys; the second of two would hide the first.
        filed = [p for p in self.parts if not isinstance(p, Notes | Facts | Table | Profile) or p.audience != "page"]
        keys = ["title", "sentences", *dict.fromkeys(p.key for p in filed if isinstance(p, Table))]
        keys += [p.key for p in filed if isinstance(p, Notes | Facts | Profile | Data)]
        twice = sorted({k for k in keys if keys.count(k) > 1})
        if twice:
            raise ValueError(f"two parts of the document {self.title!r} are called {', '.join(twice)}")
