"""Why a point found no partner, and why a rule found nothing, in a sentence.

Unmatched(reference, candidate).why(reference, candidate, point)
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import replace
from difflib import SequenceMatcher

from layerscope.compare.align.names import ending_of, stack_of
from layerscope.compare.align.pairing import PairingRule
from layerscope.compare.align.run_points import RunPoint, RunPoints, grouped
from layerscope.points import SIDES, Point, escape

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

    def __init__(self, run: RunPoints) -> None:
        self.run = run
        self.meanings = grouped(run.all, run.means)
        self.sizes = Counter((point.side, seen.shape) for point, seen in run.free.items())
        self.endings: dict[tuple[str, str], list[Point]] = defaultdict(list)
        self.places: dict[tuple[str, str, tuple[int, ...]], list[Point]] = defaultdict(list)
        for point in run.free or run.all:
            ending = ending_of(point.name)
            self.endings[ending, point.side].append(point)
            self.places[ending, point.side, run.numbers(point)].append(point)

    def beside(self, numbers: tuple[int, ...], side: str, endings: Sequence[str]) -> Point | None:
        """Return a free point with such an ending in the same layer."""
        return next((self.places[key][0] for end in endings if (key := (end, side, numbers)) in self.places), None)


class Unmatched:
    """Why a point found no partner, in one sentence; looking for near names has a budget."""

    def __init__(self, reference: RunPoints, candidate: RunPoints) -> None:
        self.left = {run.role: _Left(run) for run in (reference, candidate)}
        self.looks = _MOST_LOOKS
        self.close: dict[tuple[str, str, str], list[str]] = {}

    def why(self, run: RunPoints, other: RunPoints, point: Point) -> str:
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

    def _fused(self, run: RunPoints, other: RunPoints, point: Point) -> str | None:
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

    def _several(self, run: RunPoints, other: RunPoints, point: Point) -> str | None:
        key = run.means(point)
        there = self.left[other.role].meanings.get(key)
        if not there:
            return None
        for who, shared in ((run, self.left[run.role].meanings[key]), (other, there)):
            if len(shared) > 1:
                named = ", ".join(map(str, shared[:3]))
                return f"{len(shared)} points of the {who.role} would be {key[0] or 'the whole model'}: {named}"
        return f"it would be {there[0]}, which is paired otherwise" if there[0] not in other.free else None

    def _order(self, run: RunPoints, other: RunPoints, point: Point) -> str | None:
        shape = run.all[point].shape
        here, there = (self.left[who.role].sizes[point.side, shape] for who in (run, other))
        if shape is None or not there:
            return None
        if here == there:
            return "order and shape alone do not say which one it is"
        return f"of shape {list(shape)}, {here} are left here and {there} there: pairing them in order would be a guess"

    def _nearest(self, run: RunPoints, other: RunPoints, point: Point) -> str | None:
        left, ending = self.left[other.role], ending_of(point.name)
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


def _stacks(run: RunPoints, other: RunPoints, point: Point) -> str | None:
    if point.op or stack_of(run.names.parts[point.name]) is None:
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


def _other_side(other: RunPoints, point: Point) -> str | None:
    if leaves := other.at(point.name, point):
        named = ", ".join(map(str, leaves[:3]))
        return f"the {other.role} has {named}, which may be another value"
    sides = [side for side in SIDES if other.at(point.name, replace(point, side=side))]
    return f"the {other.role} has {point.place}, but only its {', '.join(sides)}" if sides else None


def _suggestion(parts: Sequence[str], fused: Point, *, split: bool) -> PairingRule:
    """Return the rule that pairs `parts` with `fused`, for every layer at once."""
    names = [
        ".".join("*" if part.isdecimal() else escape(part) for part in name.split(".")) for name in (*parts, fused.name)
    ]
    if len({name.rpartition(".")[0] for name in names}) == 1:
        names = [f"**.{name.rpartition('.')[2]}" for name in names]
    return PairingRule("split", names[-1], names[:-1]) if split else PairingRule("fuse", names[:-1], names[-1])


def matches_nothing(rule: PairingRule, pattern: str, where: str, seen: Iterable[RunPoint]) -> str:
    """Say that a pattern of a rule names nothing in `where`, and what comes near."""
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
