"""A document as strict JSON: what has a key stands under it, what is read stands under `sentences`.

{"title": ..., "sentences": [{"text": ..., "tone": ...}], "points": [{"point": ..., "mean": ...}]}
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from typing import TypeAlias

from layerscope.report.parts import (
    Curves,
    Data,
    Document,
    Facts,
    Fold,
    Heading,
    HeatMap,
    Histograms,
    Notes,
    Profile,
    Select,
    Sentence,
    Table,
    Timeline,
    Value,
)

SUFFIX = ".json"
JSON: TypeAlias = "dict[str, JSON] | list[JSON] | str | int | float | bool | None"


def render(document: Document) -> str:
    """Write the document as one JSON object.

    Everything outside ASCII is escaped: the text reads back the same, and no name can steer the terminal it
    is printed on.
    """
    sentences: list[JSON] = []
    page: dict[str, JSON] = {"title": document.title, "sentences": sentences}
    for part in document.parts:
        match part:
            case Heading() | Fold() | Select():
                pass  # a heading names what follows, and the keys do that here; the others are for eyes
            case Data():
                page[part.key] = strict(part.value() if callable(part.value) else part.value)
            case _ if part.audience == "page":
                pass
            case Sentence():
                sentences.append(_sentence(part))
            case Notes():
                page[part.key] = [_sentence(s) for s in part.items]
            case Facts():
                page[part.key] = {fact.label: strict(fact.value) for fact in part.items if fact.audience != "page"}
            case Table():
                kept = [(i, c.key) for i, c in enumerate(part.columns) if c.audience != "page"]
                rows = page.setdefault(part.key, [])
                assert isinstance(rows, list)  # a document has no second part of another kind under this key
                rows += [{key: strict(row[i].value) for i, key in kept} for row in part.rows]
            case Profile():
                page[part.key] = {"labels": list(part.labels), "values": [strict(v) for v in part.values]}
            case Curves():
                page[part.key] = {
                    "labels": list(part.labels),
                    "lines": [
                        {"name": line.name, "values": strict(line.values), "floor": strict(line.floor)}
                        for line in part.lines
                    ],
                }
            case HeatMap():
                page[part.key] = {
                    "rows": list(part.rows),
                    "columns": list(part.columns),
                    "values": [strict(row) for row in part.values],
                }
            case Histograms():
                counts: dict[str, JSON] = {name: list(counts) for name, counts in part.counts}
                page[part.key] = {"edges": strict(part.edges), "counts": counts}
            case Timeline():
                page[part.key] = [{"at": event.at, "text": event.text, "tone": event.tone} for event in part.events]
    return json.dumps(page, indent=1, allow_nan=False) + "\n"


def strict(value: Value) -> JSON:
    """Return the value with non-finite numbers as named strings, because JSON has none.

    >>> strict([1.0, float("nan"), float("-inf")])
    [1.0, 'NaN', '-Infinity']
    """
    if isinstance(value, float) and not math.isfinite(value):
        return "NaN" if math.isnan(value) else "Infinity" if value > 0 else "-Infinity"
    if value is None or isinstance(value, str | int | float):
        return value
    if isinstance(value, Mapping):
        return {key: strict(v) for key, v in value.items()}
    return [strict(v) for v in value]


def _sentence(sentence: Sentence) -> JSON:
    return {"text": sentence.text, "tone": sentence.tone}
