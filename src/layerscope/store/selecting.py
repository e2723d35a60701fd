"""Which points of a run are meant.

selected(run, ["model.layers.*"])
"""

from __future__ import annotations

from collections.abc import Sequence

from layerscope.errors import BadText, NoSuchPoint
from layerscope.patterns import Place, select, select_op, split
from layerscope.points import Point
from layerscope.store.run import Run


def selected(run: Run, patterns: Sequence[str]) -> list[Point]:
    """Return the points of the run that the patterns name, or every one; raises NoSuchPoint when there are none."""
    if not patterns:
        return list(run.points)
    modules, ops = split(patterns)
    for pattern in modules:
        if pattern.kind == "type":
            raise BadText(f"{str(pattern)!r}: a run keeps names, not classes; `layerscope points RUN` lists them.")
    names = dict.fromkeys(p.name for p in run.points if not p.op)
    try:
        wanted = select(modules, [Place(name) for name in names]) if modules else []
    except NoSuchPoint as error:  # it speaks of a model, and this is a run
        raise NoSuchPoint(
            str(error).replace("`layerscope points MODEL`", f"`layerscope points {run.address}`")
        ) from None
    for name in dict.fromkeys(p.name for p in run.points if p.op):
        wanted += select_op(ops, name)
    by_place: dict[tuple[bool, str, str], list[Point]] = {}
    for point in wanted:
        by_place.setdefault((point.op, point.name, point.side), []).append(point)
    found = [
        p for p in run.points if any(p.leaf[: len(w.leaf)] == w.leaf for w in by_place.get((p.op, p.name, p.side), ()))
    ]
    if not found:
        raise NoSuchPoint(_nothing(run, patterns, wanted))
    return found


def _nothing(run: Run, patterns: Sequence[str], wanted: Sequence[Point]) -> str:
    asked = " ".join(repr(p) for p in patterns)
    names = {p.name for p in wanted}
    reasons = [m for m in run.missing if Point.parse(m.point).name in names] if names else []
    if reasons:
        return f"{asked} was asked for and is missing from the run: {reasons[0].point}: {reasons[0].reason}."
    there = [str(p) for p in run.points if p.name in names]
    if there:
        more = f" and {len(there) - 3} more" if len(there) > 3 else ""
        return f"{asked} matches no point of the run; there is {', '.join(there[:3])}{more}."
    return f"{asked} matches no point of the run; `layerscope points {run.address}` lists them all."
