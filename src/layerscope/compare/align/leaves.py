"""Which leaf of a module's value is which, where a compiler has renumbered them.

    found = pair_leaves(reference, candidate, apart)
    found.pairs; found.only_reference

A traced or exported module gives back what others use of it, in an order of its own, and sometimes what the source
keeps to itself: the router of a mixture of experts gives (logits, scores, choices) in the source, (choices, scores) if
it is traced. So a place in a tuple says nothing there. Leaves of one shape and one kind of numbers belong together and,
of several, those whose values lie nearest. Where both list the same leaves, names are trusted, unless the values are
exactly those of another order and what runs next agrees (`exchanged`).
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import NamedTuple, TypeAlias

from layerscope.compare.align.run_points import Form, RunPoint
from layerscope.points import Point, leaf_text

Apart: TypeAlias = Callable[[Point, Point], float]


NEAR, FAR = 2.0**-7, 2.0**-3  # apart: the same values in any precision; certainly not the same
_COMPILERS = "compilers leave out unused values, and show what the source keeps to itself"


class LeafPair(NamedTuple):
    """Two leaves that hold the same value, and how that is known."""

    reference: Point
    candidate: Point
    because: str


class Leaves(NamedTuple):
    """The pairs among the leaves of one value, and what is left of either side, with a sentence each."""

    pairs: list[LeafPair]
    only_reference: list[tuple[Point, str]]
    only_candidate: list[tuple[Point, str]]


def pair_leaves(reference: Sequence[RunPoint], candidate: Sequence[RunPoint], apart: Apart) -> Leaves:
    """Pair the leaves of one value in two runs by shape and kind of numbers, then by how near their values are.

    Nothing is paired, and nothing settled, where names can be trusted (both sides list the same leaves), and where not
    a single leaf fits: then the value itself is another.
    """
    if {(seen.point.leaf, seen.form) for seen in reference} == {(seen.point.leaf, seen.form) for seen in candidate}:
        return Leaves([], [], [])
    ours, theirs = _by_form(reference), _by_form(candidate)
    pairs = [pair for form in ours for pair in _nearest(form, ours[form], theirs.get(form, []), apart)]
    if not pairs:
        return Leaves([], [], [])
    taken = {point for pair in pairs for point in (("reference", pair.reference), ("candidate", pair.candidate))}
    left = [
        [(s.point, _why(s, here, there, role=other)) for s in side if (role, s.point) not in taken]
        for side, here, there, role, other in (
            (reference, ours, theirs, "reference", "candidate"),
            (candidate, theirs, ours, "candidate", "reference"),
        )
    ]
    return Leaves(pairs, *left)


def exchanged(reference: Sequence[RunPoint], candidate: Sequence[RunPoint], apart: Apart) -> list[LeafPair]:
    """Pair the same leaves in another order; nothing unless every value is near then and some are far without it."""
    ours, theirs = _by_form(reference), _by_form(candidate)
    pairs = [pair for form in ours for pair in _nearest(form, ours[form], theirs.get(form, []), apart)]
    moved = [pair for pair in pairs if pair.reference.leaf != pair.candidate.leaf]
    if len(pairs) < len(reference) or not moved:
        return []
    before = max(apart(pair.reference, replace(pair.candidate, leaf=pair.reference.leaf)) for pair in moved)
    after = max(apart(pair.reference, pair.candidate) for pair in moved)
    return pairs if after < NEAR and before > FAR else []


def _by_form(leaves: Sequence[RunPoint]) -> dict[Form | None, list[Point]]:
    found: dict[Form | None, list[Point]] = defaultdict(list)
    for seen in leaves:
        found[seen.form].append(seen.point)
    return found


def _nearest(form: Form | None, ours: Sequence[Point], theirs: Sequence[Point], apart: Apart) -> list[LeafPair]:
    """Pair leaves of one form, the nearest first; between equally near ones the name decides, then the order."""
    if form is None or not theirs:
        return []
    if len(ours) == len(theirs) == 1:
        because = f"{_same(ours[0], theirs[0])}, the only leaf of {_formed(form)}"
        return [LeafPair(ours[0], theirs[0], because)]
    far = {
        (i, j): (apart(mine, other), mine.leaf != other.leaf, i, j)
        for i, mine in enumerate(ours)
        for j, other in enumerate(theirs)
    }
    found: list[tuple[int, int]] = []
    for i, j in sorted(far, key=far.__getitem__):
        if all(i != a and j != b for a, b in found):
            found.append((i, j))
    several = f"of {len(ours)} and {len(theirs)} leaves of {_formed(form)} the nearest by value"
    return [LeafPair(ours[i], theirs[j], f"{_same(ours[i], theirs[j])}, {several}") for i, j in sorted(found)]


def _why(
    seen: RunPoint, here: Mapping[Form | None, list[Point]], there: Mapping[Form | None, list[Point]], *, role: str
) -> str:
    """Say why a leaf is left over, `there` being the other side, which is the run in the `role`."""
    own = "only the candidate has it: " if role == "reference" else ""
    if seen.form in there:
        counts = f"of {len(here[seen.form])} leaves of {_formed(seen.form)} here and {len(there[seen.form])} there"
        return f"{own}{counts}, the {role} has nearer ones for the others; {_COMPILERS}."
    leaves = [(point, form) for form, points in there.items() for point in points]
    listed = ", ".join(f"{leaf_text(p.leaf)} {_formed(form)}".strip() for p, form in sorted(leaves, key=_by_point))
    return f"{own}no leaf of this value holds {_formed(seen.form)} in the {role}, which has {listed}; {_COMPILERS}."


def _by_point(leaf: tuple[Point, Form | None]) -> Point:
    return leaf[0]


def _same(reference: Point, candidate: Point) -> str:
    texts = [leaf_text(point.leaf) or "the value itself" for point in (reference, candidate)]
    return f"{texts[0]} is {texts[1]}" if texts[0] != texts[1] else f"{texts[0]} in both"


def _formed(form: Form | None) -> str:
    return "of unknown shape" if form is None else f"{form[1]} {list(form[0])}"
