"""Documents and their renderers: parts in between, one file for each kind of page.

    from layerscope.report import Document, Sentence, terminal
    terminal.draw(Document("hello", (Sentence("all is well", tone="good"),)), console)

This package knows no run, row or verdict: whoever owns a value builds its document.
"""

from __future__ import annotations

from layerscope.report import json, markdown, terminal
from layerscope.report.parts import (
    Cell,
    Column,
    Data,
    Document,
    Fact,
    Facts,
    Heading,
    Notes,
    Part,
    Profile,
    Sentence,
    Table,
)

__all__ = [
    "Cell",
    "Column",
    "Data",
    "Document",
    "Fact",
    "Facts",
    "Heading",
    "Notes",
    "Part",
    "Profile",
    "Sentence",
    "Table",
    "json",
    "markdown",
    "terminal",
]
