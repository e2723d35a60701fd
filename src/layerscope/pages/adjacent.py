"""The change from each layer to the next.

    for chain in chains(entries):
        changes(chain, tell)

A chain is a row of numbered modules whose values have one shape, with what feeds the first of them in front:
`model.embed_tokens`, `model.layers.0`, `model.layers.1` ... Each change is that of an element at its own place.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING, Any, Literal

from layerscope.errors import LayerscopeError

if TYPE_CHECKING:
    from layerscope.store import Entry


@dataclass(frozen=True, slots=True)
class Change:
    """What happened between two layers, over the places where both are finite.

    `basis` "summaries" gives what statistics alone prove: no less than this, and nothing about the direction.
    """

    before: Entry
    after: Entry
    basis: Literal["tensors", "summaries", "nothing"]
    max_abs: float = math.nan
    mean_abs: float = math.nan
    relative_l2: float = math.nan
    cosine: float = math.nan
    nonfinite: int = 0
    because: str = ""


def chains(entries: Sequence[Entry], *, layers_only: bool) -> list[list[Entry]]:
    """Find the rows of like-shaped neighbours among the records of one step, in the order they ran.

    `layers_only` leaves out what lies inside the numbered modules, where there are numbered modules at all.
    """
    rows: dict[Any, list[Entry]] = {}
    for entry in entries:
        if (at := _first_number(entry.point.name)) is not None:
            rows.setdefault(_row(entry, at), []).append(entry)
    if layers_only:
        rows = {k: row for k, row in rows.items() if _is_layer(row[0].point.name)} or rows
    found = [piece for row in rows.values() for piece in _alike(row, by=_first_number)]
    linked = {id(e) for piece in found for e in piece}
    # Where the outer number changes the shape (the stages of a vision model), the inner one makes the row.
    inner: dict[Any, list[Entry]] = {}
    for row in rows.values():
        for entry in row:
            if id(entry) not in linked and (at := _last_number(entry.point.name)) is not None:
                inner.setdefault(_row(entry, at), []).append(entry)
    found += [piece for row in inner.values() for piece in _alike(row, by=_last_number)]
    order = {id(e): i for i, e in enumerate(entries)}
    found.sort(key=lambda piece: order[id(piece[0])])
    return [[*_fed_by(piece[0], entries), *piece] for piece in found]


def changes(chain: Sequence[Entry], progress: Callable[[str], None]) -> Iterator[Change]:
    """Yield the change over each link of a chain, measured as a comparison would."""
    from layerscope.compare.measure import measure

    for a, b in pairwise(chain):
        progress(b.point.place)
        if a.dtype is None or b.dtype is None:
            yield _from_summaries(a, b)
            continue
        try:
            m = measure(a, b)
        except LayerscopeError as error:  # one bad record does not hide the others
            yield Change(a, b, "nothing", because=str(error))
        else:
            broken = m.nonfinite.either
            yield Change(a, b, "tensors", m.max_abs, m.mean_abs, m.relative_l2, m.cosine, broken)


def _from_summaries(before: Entry, after: Entry) -> Change:
    """Give the lower bounds that follow from statistics: norms, extremes and means move no faster than elements."""
    a, b = before.summary, after.summary
    if a is None or b is None:
        return Change(before, after, "nothing", because="neither tensors nor summaries were kept")
    if a.finite != a.count or b.finite != b.count:
        return Change(before, after, "nothing", because="not all values are finite, and only the summaries were kept")
    return Change(
        before,
        after,
        "summaries",
        max_abs=max(abs(b.max - a.max), abs(b.min - a.min)),
        mean_abs=abs(b.mean - a.mean),
        relative_l2=_share(abs(b.l2 - a.l2), a.l2),
    )


def _share(part: float, whole: float) -> float:
    return part / whole if whole else (math.inf if part else 0.0)


# Which points are neighbours --------------------------------------------------------------------


def _numbers(name: str) -> list[int]:
    return [at for at, part in enumerate(name.split(".")) if part.isdecimal()]


def _first_number(name: str) -> int | None:
    return next(iter(_numbers(name)), None)


def _last_number(name: str) -> int | None:
    return next(reversed(_numbers(name)), None)


def _is_layer(name: str) -> bool:
    parts = name.split(".")
    return _first_number(name) == len(parts) - 1


def _row(entry: Entry, at: int) -> Any:
    point, parts = entry.point, entry.point.name.split(".")
    return (point.op, point.side, point.leaf, entry.moment.call, *parts[:at], None, *parts[at + 1 :])


def _shape(entry: Entry) -> object:
    if entry.shape is not None:
        return entry.shape
    return entry.summary.shape if entry.summary is not None else None


def _alike(row: list[Entry], *, by: Callable[[str], int | None]) -> Iterator[list[Entry]]:
    """Put a row in order of its numbers and cut it where the shape changes; single pieces are no chain."""

    def number(entry: Entry) -> int:
        at = by(entry.point.name)
        assert at is not None
        return int(entry.point.name.split(".")[at])

    piece: list[Entry] = []
    for entry in sorted(row, key=number):
        if piece and _shape(entry) != _shape(piece[-1]):
            if len(piece) > 1:
                yield piece
            piece = []
        piece.append(entry)
    if len(piece) > 1:
        yield piece


def _fed_by(first: Entry, entries: Sequence[Entry]) -> list[Entry]:
    """Return what stands in front of a row of layers: the last like-shaped neighbour of the list that ran before it."""
    point = first.point
    if not _is_layer(point.name):
        return []
    above = point.name.split(".")[:-2]
    found: list[Entry] = []
    for entry in entries:
        if entry is first:
            return found
        other = entry.point
        beside = not other.op and other.name and other.name.split(".")[:-1] == above
        if beside and _first_number(other.name) is None and other.side == point.side and _like(entry, first):
            found = [entry]
    return []


def _like(entry: Entry, other: Entry) -> bool:
    return _shape(entry) == _shape(other) and entry.moment.call == other.moment.call
