"""Which point of one run is which of the other, and how that is known.

    align([RunPoint(Point("model.layers.0"), (2, 8), 1)], [RunPoint(Point("layers.0"), (2, 8), 1)]).pairs

The surest way first: a declared rule; the leaves of one module by their shapes and values, where a compiler has
renumbered them (`leaves.py`); the same name; a name that means the same (`normalised`); and, where nothing else is
left, the order of execution among equally many points of one shape. What finds no partner is a result too, with a
sentence. A guess is never made: what two points of one run could be, neither is.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Literal

from layerscope.compare.align.leaves import NEAR, Apart, exchanged, pair_leaves
from layerscope.compare.align.names import canonical, ending_of, tower_of
from layerscope.compare.align.pairing import PairingRule
from layerscope.compare.align.run_points import Meaning, RunPoint, RunPoints, grouped, primary, same_leaf
from layerscope.compare.align.unmatched import Unmatched, matches_nothing
from layerscope.errors import NoSuchPoint
from layerscope.points import Point, leaf_text, unwrapped

Method = Literal["override", "leaves", "exact", "normalised", "order"]


@dataclass(frozen=True, slots=True)
class Pair:
    """Two points that are the same place, how that is known, and a few words of reason.

    A cut is a start and a stop along the last axis: one part of a fused projection. `flat` is what a rule declares: the
    same values in the same order, whatever the shapes.
    """

    reference: Point
    candidate: Point
    method: Method
    because: str
    reference_cut: tuple[int, int] | None = None
    candidate_cut: tuple[int, int] | None = None
    flat: bool = False


@dataclass(frozen=True, slots=True)
class Alignment:
    """The pairs, in the reference's order, and what found no partner, with a sentence each."""

    pairs: tuple[Pair, ...]
    only_reference: tuple[tuple[Point, str], ...]
    only_candidate: tuple[tuple[Point, str], ...]
    ignored: tuple[Point, ...]
    idle: Mapping[PairingRule, str] = field(default_factory=dict)  # rules that match nothing here, and why


def align(
    reference: Sequence[RunPoint],
    candidate: Sequence[RunPoint],
    *,
    rules: Sequence[PairingRule] = (),
    apart: Apart | None = None,
    every_rule: bool = True,
) -> Alignment:
    """Pair the points of two runs, each given in its order of execution.

    `apart` tells how far the values of two points lie apart, where the names of leaves are not the source's own;
    without it they are trusted.

    Raises NoSuchPoint when a rule matches nothing, because a rule that silently matches nothing looks exactly like one
    that worked; unless `every_rule` is false, because rules may be meant for other candidates: then they are `idle`.
    """
    ignoring = [rule for rule in rules if rule.verb == "ignore"]
    ignored = {
        seen.point: None for seen in (*reference, *candidate) if any(rule.covers(seen.point) for rule in ignoring)
    }
    work = _Work(
        RunPoints("reference", [seen for seen in reference if seen.point not in ignored]),
        RunPoints("candidate", [seen for seen in candidate if seen.point not in ignored]),
    )
    for rule in ignoring:
        if not any(map(rule.covers, ignored)):
            work.idle[rule] = matches_nothing(rule, rule.left[0], "either run", (*reference, *candidate))
    for rule in rules:
        if rule.verb in ("pair", "rename"):
            work.override(rule)
        elif rule.verb in ("fuse", "split"):
            work.fuse(rule)
    work.understand()
    if apart is not None:
        work.leaves(apart)
    work.exact()
    work.normalised()
    work.in_order()
    flat = [rule for rule in rules if rule.verb == "flat"]
    for rule in flat:
        if not any(rule.covers(each.point) for each in (*reference, *candidate)):
            work.idle[rule] = matches_nothing(rule, rule.left[0], "either run", (*reference, *candidate))
    if every_rule and work.idle:
        raise NoSuchPoint(next(iter(work.idle.values())))
    pairs = _flattened(work.pairs, flat)
    reasons = Unmatched(work.reference, work.candidate)
    place = {seen.point: at for at, seen in enumerate(work.reference.seen)}
    return Alignment(
        tuple(sorted(pairs, key=lambda pair: place[pair.reference])),
        tuple((point, reasons.why(work.reference, work.candidate, point)) for point in work.reference.free),
        tuple((point, reasons.why(work.candidate, work.reference, point)) for point in work.candidate.free),
        tuple(ignored),
        work.idle,
    )


# The work ----------------------------------------------------------------------------------------


def _unwrapped_name(point: Point) -> Meaning:
    name = point.name if point.op else unwrapped(point.name).removeprefix("base_model.model.")
    return name, point.side, point.op, point.leaf


def _own_place(point: Point) -> Meaning:
    return point.name, point.side, point.op, None


class _Work:
    """The pairs so far, and what is free on both sides."""

    def __init__(self, reference: RunPoints, candidate: RunPoints) -> None:
        self.reference, self.candidate = reference, candidate
        self.pairs: list[Pair] = []
        self.idle: dict[PairingRule, str] = {}

    def add(self, pair: Pair) -> None:
        self.pairs.append(pair)
        self.reference.take(pair.reference)
        self.candidate.take(pair.candidate)

    # Declared

    def override(self, rule: PairingRule) -> None:
        found = [(point, meant) for point in self.reference.all if (meant := rule.counterpart(point)) is not None]
        if not found:
            self.idle[rule] = matches_nothing(rule, rule.left[0], "the reference", self.reference.seen)
            return
        there = [(point, meant, self.candidate.like(meant)) for point, meant in found]
        if not any(partner is not None for _, _, partner in there):
            self.idle[rule] = matches_nothing(rule, rule.right[0], "the candidate", self.candidate.seen)
            return
        for point, meant, partner in there:
            if partner is None:
                self.reference.say(point, f"the rule `{rule}` makes it {meant}, which the candidate does not have.")
            elif point not in self.reference.free or point in self.reference.settled:
                continue  # an earlier rule has spoken
            elif partner not in self.candidate.free or partner in self.candidate.settled:
                self.reference.settle(
                    point, f"the rule `{rule}` makes it {meant}, of which an earlier rule has spoken."
                )
            else:
                self.add(Pair(point, partner, "override", f"rule `{rule}`"))

    def fuse(self, rule: PairingRule) -> None:
        parted, whole = (self.reference, self.candidate) if rule.verb == "fuse" else (self.candidate, self.reference)
        parts = rule.left if rule.verb == "fuse" else rule.right
        groups: dict[Point, dict[int, Point]] = defaultdict(dict)
        for point in parted.all:
            if (part := rule.part(point)) is not None:
                groups[whole.like(part.fused) or part.fused].setdefault(part.number, point)
        if not groups:
            self.idle[rule] = matches_nothing(rule, parts[0], f"the {parted.role}", parted.seen)
            return
        if not any(fused in whole.all for fused in groups):
            name = rule.right[0] if rule.verb == "fuse" else rule.left[0]
            self.idle[rule] = matches_nothing(rule, name, f"the {whole.role}", whole.seen)
            return
        for fused, group in groups.items():
            members = [group[number] for number in sorted(group)]
            if fused not in whole.all:
                for point in members:
                    parted.say(
                        point, f"the rule `{rule}` makes it a part of {fused}, which the {whole.role} does not have."
                    )
                continue
            if fused not in whole.free or any(point not in parted.free for point in members):
                continue  # an earlier rule has spoken
            if (why := _cannot_fuse(rule, members, fused, parted, whole)) is not None:
                for point in members:
                    parted.settle(point, why)
                whole.settle(fused, why)
                continue
            start = 0
            for point in members:
                cut = None
                if fused.side in ("output", "grad_output"):
                    width = _width(parted.all[point])
                    cut, start = (start, start + width), start + width
                because = f"rule `{rule}`" + (f", columns {cut[0]} to {cut[1]}" if cut else ", one input for all")
                if rule.verb == "fuse":
                    self.pairs.append(Pair(point, fused, "override", because, candidate_cut=cut))
                else:
                    self.pairs.append(Pair(fused, point, "override", because, reference_cut=cut))
                parted.take(point)
            whole.take(fused)

    # By values

    def leaves(self, apart: Apart) -> None:
        for ours, theirs in self._values():
            sides = [self.reference.all[point] for point in ours], [self.candidate.all[point] for point in theirs]
            found = pair_leaves(*sides, apart)
            pairs = found.pairs or exchanged(*sides, apart)
            if not found.pairs and pairs and not self._agrees_after(ours[-1], apart):
                continue
            for pair in pairs:
                self.add(Pair(pair.reference, pair.candidate, "leaves", pair.because))
            for run, left in ((self.reference, found.only_reference), (self.candidate, found.only_candidate)):
                for point, why in left:
                    run.settle(point, why)

    def _agrees_after(self, point: Point, apart: Apart) -> bool:
        """Tell whether the next output outside a module is the same in both runs: what it gave was taken rightly."""
        points = list(self.reference.all)
        after = (each for each in points[points.index(point) + 1 :] if each.side == "output" and not each.op)
        outside = (each for each in after if each.name != point.name and not each.name.startswith(f"{point.name}."))
        following = next(outside, None)
        if following is None or following not in self.candidate.all:
            return False
        forms = {run.all[following].form for run in (self.reference, self.candidate)}
        return len(forms) == 1 and apart(following, following) < NEAR

    def _values(self) -> Iterator[tuple[list[Point], list[Point]]]:
        """Go through the values that both runs have: of the same name, or of one that means the same and is unique."""
        for means in (lambda run: _own_place, lambda run: run.means_place):
            ours, theirs = (grouped(run.open, means(run)) for run in (self.reference, self.candidate))
            for key, points in ours.items():
                partners = theirs.get(key, [])
                if all(len({point.name for point in side}) == 1 for side in (points, partners)):
                    yield points, partners

    # By name

    def exact(self) -> None:
        theirs = set(self.candidate.open)
        for point in self.reference.open:
            if point in theirs:
                self.add(Pair(point, point, "exact", "the same name"))

    def understand(self) -> None:
        """Find out what every name means."""
        mains = [run.names.main for run in (self.reference, self.candidate)]
        roles = {main.role for main in mains if main is not None and main.role is not None}
        together = None not in mains and len(roles) < 2
        for run, main in zip((self.reference, self.candidate), mains, strict=True):
            run.meaning = canonical(run.names, without=main.role if together and main is not None else None)

    def normalised(self) -> None:
        self._pair_unique(*(grouped(run.all, _unwrapped_name) for run in (self.reference, self.candidate)))
        self._pair_unique(*(grouped(run.all, run.means) for run in (self.reference, self.candidate)))
        self._pair_unique(*(grouped(run.all, run.means_whole) for run in (self.reference, self.candidate)))

    def _pair_unique(self, reference: dict[Meaning, list[Point]], candidate: dict[Meaning, list[Point]]) -> None:
        ours, theirs = set(self.reference.open), set(self.candidate.open)
        for key, points in reference.items():
            partners = candidate.get(key, [])
            if len(points) != 1 or len(partners) != 1 or points[0] not in ours or partners[0] not in theirs:
                continue
            a, b = points[0], partners[0]
            if a.leaf == b.leaf or same_leaf(a, b):
                self.add(Pair(a, b, "normalised", _same_meaning(a, b)))

    # By order

    def in_order(self) -> None:
        for by_ending in (True, False):
            tables = [self._by_shape(run, ending=by_ending) for run in (self.reference, self.candidate)]
            for key, ours in tables[0].items():
                theirs = tables[1].get(key, [])
                if len(ours) != len(theirs):
                    continue
                if not self._between_the_same(ours, theirs):
                    continue
                if not _numbers_agree(ours, theirs, self.reference, self.candidate):
                    continue
                shape = self.reference.all[ours[0]].shape
                for at, (a, b) in enumerate(zip(ours, theirs, strict=True), start=1):
                    which = f"{_ordinal(at)} of {len(ours)}" if len(ours) > 1 else "the only one left"
                    because = f"{which} of shape {list(shape or ())}, by order alone: the weakest evidence"
                    self.add(Pair(a, b, "order", because))

    def _between_the_same(self, ours: list[Point], theirs: list[Point]) -> bool:
        """Tell whether each two ran after the same pair, so that nothing is paired across what is known."""
        before = self._before
        return all(before[0].get(a) == before[1].get(b) for a, b in zip(ours, theirs, strict=True))

    @cached_property
    def _before(self) -> tuple[dict[Point, Point], dict[Point, Point]]:
        """Return, for the free points of each run, the last point of that side before it that has a partner by name.

        Both in the reference's names.
        """
        named = [pair for pair in self.pairs if pair.reference_cut is None and pair.candidate_cut is None]
        ours = {pair.reference: pair.reference for pair in named}
        theirs = {pair.candidate: pair.reference for pair in named}
        return _last_known(self.reference, ours), _last_known(self.candidate, theirs)

    def _by_shape(self, run: RunPoints, *, ending: bool) -> dict[tuple[object, ...], list[Point]]:
        found: dict[tuple[object, ...], list[Point]] = defaultdict(list)
        for point in run.open:
            shape = run.all[point].shape
            if shape is not None:
                name, side, op, leaf = run.means(point)
                what = (side, op, None if primary(point) else leaf, tower_of(name), shape)
                found[(*what, ending_of(name) if ending else None)].append(point)
        return found


def _cannot_fuse(
    rule: PairingRule, members: list[Point], fused: Point, parted: RunPoints, whole: RunPoints
) -> str | None:
    """Return why the parts of a declared fusion cannot be compared with the whole; None when they can."""
    parts = max(len(rule.left), len(rule.right))
    if fused.side == "grad_input":
        return (
            f"the rule `{rule}` fuses it, and the gradient of a fused input is the sum over its parts: "
            "there is nothing to compare one part with."
        )
    if fused.side == "input":
        return None
    if len(members) < parts:
        have = ", ".join(map(str, members))
        return f"the rule `{rule}` needs {parts} parts of {fused}, and the {parted.role} has {len(members)}: {have}."
    if not whole.all[fused].shape or not all(parted.all[point].shape for point in members):
        return f"the rule `{rule}` cuts {fused} along its last axis, and not all of these have a shape to cut."
    widths = [_width(parted.all[point]) for point in members]
    if sum(widths) != _width(whole.all[fused]):
        return (
            f"the rule `{rule}` does not fit: the parts are {' + '.join(map(str, widths))} = {sum(widths)} wide, "
            f"{fused} of the {whole.role} is {_width(whole.all[fused])}."
        )
    return None


def _last_known(run: RunPoints, known: Mapping[Point, Point]) -> dict[Point, Point]:
    last: dict[str, Point] = {}
    found: dict[Point, Point] = {}
    for point in run.all:
        if point in known:
            last[point.side] = known[point]
        elif point.side in last:
            found[point] = last[point.side]
    return found


def _width(seen: RunPoint) -> int:
    return seen.shape[-1] if seen.shape else 0


def _same_meaning(reference: Point, candidate: Point) -> str:
    words = [] if reference.name == candidate.name else [f"{reference.place} is {candidate.place}"]
    if reference.leaf != candidate.leaf:
        leaves = [leaf_text(point.leaf) or "the value itself" for point in (reference, candidate)]
        words.append(f"{leaves[0]} is {leaves[1]}")
    return ", ".join(words)


def _numbers_agree(ours: list[Point], theirs: list[Point], reference: RunPoints, candidate: RunPoints) -> bool:
    """Tell whether pairing in order contradicts the numbers in the names; one run may count from 1."""
    pairs = [(reference.numbers(a), candidate.numbers(b)) for a, b in zip(ours, theirs, strict=True)]
    counted = [(a, b) for a, b in pairs if a and b]
    if all(a == b for a, b in counted):
        return True
    shifts = {b[0] - a[0] for a, b in counted if len(a) == len(b) and a[1:] == b[1:]}
    if len(counted) < max(2, len(pairs)) or shifts not in ({1}, {-1}) or any(a[1:] != b[1:] for a, b in counted):
        return False
    firsts = [sorted({each[side][0] for each in counted}) for side in (0, 1)]
    return {firsts[0][0], firsts[1][0]} == {0, 1} and len(firsts[0]) > 1


def _ordinal(n: int) -> str:
    ending = "th" if n % 100 in (11, 12, 13) else {1: "st", 2: "nd", 3: "rd"}.get(n % 10, "th")
    return f"{n}{ending}"


def _flattened(pairs: list[Pair], rules: Sequence[PairingRule]) -> list[Pair]:
    return [
        replace(pair, flat=True)
        if any(rule.covers(pair.reference) or rule.covers(pair.candidate) for rule in rules)
        else pair
        for pair in pairs
    ]
