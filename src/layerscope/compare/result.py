"""What a comparison found: rows, verdicts, and all of them together.

result = compare("runs/fp32", "runs/int8", noise="runs/bf16")
result.verdict                    # Verdict('differs', because='model.layers.3.mlp.up_proj parts first: ...')
result.first_divergence           # the row where the first candidate parts from the reference, or None
result["int8"].rows               # one candidate's
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal, get_args

from layerscope.checks import ErrorNumbers
from layerscope.compare.measure.metrics import Metrics
from layerscope.errors import NoSuchPoint
from layerscope.points import Moment, Point

Kind = Literal["same", "noise", "inherited", "root", "nonfinite", "degenerate", "missing", "unpaired"]
KINDS: tuple[Kind, ...] = get_args(Kind)
PARTED: tuple[Kind, ...] = ("root", "nonfinite", "inherited")
Word = Literal["same", "noise", "quantised", "cannot tell", "differs"]


@dataclass(frozen=True, slots=True)
class Floor:
    """How much error is to be expected here without any fault: a relative L2 error, and what says so.

    `source` is `floors`, the address of a noise run, or `estimate`.
    """

    error: float
    source: str


@dataclass(frozen=True, slots=True)
class Row:
    """One aligned pair, or one point that found no partner, with the judgement and its reason.

    `point` is the reference's name, or the candidate's where only that has it (`reference_has` is False then);
    `counterpart` is the candidate's. `method` says how the two were paired. `ratio` is the relative L2 error over the
    floor in the class of `arithmetic`, `excess` the number that is furthest over its limit, in limits, `checked` the
    same of the module's own check. `evidence` says by what a root is one: `weights`, `check` or `excess`. Where
    rounding alone is `chaotic`, nothing is told. `numbers` are those that were judged: without padding and without rows
    that choices sent elsewhere.
    """

    point: Point
    moment: Moment
    candidate: str
    kind: Kind
    because: str
    counterpart: Point | None = None
    method: str = ""
    metrics: Metrics | None = None
    floor: Floor | None = None
    ratio: float | None = None
    reference_has: bool = True
    excess: float | None = None
    evidence: str = ""
    checked: float | None = None
    arithmetic: str = ""
    chaotic: bool = False
    numbers: ErrorNumbers | None = None

    @property
    def name(self) -> str:
        """The module's name, as the reference has it."""
        return self.point.name

    @property
    def parted(self) -> bool:
        """Whether the two sides differ by more than the floor explains."""
        return self.kind in PARTED

    def __str__(self) -> str:
        text = str(self.point)
        return text.removesuffix(":output") if self.point.side == "output" and not self.point.leaf else text


@dataclass(frozen=True, slots=True)
class Verdict:
    """The judgement and its reason; its text is the one word."""

    word: Word
    because: str

    def __str__(self) -> str:
        return self.word


@dataclass(frozen=True, slots=True)
class Against:
    """One candidate against the reference: its rows in the order the reference ran, and what they come to.

    `basis` says on what the verdict rests: a noise run, or an estimate. `notes` says what is partial or odd about the
    data, `unread` which records could not be read, a sentence each.
    """

    candidate: str
    address: str
    layout: str
    rows: tuple[Row, ...]
    verdict: Verdict
    basis: str
    notes: tuple[str, ...] = ()
    unread: tuple[str, ...] = ()

    @property
    def first_divergence(self) -> Row | None:
        """The first row that differs by more than the floor explains, in the order the reference ran."""
        return next((row for row in self.rows if row.kind in ("root", "nonfinite")), None)

    @property
    def compared(self) -> list[Row]:
        """The rows whose tensors were measured."""
        return [row for row in self.rows if row.metrics is not None]


@dataclass(frozen=True, slots=True)
class Comparison:
    """A reference and its candidates."""

    reference: str
    address: str
    layout: str
    candidates: tuple[Against, ...]
    noise: tuple[str, ...] = ()

    def __getitem__(self, candidate: str) -> Against:
        for against in self.candidates:
            if against.candidate == candidate:
                return against
        raise NoSuchPoint(f"no candidate is called {candidate!r}; there is {', '.join(a.candidate for a in self)}")

    def __iter__(self) -> Iterator[Against]:
        return iter(self.candidates)

    def __len__(self) -> int:
        return len(self.candidates)

    @property
    def rows(self) -> list[Row]:
        """Every row of every candidate."""
        return [row for against in self.candidates for row in against.rows]

    @property
    def first_divergence(self) -> Row | None:
        """Where the first candidate that differs parts from the reference; None when none does."""
        return next((row for a in self.candidates if (row := a.first_divergence) is not None), None)

    @property
    def verdict(self) -> Verdict:
        """The worst of the candidates' verdicts."""
        return max((a.verdict for a in self.candidates), key=lambda v: _severity(v.word))

    def __str__(self) -> str:
        from layerscope.compare.page.document import document
        from layerscope.report import terminal

        return terminal.render(document(self))

    def to_html(self, path: str | os.PathLike[str]) -> None:
        """Write the report to look at: one file, which needs nothing else."""
        from layerscope.compare.page.html_page import page
        from layerscope.report import html

        html.save(page(self), path)

    def _repr_html_(self) -> str:
        from layerscope.compare.page.html_page import summary
        from layerscope.report import html

        return html.fragment(summary(self))

    def plot(self) -> Any:
        """Draw the error over depth as a matplotlib figure; raises MissingExtra without matplotlib."""
        from layerscope.compare.page.html_page import curves
        from layerscope.report.plots import figure

        return figure(*curves(self))


def _severity(word: Word) -> int:
    order: Sequence[Word] = get_args(Word)
    return order.index(word)
