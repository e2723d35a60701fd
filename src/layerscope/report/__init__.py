"""Documents and their renderers: parts in between, one file for each kind of page.

    from layerscope.report import Document, Sentence, terminal
    terminal.draw(Document("hello", (Sentence("all is well", tone="good"),)), console)

This package knows no run, row or verdict: the owner of a value builds its document.
"""

from __future__ import annotations

from layerscope.report import html, json, markdown, terminal
from layerscope.report.parts import (
    Cell,
    Column,
    Curves,
    Data,
    Document,
    Event,
    Fact,
    Facts,
    Fold,
    Heading,
    HeatMap,
    Histograms,
    Line,
    Notes,
    Part,
    Profile,
    Select,
    Sentence,
    Table,
    Timeline,
)

__all__ = [
    "Cell",
    "Column",
    "Curves",
    "Data",
    "Document",
    "Event",
    "Fact",
    "Facts",
    "Fold",
    "Heading",
    "HeatMap",
    "Histograms",
    "Line",
    "Notes",
    "Part",
    "Profile",
    "Select",
    "Sentence",
    "Table",
    "Timeline",
    "html",
    "json",
    "markdown",
    "terminal",
]
