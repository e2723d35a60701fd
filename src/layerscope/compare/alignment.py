"""Which point of one run is which of the other, and how that is known.

    align([Seen(Point("model.layers.0"), (2, 8), 1)], [Seen(Point("layers.0"), (2, 8), 1)]).pairs

Four ways, the surest first: a declared rule, the same name, a name that means the same (`normalised`), and, where
nothing else is left, the order of execution among equally many points of one shape. What finds no partner is a result
too, with a sentence. A guess is never made: what two points of one run could be, neither is.
"""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from difflib import SequenceMatcher
from functools import cached_property
from typing import Literal, NamedTuple

from layerscope.compare.rules import Rule
from layerscope.errors import NoSuchPoint
from layerscope.points import SIDES, Leaf, Moment, Point, escape, leaf_text, unwrapped

__all__ = ["Alignment", "Method", "Pair", "Seen", "align", "pair_moments"]

Method = Literal["override", "exact", "normalised", "order"]


@dataclass(frozen=True, slots=True)
class Seen:
    """A point of one run, as alignment sees it: the shape of its first record (None: only statistics were kept)."""

    point: Point
    shape: tuple[int, ...] | None
    count: int


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


def align(reference: Sequence[Seen], candidate: Sequence[Seen], *, rules: Sequence[Rule] = ()) -> Alignment:
    """Pair the points of two runs, each given in its order of execution.

    Raises NoSuchPoint when a rule matches nothing, because a rule that silently matches nothing looks exactly like one
    that worked.
    """
    ignoring = [rule for rule in rules if rule.verb == "ignore"]
    ignored = {
        seen.point: None for seen in (*reference, *candidate) if any(rule.covers(seen.point) for rule in ignoring)
    }
    work = _Work(
        _Run("reference", [seen for seen in reference if seen.point not in ignored]),
        _Run("candidate", [seen for seen in candidate if seen.point not in ignored]),
    )
    for rule in ignoring:
        if not any(map(rule.covers, ignored)):
            raise NoSuchPoint(_matches_nothing(rule, rule.left[0], "either run", (*reference, *candidate)))
    for rule in rules:
        if rule.verb in ("pair", "rename"):
            work.override(rule)
        elif rule.verb in ("fuse", "split"):
            work.fuse(rule)
    work.exact()
    work.normalised()
    work.in_order()
    pairs = _flattened(work.pairs, [rule for rule in rules if rule.verb == "flat"], (*reference, *candidate))
    reasons = _Reasons(work)
    place = {seen.point: at for at, seen in enumerate(work.reference.seen)}
    return Alignment(
        tuple(sorted(pairs, key=lambda pair: place[pair.reference])),
        tuple((point, reasons.why(work.reference, work.candidate, point)) for point in work.reference.free),
        tuple((point, reasons.why(work.candidate, work.reference, point)) for point in work.candidate.free),
        tuple(ignored),
    )


def pair_moments(
    reference: Sequence[Moment], candidate: Sequence[Moment]
) -> tuple[list[tuple[Moment, Moment, str]], list[Moment], list[Moment]]:
    """Pair the moments of two runs, rank by rank; the words say how where they are not the same moment.

    Where no moment is the same: by step and call when one run counts epochs and the other does not, else in order when
    there are equally many. What is left of each side comes back as well.
    """
    pairs: list[tuple[Moment, Moment, str]] = []
    rest = ([*reference], [*candidate])
    for rank in sorted({moment.rank for moment in reference} & {moment.rank for moment in candidate}):
        ours, theirs = (sorted(m for m in side if m.rank == rank) for side in (reference, candidate))
        pairs += _same_moments(ours, theirs) or _same_steps(ours, theirs) or _moments_in_order(ours, theirs)
    for at, side in enumerate(rest):
        paired = {pair[at] for pair in pairs}
        side[:] = [moment for moment in side if moment not in paired]
    order = {moment: at for at, moment in enumerate(reference)}
    return sorted(pairs, key=lambda pair: order[pair[0]]), *rest


# Moments -----------------------------------------------------------------------------------------


def _same_moments(reference: list[Moment], candidate: list[Moment]) -> list[tuple[Moment, Moment, str]]:
    there = set(candidate)
    return [(moment, moment, "") for moment in reference if moment in there]


def _same_steps(reference: list[Moment], candidate: list[Moment]) -> list[tuple[Moment, Moment, str]]:
    epochs = [{moment.epoch is None for moment in side} for side in (reference, candidate)]
    if epochs not in ([{True}, {False}], [{False}, {True}]):
        return []
    tables = [{(m.step, m.call): m for m in side} for side in (reference, candidate)]
    if len(tables[0]) < len(reference) or len(tables[1]) < len(candidate):
        return []  # steps that begin anew in each epoch say nothing without it
    both = [key for key in tables[0] if key in tables[1]]
    return [(tables[0][key], tables[1][key], "by step: one run has no epochs") for key in both]


def _moments_in_order(reference: list[Moment], candidate: list[Moment]) -> list[tuple[Moment, Moment, str]]:
    if len(reference) != len(candidate):
        return []
    return [(ours, theirs, "in order") for ours, theirs in zip(reference, candidate, strict=True)]


# Names that mean the same ------------------------------------------------------------------------

_PREFIXES = frozenset({"model", "transformer", "backbone", "base_model", "language_model", "module"})
_STACKS = frozenset({"layers", "layer", "h", "blocks", "block"})
_NUMBERED = re.compile(r"(layers?|h|blocks?)_(0|[1-9][0-9]{0,8})")
_ROLES = frozenset({"encoder", "decoder"})
# Parts of a model beside its main stack: never taken for the prefix that an architecture gives to its base model.
_TOWER = re.compile(
    r"vis(ion|ual)|audio|image|video|text|speech|encoder|decoder|tower|draft|mtp|projector|adapter|qformer"
)
_EMBEDDINGS = frozenset({"embed_tokens", "wte", "embeddings", "embedding", "word_embeddings", "tok_embeddings"})
_LOGITS = frozenset({"lm_head", "logits"})


class _Root(NamedTuple):
    """Where a stack of numbered layers hangs: what comes before its word, less the usual prefixes."""

    before: tuple[str, ...]

    @property
    def role(self) -> str | None:
        return self.before[0] if self.before else None

    @property
    def is_main(self) -> bool:
        return not self.before or (len(self.before) == 1 and self.before[0] in _ROLES)


@dataclass(slots=True)
class _Names:
    """The names of one run, less wrappers and prefixes, and the stacks of layers they show."""

    parts: dict[str, tuple[str, ...]]
    roots: set[_Root]
    roles: set[str]

    @classmethod
    def of(cls, names: Iterable[str]) -> _Names:
        parts = {name: _stripped(name) for name in names}
        roots = {root for each in parts.values() if (root := _root(each)) is not None}
        firsts = {root.before[0] if root.before else "" for root in roots}
        if len(firsts) == 1 and (prefix := firsts.pop()) and not _TOWER.search(prefix):
            parts = {name: each[1:] if each[:1] == (prefix,) else each for name, each in parts.items()}
            roots = {_Root(root.before[1:]) for root in roots}
        return cls(parts, roots, {each[0] for each in parts.values() if each and each[0] in _ROLES})

    @property
    def main(self) -> _Root | None:
        """The one stack that can be meant by `layers.3`; None when there is none, or several."""
        mains = [root for root in self.roots if root.is_main]
        return mains[0] if len(mains) == 1 and len(self.roles) < 2 else None


def _stripped(name: str) -> tuple[str, ...]:
    parts = unwrapped(name).split(".") if name else []
    while parts and parts[0] in _PREFIXES:
        del parts[0]
    split: list[str] = []
    for part in parts:
        match = _NUMBERED.fullmatch(part)
        split += match.groups() if match else (part,)
    return tuple(split)


def _stack(parts: Sequence[str]) -> int | None:
    """Return where the outermost stack's word is."""
    for at, part in enumerate(parts[:-1]):
        if part in _STACKS and parts[at + 1].isdecimal():
            return at
    return None


def _root(parts: tuple[str, ...]) -> _Root | None:
    at = _stack(parts)
    return None if at is None else _Root(parts[:at])


def _canonical(names: _Names, *, without: str | None) -> dict[str, str]:
    """Return what each name means: main layers as `layers.3`, less the role `without` of the only stack there is."""
    there = {".".join(parts) for parts in names.parts.values()}
    found: dict[str, str] = {}
    for name, parts in names.parts.items():
        if parts[-1:] == ("base_layer",) and ".".join(parts[:-1]) not in there:
            parts = parts[:-1]
        if without is not None and len(parts) > 1 and parts[0] == without:
            parts = parts[1:]
        if (at := _stack(parts)) is not None:
            parts = (*parts[:at], "layers", *parts[at + 1 :])
        elif len(parts) == 1 and parts[0] in _EMBEDDINGS:
            parts = ("embedding",)
        elif len(parts) == 1 and parts[0] in _LOGITS:
            parts = ("logits",)
        found[name] = ".".join(parts)
    return found


# What a module gives or takes first of all, as runtimes and versions write it.
_WHOLE: tuple[Leaf, ...] = ((), (0,), ("last_hidden_state",), ("logits",))
_FIRST: tuple[Leaf, ...] = ((), (0,), ("hidden_states",), ("input",))


def _primary(point: Point) -> bool:
    return point.leaf in (_FIRST if point.side in ("input", "grad_input") else _WHOLE)


def _same_leaf(a: Point, b: Point) -> bool:
    """Tell whether two primary leaves may be one value: one is bare, or one is the first argument and has no name."""
    return () in (a.leaf, b.leaf) or (a.side in ("input", "grad_input") and (0,) in (a.leaf, b.leaf))


# The work ----------------------------------------------------------------------------------------

_Key = tuple[str, str, bool]  # name, side, operation
_Meaning = tuple[str, str, bool, Leaf | None]


class _Run:
    """One run's points, and which of them are still free."""

    def __init__(self, role: str, seen: Sequence[Seen]) -> None:
        self.role = role
        self.seen = list({each.point: each for each in seen}.values())
        self.free: dict[Point, Seen] = {each.point: each for each in self.seen}
        self.all: dict[Point, Seen] = dict(self.free)
        self.said: dict[Point, str] = {}
        self.settled: set[Point] = set()
        self.meaning: dict[str, str] = {}
        self._numbers: dict[str, tuple[int, ...]] = {}

    def at(self, name: str, point: Point) -> list[Point]:
        """Return the points of one module or operation and side, whatever the leaf."""
        return self._places.get((name, point.side, point.op), [])

    def like(self, point: Point) -> Point | None:
        """Return the point itself, or the one whose leaf may be meant by it."""
        if point in self.all:
            return point
        found = [each for each in self.at(point.name, point) if _primary(each)]
        if len(found) == 1 and _primary(point) and _same_leaf(found[0], point):
            return found[0]
        return None

    def take(self, point: Point) -> None:
        del self.free[point]

    def say(self, point: Point, why: str) -> None:
        """Keep what a rule found, for the case that no name finds a partner either."""
        self.said.setdefault(point, why)

    def settle(self, point: Point, why: str) -> None:
        """Leave a point without a partner, because a rule says what it is and that cannot be compared."""
        self.said[point] = why
        self.settled.add(point)

    @property
    def open(self) -> list[Point]:
        """The points that may still be paired."""
        return [point for point in self.free if point not in self.settled]

    @cached_property
    def _places(self) -> dict[_Key, list[Point]]:
        found: dict[_Key, list[Point]] = defaultdict(list)
        for point in self.all:
            found[point.name, point.side, point.op].append(point)
        return found

    def means(self, point: Point) -> _Meaning:
        """Return what a point is, whatever its name."""
        name = point.name if point.op else self.meaning[point.name]
        return name, point.side, point.op, point.leaf

    def means_whole(self, point: Point) -> _Meaning | None:
        """Return what a point is, whatever its leaf is called; None for a leaf that is not the value as such."""
        return (*self.means(point)[:3], None) if _primary(point) else None

    def numbers(self, point: Point) -> tuple[int, ...]:
        """Return the numbers that count modules in what a point's name means."""
        if point.name not in self._numbers:
            self._numbers[point.name] = _numbers(self.means(point)[0])
        return self._numbers[point.name]

    @cached_property
    def names(self) -> _Names:
        return _Names.of(dict.fromkeys(point.name for point in self.all if not point.op))


def _grouped(points: Iterable[Point], means: Callable[[Point], _Meaning | None]) -> dict[_Meaning, list[Point]]:
    """Return every point of a run, paired or not, by what it means: what two share, neither is."""
    found: dict[_Meaning, list[Point]] = defaultdict(list)
    for point in points:
        if (meaning := means(point)) is not None:
            found[meaning].append(point)
    return found


def _unwrapped_name(point: Point) -> _Meaning:
    name = point.name if point.op else unwrapped(point.name).removeprefix("base_model.model.")
    return name, point.side, point.op, point.leaf


class _Work:
    """The pairs so far, and what is free on both sides."""

    def __init__(self, reference: _Run, candidate: _Run) -> None:
        self.reference, self.candidate = reference, candidate
        self.pairs: list[Pair] = []

    def add(self, pair: Pair) -> None:
        self.pairs.append(pair)
        self.reference.take(pair.reference)
        self.candidate.take(pair.candidate)

    # Declared

    def override(self, rule: Rule) -> None:
        found = [(point, meant) for point in self.reference.all if (meant := rule.counterpart(point)) is not None]
        if not found:
            raise NoSuchPoint(_matches_nothing(rule, rule.left[0], "the reference", self.reference.seen))
        there = [(point, meant, self.candidate.like(meant)) for point, meant in found]
        if not any(partner is not None for _, _, partner in there):
            raise NoSuchPoint(_matches_nothing(rule, rule.right[0], "the candidate", self.candidate.seen))
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

    def fuse(self, rule: Rule) -> None:
        parted, whole = (self.reference, self.candidate) if rule.verb == "fuse" else (self.candidate, self.reference)
        parts = rule.left if rule.verb == "fuse" else rule.right
        groups: dict[Point, dict[int, Point]] = defaultdict(dict)
        for point in parted.all:
            if (part := rule.part(point)) is not None:
                groups[whole.like(part.fused) or part.fused].setdefault(part.number, point)
        if not groups:
            raise NoSuchPoint(_matches_nothing(rule, parts[0], f"the {parted.role}", parted.seen))
        if not any(fused in whole.all for fused in groups):
            name = rule.right[0] if rule.verb == "fuse" else rule.left[0]
            raise NoSuchPoint(_matches_nothing(rule, name, f"the {whole.role}", whole.seen))
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

    # By name

    def exact(self) -> None:
        theirs = set(self.candidate.open)
        for point in self.reference.open:
            if point in theirs:
                self.add(Pair(point, point, "exact", "the same name"))

    def normalised(self) -> None:
        mains = [run.names.main for run in (self.reference, self.candidate)]
        roles = {main.role for main in mains if main is not None and main.role is not None}
        together = None not in mains and len(roles) < 2
        for run, main in zip((self.reference, self.candidate), mains, strict=True):
            run.meaning = _canonical(run.names, without=main.role if together and main is not None else None)
        self._pair_unique(*(_grouped(run.all, _unwrapped_name) for run in (self.reference, self.candidate)))
        self._pair_unique(*(_grouped(run.all, run.means) for run in (self.reference, self.candidate)))
        self._pair_unique(*(_grouped(run.all, run.means_whole) for run in (self.reference, self.candidate)))

    def _pair_unique(self, reference: dict[_Meaning, list[Point]], candidate: dict[_Meaning, list[Point]]) -> None:
        ours, theirs = set(self.reference.open), set(self.candidate.open)
        for key, points in reference.items():
            partners = candidate.get(key, [])
            if len(points) != 1 or len(partners) != 1 or points[0] not in ours or partners[0] not in theirs:
                continue
            a, b = points[0], partners[0]
            if a.leaf == b.leaf or _same_leaf(a, b):
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

    def _by_shape(self, run: _Run, *, ending: bool) -> dict[tuple[object, ...], list[Point]]:
        found: dict[tuple[object, ...], list[Point]] = defaultdict(list)
        for point in run.open:
            shape = run.all[point].shape
            if shape is not None:
                name, side, op, leaf = run.means(point)
                what = (side, op, None if _primary(point) else leaf, _tower(name), shape)
                found[(*what, _ending(name) if ending else None)].append(point)
        return found


def _cannot_fuse(rule: Rule, members: list[Point], fused: Point, parted: _Run, whole: _Run) -> str | None:
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


def _last_known(run: _Run, known: Mapping[Point, Point]) -> dict[Point, Point]:
    last: dict[str, Point] = {}
    found: dict[Point, Point] = {}
    for point in run.all:
        if point in known:
            last[point.side] = known[point]
        elif point.side in last:
            found[point] = last[point.side]
    return found


def _width(seen: Seen) -> int:
    return seen.shape[-1] if seen.shape else 0


def _same_meaning(reference: Point, candidate: Point) -> str:
    words = [] if reference.name == candidate.name else [f"{reference.place} is {candidate.place}"]
    if reference.leaf != candidate.leaf:
        leaves = [leaf_text(point.leaf) or "the value itself" for point in (reference, candidate)]
        words.append(f"{leaves[0]} is {leaves[1]}")
    return ", ".join(words)


def _numbers(name: str) -> tuple[int, ...]:
    """Return the numbers that count modules in a name: `h.3.mlp` and `layer_3.mlp` have (3,), `fc1` has none."""
    return tuple(int(n) for n in re.findall(r"(?:(?<![^.])|(?<=_))[0-9]{1,9}(?![^.])", name))


def _numbers_agree(ours: list[Point], theirs: list[Point], reference: _Run, candidate: _Run) -> bool:
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


def _ending(name: str) -> str:
    return next((part for part in reversed(name.split(".")) if part and not part.isdecimal()), "")


def _tower(name: str) -> str:
    """Return the part of a name that says in which of several stacks it is, so that they are never mixed."""
    return next((part for part in name.split(".") if _TOWER.search(part)), "")


def _ordinal(n: int) -> str:
    ending = "th" if n % 100 in (11, 12, 13) else {1: "st", 2: "nd", 3: "rd"}.get(n % 10, "th")
    return f"{n}{ending}"


def _flattened(pairs: list[Pair], rules: Sequence[Rule], seen: Sequence[Seen]) -> list[Pair]:
    for rule in rules:
        if not any(rule.covers(each.point) for each in seen):
            raise NoSuchPoint(_matches_nothing(rule, rule.left[0], "either run", seen))
    return [
        replace(pair, flat=True)
        if any(rule.covers(pair.reference) or rule.covers(pair.candidate) for rule in rules)
        else pair
        for pair in pairs
    ]


# What to say -------------------------------------------------------------------------------------

_FUSED: tuple[tuple[tuple[str, ...], tuple[str, ...]], ...] = (
    (("q_proj", "k_proj", "v_proj"), ("qkv_proj", "qkv", "c_attn", "query_key_value", "Wqkv", "W_pack", "in_proj")),
    (("query", "key", "value"), ("qkv_proj", "qkv", "c_attn", "query_key_value", "Wqkv", "in_proj")),
    (("q", "k", "v"), ("qkv", "qkv_proj")),
    (("gate_proj", "up_proj"), ("gate_up_proj", "gate_up")),
    (("w1", "w3"), ("w13", "gate_up_proj")),
)
_MOST_LOOKS = 4_000  # name against name, in one alignment; each takes up to 100 microseconds


class _Left:
    """One run once all pairs are made: what is still free, by what a sentence asks for."""

    def __init__(self, run: _Run) -> None:
        self.run = run
        self.meanings = _grouped(run.all, run.means)
        self.sizes = Counter((point.side, seen.shape) for point, seen in run.free.items())
        self.endings: dict[tuple[str, str], list[Point]] = defaultdict(list)
        self.places: dict[tuple[str, str, tuple[int, ...]], list[Point]] = defaultdict(list)
        for point in run.free or run.all:
            ending = _ending(point.name)
            self.endings[ending, point.side].append(point)
            self.places[ending, point.side, run.numbers(point)].append(point)

    def beside(self, numbers: tuple[int, ...], side: str, endings: Sequence[str]) -> Point | None:
        """Return a free point with such an ending in the same layer."""
        return next((self.places[key][0] for end in endings if (key := (end, side, numbers)) in self.places), None)


class _Reasons:
    """Why a point found no partner, in one sentence; looking for near names has a budget."""

    def __init__(self, work: _Work) -> None:
        self.left = {run.role: _Left(run) for run in (work.reference, work.candidate)}
        self.looks = _MOST_LOOKS
        self.close: dict[tuple[str, str, str], list[str]] = {}

    def why(self, run: _Run, other: _Run, point: Point) -> str:
        """Return the sentence for one point of `run`."""
        if (said := run.said.get(point)) is not None:
            return said
        if (fused := self._fused(run, other, point)) is not None:
            return fused
        first = (
            self._several(run, other, point)
            or _stacks(run, other, point)
            or _other_side(other, point)
            or f"no point of the {other.role} has this name, nor a normalised one"
        )
        return "; ".join(filter(None, (first, self._order(run, other, point), self._nearest(run, other, point)))) + "."

    def _fused(self, run: _Run, other: _Run, point: Point) -> str | None:
        stem, _, ending = point.name.rpartition(".")
        numbers = run.numbers(point)
        for parts, wholes in _FUSED:
            if ending not in (*parts, *wholes):
                continue
            is_part = ending in parts
            partner = self.left[other.role].beside(numbers, point.side, wholes if is_part else parts[:1])
            if partner is None:
                continue
            above = stem if is_part else partner.name.rpartition(".")[0]
            names = [f"{above}.{part}" if above else part for part in parts]
            if all((run if is_part else other).at(name, point) for name in names):
                line = _suggestion(names, partner if is_part else point, split=is_part == (run.role == "candidate"))
                what = "which may hold it" if is_part else "which may be a part of it"
                return f"the {other.role} has {partner}, {what}; if so, the rule is `{line}`."
        return None

    def _several(self, run: _Run, other: _Run, point: Point) -> str | None:
        key = run.means(point)
        there = self.left[other.role].meanings.get(key)
        if not there:
            return None
        for who, shared in ((run, self.left[run.role].meanings[key]), (other, there)):
            if len(shared) > 1:
                named = ", ".join(map(str, shared[:3]))
                return f"{len(shared)} points of the {who.role} would be {key[0] or 'the whole model'}: {named}"
        return f"it would be {there[0]}, which is paired otherwise" if there[0] not in other.free else None

    def _order(self, run: _Run, other: _Run, point: Point) -> str | None:
        shape = run.all[point].shape
        here, there = (self.left[who.role].sizes[point.side, shape] for who in (run, other))
        if shape is None or not there:
            return None
        if here == there:
            return "order and shape alone do not say which one it is"
        return f"of shape {list(shape)}, {here} are left here and {there} there: pairing them in order would be a guess"

    def _nearest(self, run: _Run, other: _Run, point: Point) -> str | None:
        left, ending = self.left[other.role], _ending(point.name)
        endings = [ending] if (ending, point.side) in left.endings else self._like(ending, point.side, left)
        found: list[Point] = []
        for end in endings:
            found += left.places.get((end, point.side, run.numbers(point)), left.endings[end, point.side])[:3]
        near = list(dict.fromkeys(each.place for each in found if each != point))[:3]
        return f"nearest: {', '.join(near)}" if near else None

    def _like(self, ending: str, side: str, left: _Left) -> list[str]:
        key = (ending, side, left.run.role)
        if key not in self.close and not self.looks:
            return []
        if key not in self.close:
            ends = [end for end, of in left.endings if of == side][: self.looks]
            self.looks -= len(ends)
            self.close[key] = _nearest(ending, ends)
        return self.close[key]


def _stacks(run: _Run, other: _Run, point: Point) -> str | None:
    if point.op or _stack(run.names.parts[point.name]) is None:
        return None
    for who in (run, other):
        mains = {".".join((*root.before, "layers")) for root in who.names.roots if root.is_main}
        several = who.names.roles if len(who.names.roles) > 1 else mains
        if len(several) > 1:
            return f"the {who.role} has several stacks ({', '.join(sorted(several))}), and none is the main one"
    ours, theirs = run.names.main, other.names.main
    if ours is not None and theirs is not None and ours != theirs and None not in (ours.role, theirs.role):
        return f"these are the {run.role}'s {ours.role} layers, and the {other.role} has {theirs.role} layers"
    return None


def _other_side(other: _Run, point: Point) -> str | None:
    if leaves := other.at(point.name, point):
        named = ", ".join(map(str, leaves[:3]))
        return f"the {other.role} has {named}, which may be another value"
    sides = [side for side in SIDES if other.at(point.name, replace(point, side=side))]
    return f"the {other.role} has {point.place}, but only its {', '.join(sides)}" if sides else None


def _suggestion(parts: Sequence[str], fused: Point, *, split: bool) -> Rule:
    """Return the rule that pairs `parts` with `fused`, for every layer at once."""
    names = [
        ".".join("*" if part.isdecimal() else escape(part) for part in name.split(".")) for name in (*parts, fused.name)
    ]
    if len({name.rpartition(".")[0] for name in names}) == 1:
        names = [f"**.{name.rpartition('.')[2]}" for name in names]
    return Rule("split", names[-1], names[:-1]) if split else Rule("fuse", names[:-1], names[-1])


def _matches_nothing(rule: Rule, pattern: str, where: str, seen: Iterable[Seen]) -> str:
    places = list(dict.fromkeys(each.point.place for each in seen))
    # `**.attn` says nothing of where it is: compare with the ends of names only.
    name = pattern if pattern.startswith("op:") else pattern.partition(":")[0]
    asked = name.removeprefix("**.")
    parts = 0 if asked == name else asked.count(".") + 1
    ends = {".".join(place.split(".")[-parts:]): place for place in reversed(places[:_MOST_LOOKS])}
    named = [ends[end] for end in _nearest(asked, ends)] or places[:3]
    among = f"among {len(places)}; nearest: {', '.join(named)}" if places else "which has no points"
    return f"the rule `{rule}` matches nothing: {pattern!r} names no point of {where}, {among}."


def _nearest(asked: str, names: Iterable[str]) -> list[str]:
    """Return at most three of `names` that read like `asked`."""
    matcher = SequenceMatcher(b=asked)
    scored: list[tuple[float, str]] = []
    for name in names:
        matcher.set_seq1(name)
        # The quick ones are upper bounds: without them thousands of names take seconds.
        if matcher.real_quick_ratio() >= 0.6 and matcher.quick_ratio() >= 0.6 and matcher.ratio() >= 0.6:
            scored.append((-matcher.ratio(), name))
    return [name for _, name in sorted(scored)[:3]]
